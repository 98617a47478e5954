"""More clients than a supervisor can serve: they get answers or 429, and memory stays where it was."""

from __future__ import annotations

import pytest

from bench.overload import growth, overload
from tests.combinations import slow
from tests.e2e.process import DEMO, Cli
from tests.waiting import wait_until


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("n_clients", "seconds", "max_queue", "max_total_tokens"),
    [(40, 2.0, 8, 6), slow(500, 300.0, 256, 40)],
)
async def test_clients_beyond_the_queue_get_429_and_nothing_else(
    cli: Cli, n_clients: int, seconds: float, max_queue: int, max_total_tokens: int
) -> None:
    status = cli.start(DEMO, "engine.max_sequences=8", f"server.max_queue={max_queue}")
    found, samples = await overload(status, n_clients, seconds, max_total_tokens)
    assert found.failures == {}, found.examples[:3]
    assert found.codes[200] > 8
    assert found.codes[429] > 0
    if seconds > 60:
        assert growth(samples) < 1.05
    wait_until(lambda: cli.status()["engine"]["running"] == 0, what="nothing runs")
    engine = cli.status()["engine"]
    assert (engine["queued"], engine["held"], engine["pages"]["used"]) == (0, 0, 0)
    cli.stop()
