"""Run directories claimed and given back by several processes at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from lucevisor.app import rundir
from lucevisor.app.rundir import AlreadyRunningError, RunDirectory, is_locked, running_supervisors
from lucevisor.cli.admin_client import AdminClient
from lucevisor.errors import ConfigError, LucevisorError
from tests.another_user import as_nobody, needs_root, open_directory


@pytest.fixture(autouse=True)
def runtime(short_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    return short_path


CLAIMS = """
import os, sys, time
from lucevisor.app.rundir import AlreadyRunningError, RunDirectory, read_pid
n = 0
end = time.monotonic() + 1.0
while time.monotonic() < end:
    one = RunDirectory("t")
    try:
        one.claim()
    except AlreadyRunningError:
        continue
    n += 1
    assert read_pid(one.path) == os.getpid(), "another process' pid file"
    (one.own / "mine").write_text("x")
    try:
        holder = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise SystemExit("two processes hold the name")
    time.sleep(0.001)
    assert read_pid(one.path) == os.getpid(), "the pid file was removed by another process"
    assert (one.own / "mine").exists()
    os.close(holder)
    os.unlink(sys.argv[1])
    one.close()
print(n)
"""


def test_many_starts_and_stops_at_once_never_share_a_name(runtime, monkeypatch):
    processes = [
        subprocess.Popen([sys.executable, "-c", CLAIMS, str(runtime / "held")], text=True, stdout=-1, stderr=-1)
        for _ in range(4)
    ]
    ended = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, ended
    assert sum(int(said) for said, _ in ended) > 10
    assert not (runtime / "lucevisor" / "t").exists()


def test_a_name_that_is_taken():
    one = RunDirectory("t")
    one.claim()
    with pytest.raises(AlreadyRunningError, match=rf"'t' runs already \(pid {os.getpid()}\)"):
        RunDirectory("t").claim()
    assert [r.pid for r in running_supervisors()] == [os.getpid()]
    one.close()
    one.close()
    assert not one.path.exists()


def test_whoever_looks_whether_it_is_locked_is_not_taken_for_a_supervisor(monkeypatch):
    monkeypatch.setattr(rundir, "_CLAIM_S", 30.0)
    one = RunDirectory("t")
    one.path.mkdir(parents=True)
    with (one.path / "lock").open("w") as looks:  # as `is_locked` does, for longer
        fcntl.flock(looks, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (looks, fcntl.LOCK_UN))
        timer.start()
        one.claim()
        timer.join()
    assert is_locked(one.path)
    one.close()


@pytest.mark.parametrize("there", ["a file", "a file above", "a broken link"])
def test_a_directory_that_cannot_be_made(runtime, there, monkeypatch):
    monkeypatch.setattr(rundir, "_REMOVED_S", 0.1)
    if there == "a file":
        (runtime / "lucevisor").write_text("")
    elif there == "a file above":
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/dev/null/x")
    else:
        (runtime / "lucevisor").symlink_to("nowhere")
    with pytest.raises(ConfigError) as caught:
        RunDirectory("t").claim()
    assert str(caught.value).startswith("XDG_RUNTIME_DIR = ")
    assert "\n" not in str(caught.value)
    assert "cannot be used" in str(caught.value)


def test_a_full_disk(small_disk, monkeypatch):
    from tests.app.test_logs import fill

    directory: Path = small_disk(32)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    fill(directory / "filler")
    one = RunDirectory("t")
    with pytest.raises(ConfigError, match=r"No space left on device; make room"):
        one.claim()
    assert not one.path.exists(), "nothing is left behind"
    (directory / "filler").unlink()
    one.claim()
    one.close()


OTHER = """
import sys
from lucevisor.app.rundir import RunDirectory
one = RunDirectory("t")
one.claim()
print("claimed", flush=True)
sys.stdin.read(1)
one.close()
print("closed", flush=True)
"""


@pytest.fixture
def other():
    """Another process that holds the name until a byte is written to it."""
    process = subprocess.Popen([sys.executable, "-c", OTHER], text=True, stdin=-1, stdout=-1)
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.communicate(timeout=60)


def test_a_name_is_handed_over_without_a_moment_in_which_it_is_free(runtime):
    old, new = RunDirectory("t"), RunDirectory("t")
    assert not new.join()
    old.claim()
    assert new.join()
    lock = os.dup(old.lock)  # as SCM_RIGHTS does
    old.release()
    assert is_locked(old.path)
    new.adopt(lock)
    with pytest.raises(AlreadyRunningError):
        RunDirectory("t").claim()
    new.close()
    assert not is_locked(new.path)
    assert not new.path.exists()


def test_a_lock_of_another_directory_is_not_adopted(runtime):
    RunDirectory("t").claim()
    other = RunDirectory("u")
    other.claim()
    with pytest.raises(LucevisorError, match="is not that of this directory"):
        RunDirectory("t").adopt(other.lock)
    other.close()


def test_a_supervisor_that_stops_leaves_what_belongs_to_its_successor(runtime, other):
    new = RunDirectory("t")
    assert new.join()
    (new.own / "mine").write_text("x")
    other.stdin.write("x")
    other.stdin.flush()
    assert other.stdout.readline() == "closed\n"
    assert (new.own / "mine").exists()
    new.claim()
    assert (new.own / "mine").exists()
    new.close()
    assert not new.path.exists()


def test_what_killed_supervisors_left_is_removed_by_the_next(runtime):
    stale = runtime / "lucevisor" / "t" / "process-4194304"  # beyond the largest pid
    stale.mkdir(parents=True)
    one = RunDirectory("t")
    one.claim()
    assert not stale.exists()
    one.close()


def test_what_was_removed_is_made_again_and_found(runtime):
    one = RunDirectory("t")
    one.claim()
    for socket in (one.socket, one.handover):
        socket.touch()
    assert one.is_intact
    shutil.rmtree(runtime / "lucevisor")
    assert not one.is_intact
    assert running_supervisors() == []
    one.renew()
    assert [(r.name, r.pid) for r in running_supervisors()] == [("t", os.getpid())]
    assert one.own.is_dir()
    with pytest.raises(AlreadyRunningError):
        RunDirectory("t").claim()
    (one.path / "pid").unlink()
    one.renew()  # the lock file is there, and this process holds it
    assert [r.pid for r in running_supervisors()] == [os.getpid()]
    one.close()
    assert not one.path.exists()


def test_a_name_that_another_took_meanwhile_is_not_taken_back():
    one, other = RunDirectory("t"), RunDirectory("t")
    one.claim()
    shutil.rmtree(one.path)
    other.claim()
    assert not one.is_intact
    with pytest.raises(AlreadyRunningError, match="another supervisor took the name 't'"):
        one.renew()
    other.close()


def test_a_path_that_is_too_long_for_a_socket_is_named(runtime, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / ("x" * 107)))
    with pytest.raises(
        ConfigError, match=r"^XDG_RUNTIME_DIR = .*is too long: a socket in it has \d+ bytes of 107; set"
    ):
        RunDirectory("t")
    with pytest.raises(LucevisorError, match="too long for a socket, which has 107 bytes at most"):
        AdminClient(runtime / ("x" * 107)).call("GET", "/status")


@needs_root
def test_without_a_runtime_directory_there_is_one_below_the_temporary_directory(monkeypatch):
    with open_directory() as directory:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        directory.chmod(0o1777)
        with as_nobody():
            one = RunDirectory("t")
            assert one.path == directory / f"lucevisor-{os.geteuid()}" / "t"
            one.claim()
            assert [r.name for r in running_supervisors()] == ["t"]
            one.close()
        one.path.parent.rmdir()
        one.path.parent.mkdir()  # by root: another user's
        with as_nobody():
            with pytest.raises(ConfigError, match="belongs to another user"):
                running_supervisors()
            with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
                RunDirectory("t").claim()
