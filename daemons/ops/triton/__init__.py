"""Triton kernels, one source for cuda and hip, and the functions that launch them.

Imported only for accelerators: a cpu daemon's environment needs no Triton.  Every kernel is tested against a torch form
elsewhere in ``daemons``.  Invariant: no launch synchronises with the host.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 asks for it, 3.10 changes the default
