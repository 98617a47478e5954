"""Triton kernels, one source for cuda and hip, and the functions that launch them.

Imported on an accelerator only: a cpu daemon's environment needs no Triton.  Every kernel has its torch form elsewhere
in ``daemons``, which is what it is tested against.  Invariant: no launch waits for the device.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 asks for a decision, 3.10 would change the default
