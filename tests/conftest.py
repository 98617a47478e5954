"""For all tests: a shell that starts them in the background lets them ignore SIGINT, and so would all they start.

Workers side by side share the cores: torch in each of them, and in the daemons they start, gets one thread.

What a supervisor keeps for later starts (XDG_CACHE_HOME) goes into a directory of this run.

The garbage collector passes over what exists after collection, all modules and tests: half a second a full collection.

What a test, or a command that it calls in this process, sets up for logs ends with the test.

Where there is no GPU, Triton's kernels run under its interpreter, which the environment chooses when they are imported.

Hypothesis: a test says how many examples it is worth. Profile ``ci`` tries a third of them (but no fewer than LEAST,
where the test has as many), ``deep`` (``make slow``) DEEP times as many. Both draw new ones each run and print what
repeats a failure.
"""

import _thread
import atexit
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from lucevisor.protocol import threads

DEEP = 10
LEAST = 30
KERNEL_SAMPLE = ("test_verified.py", "test_basic.py")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))  # it would move along
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)  # what commands print does not depend on who runs the tests
os.environ["LUCEVISOR_VALIDATE"] = "1"  # engines check their accounts when idle
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lucevisor-cache-")
os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"]  # logs of supervisors
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave kernels under the interpreter to ``make kernels``, whose record tests/kernels/test_verified.py checks."""
    if "TRITON_INTERPRET" in os.environ and item.path.parent.name == "kernels" and item.path.name not in KERNEL_SAMPLE:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # hypothesis has marked its tests by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the number of examples of every property as the profile says."""
    deep = config.getoption("--hypothesis-profile") == "deep"
    functions = [i.obj for i in items if isinstance(i, pytest.Function) and i.get_closest_marker("hypothesis")]
    machines = {type(f.__self__) for f in functions if f.__name__ == "runTest"}
    tests = {getattr(f, "__func__", f) for f in functions if f.__name__ != "runTest"}
    for machine in machines:
        machine.settings = scaled(machine.settings, deep)
    for test in tests:  # the decorator refuses to be applied twice
        test._hypothesis_internal_use_settings = scaled(test._hypothesis_internal_use_settings, deep)


def pytest_xdist_auto_num_workers() -> int:
    """Three on two cores: a quarter of the time tests wait for timers, disks and other processes."""
    n_cores = len(os.sched_getaffinity(0))
    return n_cores + n_cores // 2


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Forks daemons; nothing is started before the first."""
    from tests.daemon_forks import Forker  # imports the project, for which the environment above is set first

    one = Forker(tmp_path_factory.mktemp("forker"))
    yield one
    one.close()


@pytest.fixture
def forked_daemons(forker: Any) -> Iterator[None]:
    """Services within this process fork their daemons."""
    with forker.installed():
        yield


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # extensions complain at exit of what is left


def scaled(own: settings, deep: bool) -> settings:
    n = own.max_examples
    return settings(own, max_examples=DEEP * n if deep else max(n // 3, min(n, LEAST)))


@pytest.fixture
def no_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads find no memory to begin, and those that start them wait in vain; ours for a moment only."""
    monkeypatch.setattr(threads, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    for name in ("_start_new_thread", "_start_joinable_thread"):  # what Thread.start calls, by version of Python
        monkeypatch.setattr(threading, name, lambda *_, **__: 0, raising=False)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose paths have 107 bytes at most: ``tmp_path`` may leave them too few."""
    directory = tempfile.mkdtemp(prefix="lv", dir="/tmp")
    yield Path(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def small_disk(short_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a file system of so many KiB; skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(n_kib: int) -> Path:
        directory = short_path / f"disk{len(mounted)}"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={n_kib}k,mode=0700", "tmpfs", str(directory)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
