"""For all tests: a shell that starts them in the background lets them ignore SIGINT, and so would all they start.

Workers side by side share the cores: torch in each of them, and in the daemons they start, gets one thread.

Where there is no GPU, Triton's kernels run under its interpreter, which the environment chooses when they are imported.
"""

import os
import signal
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
