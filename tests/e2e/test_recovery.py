"""Daemons killed and restarted at random moments beside eight streams: nobody notices more than a pause.

Oracle: the same service before the first fault, in float32.  Greedy and seeded requests, prompts of one to four chunks.
The same with every kind of signal and more set-ups: test_chaos.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import ModelService, Service
from lucevisor.engine.request import NotReady
from lucevisor.engine.shell import Engine
from lucevisor.protocol.steps import Dry, Mirostat, SamplingParams
from lucevisor.supervision.machine import SupervisionLimits
from tests.combinations import slow
from tests.e2e.service import generate, generate_all, running
from tests.e2e.test_speculation import CASES, Case, config_of, prompts_of
from tests.engine.recording import Recording, record, replay
from tests.waiting import until

N_STREAMS = 8
N_TOKENS = 30
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.5),
    SamplingParams(temperature=0.0, dry=Dry(1.0, breakers=((10,),))),
    SamplingParams(temperature=0.9, seed=12, mirostat=Mirostat(2, 3.0, 0.2), frequency_penalty=0.2),
)

PLAIN = Case(CASES["qwen35-random"].model, "off")
"""Without drafts, and with spares."""


@contextlib.asynccontextmanager
async def serving(
    case: Case,
    tmp_path: Path,
    n_groups: int,
    place: str = "tail",
    transport: str = "shared_memory",
    spares: int | None = None,
    recordings: list[Recording] | None = None,
    settings: Sequence[str] = (),
    **limits: float,
) -> AsyncIterator[Service]:
    """A service whose groups are restarted at once, as often as it takes."""
    n_spares = int(case is PLAIN) if spares is None else spares
    overrides = ["recovery.restart_limit=9999/60s", f"recovery.spares={n_spares}", *settings]
    path = config_of(case, tmp_path, n_groups, place)
    overrides += [f"groups.{name}.transport={transport}" for name in load(path, overrides).groups]
    brisk = SupervisionLimits(backoff_min_s=0.02, backoff_max_s=0.02, spare_delay_s=0.02, **limits)  # type: ignore[arg-type]

    def on_engine(_: ModelService, engine: Engine) -> None:
        if recordings is not None:
            recordings.append(record(engine))

    async with running(path, tmp_path, overrides, on_engine=on_engine, limits=brisk) as service:
        yield service


class Streams:
    """Streams that ask again as soon as they have their answer."""

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        samplings: Sequence[SamplingParams] = SAMPLINGS,
        n_streams: int = N_STREAMS,
        n_tokens: int = N_TOKENS,
    ) -> None:
        self.service, self.n_streams, self.n_tokens = service, n_streams, n_tokens
        self.asked = [(prompt, samplings[i % len(samplings)]) for i, prompt in enumerate(prompts)]
        self.right: list[list[int]] = []
        self.n_answers = 0
        self.wrong: list[str] = []
        self._ended = False

    async def learn(self) -> None:
        """What the answers are without a fault."""
        self.right = [await generate(self.service, prompt, self.n_tokens, how) for prompt, how in self.asked]

    async def stream(self, first: int) -> None:
        i = first
        while not self._ended:
            prompt, how = self.asked[i % len(self.asked)]
            tokens, finished = await generate_all(self.service, prompt, self.n_tokens, how)
            right = self.right[i % len(self.asked)]
            if finished.error is not None:
                self.wrong.append(f"prompt {i % len(self.asked)}: {finished.error.message}")
            elif tokens != right:
                at = next(at for at, (a, b) in enumerate(zip(tokens, right, strict=True)) if a != b)
                self.wrong.append(f"prompt {i % len(self.asked)}: token {at} is {tokens[at]}, not {right[at]}")
            self.n_answers += 1
            i += self.n_streams + 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for i in range(self.n_streams):
                tasks.create_task(self.stream(i))
            yield
            self._ended = True


async def kill(service: Service, group: str) -> None:
    """Kill a group's daemon; return when it is replaced and requests are served."""
    pid = service.groups[group].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(100):
        while service.groups[group].pid == pid or service.state != "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def kills(streams: Streams, rng: random.Random) -> None:
    """Kill a daemon at a random moment in which something was computed, then another."""
    engine = streams.service.only.engine
    assert engine is not None
    for group in list(streams.service.groups)[:2]:
        n_before = engine.statistics().generated_tokens
        await asyncio.sleep(rng.uniform(0.0, 0.25))
        await until(lambda: engine.statistics().generated_tokens > n_before + N_STREAMS)  # noqa: B023
        await kill(streams.service, group)


CONFIGURATIONS = [
    pytest.param(PLAIN, 2, "tail", id="recurrent, 2 groups"),
    slow(CASES["mtp"], 3, "tail", id="recurrent, mtp drafter, 3 groups"),
    pytest.param(
        CASES["gemma4_e2b-random"], 2, "alone", id="sliding, drafter in a group of its own", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("transport", ["shared_memory", slow("tcp")])
@pytest.mark.parametrize(("case", "n_groups", "place"), CONFIGURATIONS)
async def test_kills_change_no_token(tmp_path: Path, case: Case, n_groups: int, place: str, transport: str) -> None:
    recordings: list[Recording] = []
    async with serving(case, tmp_path, n_groups, place, transport, recordings=recordings) as service:
        streams = Streams(service, prompts_of(case, 9))
        await streams.learn()
        async with streams.running():
            await kills(streams, random.Random(n_groups))
        assert streams.wrong == []
        replayed = [loaded.replayed for one in service.groups.values() for loaded in one.loads]
        replays = case is not CONFIGURATIONS[2].values[0]
        assert any(replayed) == replays, "while it loaded, from a file of rows; not with sliding layers"
        assert service.only.engine is not None
        now = service.only.engine.statistics()
        assert now.recovery.pauses["loss"].n >= 1
        assert now.recovery.n_continued >= 1
        assert now.recovery.n_rebuilt > now.recovery.n_recomputed  # nearly always by the lost stages alone
        assert now.running == now.queued == 0
        replay(recordings[0], recordings[0].new_core())


@pytest.mark.slow
async def test_kills_without_a_journal_compute_all_again_and_no_rows_go_to_the_supervisor(tmp_path: Path) -> None:
    async with serving(PLAIN, tmp_path, 2, transport="tcp", settings=["recovery.journal=0"]) as service:
        streams = Streams(service, prompts_of(PLAIN, 9))
        await streams.learn()
        async with streams.running():
            await kills(streams, random.Random(2))
        assert streams.wrong == []
        assert service.only.engine is not None
        now = service.only.engine.statistics()
        assert now.recovery.n_recomputed > 0 == now.recovery.n_rebuilt
        regions = [(relay, relay.region(i)) for relay in service.only.deployment.buffers.values() for i in (0, 1)]
        assert not any(any(region) for relay, region in regions if not relay.plan.tokens)


GEMMA = Case(CASES["gemma4_e2b-random"].model, "off")


@pytest.mark.parametrize(
    ("case", "n_groups"),
    [
        pytest.param(CASES["mtp"], 3, id="recurrent, mtp drafter, 3 groups"),
        slow(GEMMA, 2, id="sliding, 2 groups"),
        slow(PLAIN, 1, id="recurrent, one group"),
    ],
)
async def test_restarts_of_all_groups_change_no_token(tmp_path: Path, case: Case, n_groups: int) -> None:
    async with serving(case, tmp_path, n_groups) as service:
        streams = Streams(service, prompts_of(case, 9))
        await streams.learn()
        async with streams.running():
            for group in service.groups:
                await AdminOperations(service).restart_all([group], now=False)
        assert streams.wrong == []
        assert service.only.engine is not None
        now = service.only.engine.statistics().recovery
        assert (now.pauses["restart"].n, now.pauses["loss"].n) == (n_groups, 0)
        assert now.n_kept > 0
        assert (now.n_rebuilt, now.n_recomputed) == (0, 0)
        assert service.only.engine.statistics().cache.n_slots > 0
        if case.kind != "off":
            assert service.only.deployment.drafting
            assert any(map(service.only.engine.prefixes.drafted, service.only.engine.prefixes.slots)), (
                "its context went along"
            )


async def test_what_is_held_too_long_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    case = Case(CASES["qwen35-random"].model, "off")
    path = config_of(case, tmp_path, 2, "tail")
    slow = SupervisionLimits(backoff_min_s=2.0)
    async with running(path, tmp_path, ["recovery.hold_s=0.2"], limits=slow) as service:
        prompt = prompts_of(case, 1)[0]
        asked = asyncio.create_task(generate_all(service, prompt, 2000))
        await asyncio.sleep(0.1)
        os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
        _, finished = await asked
        assert finished.error is not None
        assert finished.error.code == "shard_lost"
        assert "group b" in finished.error.message
        assert "held for 0.2 s (recovery.hold_s)" in finished.error.message
        with pytest.raises(NotReady):
            await generate(service, prompt, 4)
        assert await service.wait_ready(100.0)
        await generate(service, prompt, 4)
