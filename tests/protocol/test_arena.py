"""Shared memory of fixed size: created, passed on, rejected, released."""

import fcntl
import mmap
import os
import socket
import subprocess
import sys

import pytest

from lucevisor.protocol.arena import PAGE_BYTES, SEALS, Arena, arena_bytes
from lucevisor.protocol.errors import ArenaError
from lucevisor.protocol.loading import ArenaPlan, arena_regions

PLAN = ArenaPlan(boundary=1, region_bytes=5000, n_regions=3)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def memfd(n_bytes, seals=SEALS):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, n_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    "plan", [ArenaPlan(0, 0, 1), ArenaPlan(0, 1, 0), ArenaPlan(0, -4096, -1), ArenaPlan(0, 2**50, 8)]
)
def test_invalid_plans_are_rejected(plan):
    with pytest.raises(ArenaError, match="bytes in total") as caught:
        Arena.create(plan)
    assert caught.value.where == "arena between stages 0 and 1"
    fd = memfd(4096)
    with pytest.raises(ArenaError, match="bytes in total"):
        Arena.attach(fd, plan)


def test_a_pipeline_has_32_stages_at_most() -> None:
    assert arena_bytes(ArenaPlan(0, 4096, arena_regions(32))) > 0
    with pytest.raises(ArenaError, match="66 regions") as caught:
        arena_bytes(ArenaPlan(0, 4096, arena_regions(33)))
    assert caught.value.advice == "use fewer groups: a pipeline has 32 stages at most"


@pytest.mark.parametrize("missing", [SEALS, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_unsealed_memory_is_rejected(missing):
    before = open_fds()
    fd = memfd(arena_bytes(PLAN), SEALS & ~missing)
    with pytest.raises(ArenaError, match="not sealed against resizing"):
        Arena.attach(fd, PLAN)
    assert open_fds() == before  # the descriptor was taken over


def test_too_much_memory_is_an_error_and_leaks_nothing():
    before = open_fds()
    plan = ArenaPlan(3, 1 << 30, 1)
    code = (
        "import resource, sys\n"
        "from lucevisor.protocol.arena import Arena\n"
        "from lucevisor.protocol.errors import ArenaError\n"
        "from lucevisor.protocol.loading import ArenaPlan\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        "    Arena.create(ArenaPlan(3, 1 << 30, 1))\n"
        "except ArenaError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{arena_bytes(plan)} bytes of shared memory could not be allocated" in done.stderr
    assert "arena between stages 3 and 4" in done.stderr
    assert open_fds() == before


def test_a_tensor_keeps_the_memory_mapped():
    torch = pytest.importorskip("torch")
    before = open_fds()
    arena = Arena.create(PLAN)
    user = Arena.attach(os.dup(arena.fd), PLAN)
    rows = torch.frombuffer(user.region(1), dtype=torch.float32, count=1250).view(2, 625)
    part = rows[1]
    user.close()
    arena.close()
    del rows
    part += 1.5  # would be a segmentation fault if the mapping were gone
    assert part.sum().item() == 625 * 1.5
    del part
    assert open_fds() == before


def test_a_foreign_process_maps_what_was_passed():
    a, b = socket.socketpair()
    arena = Arena.create(PLAN)
    arena.region(2)[:5] = b"hello"
    code = (
        "import socket, sys\n"
        "from lucevisor.protocol.arena import Arena\n"
        "from lucevisor.protocol.loading import ArenaPlan\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        "_, fds, _, _ = socket.recv_fds(sock, 1, 1)\n"
        "arena = Arena.attach(fds[0], ArenaPlan(1, 5000, 3))\n"
        "assert arena.region(2)[:5] == b'hello'\n"
        "arena.region(0)[:5] = b'world'\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(b.fileno())], pass_fds=[b.fileno()])
    socket.send_fds(a, [b"x"], [arena.fd])
    assert child.wait() == 0
    assert arena.region(0)[:5] == b"world"
    assert mmap.PAGESIZE == PAGE_BYTES
    arena.close()
    a.close()
    b.close()
