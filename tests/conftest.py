"""For all tests: a shell that starts them in the background lets them ignore SIGINT, and so would all they start.

Where there is no GPU, Triton's kernels run under its interpreter, which the environment chooses when they are imported.
"""

import os
import signal
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
