"""For all tests: a shell that starts them in the background lets them ignore SIGINT, and so would all they start.

Workers side by side share the cores: torch in each of them, and in the daemons they start, gets one thread.

What a supervisor keeps for later starts (XDG_CACHE_HOME) goes into a directory of this run.

Where there is no GPU, Triton's kernels run under its interpreter, which the environment chooses when they are imported.

Hypothesis: profile ``ci`` always tries the same examples, so that a failure is the change's and comes back when run
again; ``deep`` (``make slow``) tries DEEP times as many, others each time.
"""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DEEP = 10

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))  # it would move along
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lucevisor-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


@pytest.hookimpl(trylast=True)  # hypothesis has marked its tests by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ``deep`` also tests that say how many examples they need try DEEP times as many."""
    if config.getoption("--hypothesis-profile") != "deep":
        return
    functions = [i.obj for i in items if isinstance(i, pytest.Function) and i.get_closest_marker("hypothesis")]
    machines = {type(f.__self__) for f in functions if f.__name__ == "runTest"}
    tests = {getattr(f, "__func__", f) for f in functions if f.__name__ != "runTest"}
    for machine in machines:
        machine.settings = settings(machine.settings, max_examples=DEEP * machine.settings.max_examples)
    for test in tests:  # the decorator refuses to be applied twice
        own = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(own, max_examples=DEEP * own.max_examples)
