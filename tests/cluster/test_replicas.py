"""A replica on this host and one on another, whose cable is cut: its streams go on here, with the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts, needs_namespaces
from tests.e2e.test_replicas import CONFIG, SAMPLINGS, all_at_once, prompts, replica_of, replicated
from tests.waiting import until

pytestmark = [needs_namespaces, pytest.mark.timeout(300)]

TWO = (
    CONFIG[: CONFIG.index("[placement]")]
    + '[replicas.here]\ngroups = ["a"]\n[replicas.there]\ngroups = ["b"]\n'
    + CONFIG[CONFIG.index("[recovery]") : CONFIG.index("[groups.a0]")]
    + "".join(f'[groups.{name}]\nbackend = "cpu"\nthreads = 1\n' for name in ("a", "b"))
)


async def test_a_cable_that_is_cut_moves_the_streams_of_a_replica_here(tmp_path: Path) -> None:
    asked = [(prompt, SAMPLINGS[i % 4]) for i, prompt in enumerate(prompts(8))]
    with hosts("b", folder=tmp_path, prefix="rep", subnet="10.211.41") as box:
        async with replicated(tmp_path, box.spread(TWO)) as service:
            assert service.replicated is not None
            expected = await all_at_once(service, asked)
            router = service.replicated.router
            assert min(router.n_routed.values()) >= 2
            there = service.replicated.replicas["there"]
            n_before = there.statistics().generated_tokens
            streams = asyncio.create_task(all_at_once(service, asked))
            await until(lambda: there.statistics().generated_tokens > n_before + 5)
            assert there.statistics().running
            box.cut("b")
            assert await streams == expected
            assert router.n_moved["here"] > 0
            assert service.state == "ready"
            box.cut("b", cut=False)
            await until(lambda: replica_of(service, "there").state == "ready")
            n_routed = router.n_routed["there"]
            assert await all_at_once(service, asked) == expected
            assert router.n_routed["there"] > n_routed
