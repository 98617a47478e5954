"""The budget of host memory: what is held counts, what is closed does not, and no limit is exceeded."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lucevisor.kv_transfer.host_memory import HostFile, HostLease, HostMemory, HostMemoryShort, available_bytes
from lucevisor.placement.result import HostOwner

LIMIT = 100
OWNERS = st.sampled_from([HostOwner.PREFIXES, HostOwner.EXPORTS, HostOwner.JOURNAL])


class Budget(RuleBasedStateMachine):
    """``held``: what a count by hand says; the limit is of the prefixes alone."""

    @initialize(available=st.integers(0, 300))
    def begin(self, available: int) -> None:
        self.available = available
        self.memory = HostMemory(lambda: self.available)
        self.held: list[HostFile | HostLease] = []
        self.fds: list[int] = []

    @rule(owner=OWNERS, n_bytes=st.integers(0, 120))
    def open(self, owner: HostOwner, n_bytes: int) -> None:
        limit = LIMIT if owner is HostOwner.PREFIXES else None
        fits = 2 * n_bytes <= self.available and (limit is None or self.counted(owner) + n_bytes <= limit)
        if fits:
            file = self.memory.open(owner, n_bytes, limit)
            self.held.append(file)
            self.fds.append(file.fileno())
        else:
            with pytest.raises(HostMemoryShort, match=f"of host memory for {owner}"):
                self.memory.open(owner, n_bytes, limit)

    @rule(owner=OWNERS, n_bytes=st.integers(0, 120))
    def lease(self, owner: HostOwner, n_bytes: int) -> None:
        if owner is not HostOwner.PREFIXES:
            self.held.append(self.memory.lease(owner, n_bytes))

    @rule(available=st.integers(0, 300))
    def others_take_memory(self, available: int) -> None:
        self.available = available

    @rule(index=st.integers(0, 50))
    def close(self, index: int) -> None:
        if self.held:
            gone = self.held.pop(index % len(self.held))
            gone.close()
            gone.close()

    @rule(index=st.integers(0, 50))
    def forget_a_lease(self, index: int) -> None:
        leases = [held for held in self.held if isinstance(held, HostLease)]
        if leases:
            self.held.remove(leases[index % len(leases)])
            del leases
            gc.collect(0)

    def counted(self, owner: HostOwner) -> int:
        return sum(held.n_bytes for held in self.held if held.owner is owner)

    @invariant()
    def what_is_held_counts(self) -> None:
        for owner in (HostOwner.PREFIXES, HostOwner.EXPORTS, HostOwner.JOURNAL):
            assert self.memory.used(owner) == self.counted(owner)
        assert self.memory.used(HostOwner.PREFIXES) <= LIMIT

    def teardown(self) -> None:
        for held in self.held:
            held.close()
        assert not any(self.memory.used(owner) for owner in HostOwner)
        for fd in self.fds:
            with pytest.raises(OSError, match="descriptor"):
                os.fstat(fd)


TestBudget = Budget.TestCase


def test_what_the_system_refuses_is_said() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = HostMemory(lambda: 1 << 30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(HostMemoryShort, match=r"1\.00 MiB of host memory for exports: Too many open files"):
            memory.open(HostOwner.EXPORTS, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert memory.used(HostOwner.EXPORTS) == 0


def test_what_a_container_leaves_is_free_and_no_more(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/box/service\n")
    assert available_bytes(proc, cgroups) > 1 << 20
    for folder, limit in (("", "max"), ("box", "9000"), ("box/service", "max")):
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        (cgroups / folder / "memory.max").write_text(f"{limit}\n")
        (cgroups / folder / "memory.current").write_text("7000\n")
        (cgroups / folder / "memory.stat").write_text("anon 3000\nfile 4000\nshmem 1500\n")
    assert available_bytes(proc, cgroups) == 9000 - 7000 + 4000 - 1500
