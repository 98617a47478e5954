"""For all tests: a shell that starts them in the background lets them ignore SIGINT, and so would all they start.

Workers side by side share the cores: torch in each of them, and in the daemons they start, gets one thread.

What a supervisor keeps for later starts (XDG_CACHE_HOME) goes into a directory of this run.

Where there is no GPU, Triton's kernels run under its interpreter, which the environment chooses when they are imported.
"""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))  # it would move along
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lucevisor-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
