"""A service run inside the test's own event loop, with real daemons: for tests of numbers and faults."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lucevisor.app.model_files import open_models
from lucevisor.config import load
from lucevisor.deployment.service import ModelService, Observer, Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenEvent
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.kv_transfer.host_memory import available_bytes
from lucevisor.protocol.steps import SamplingParams
from lucevisor.snapshots.manager import SnapshotManager
from tests.waiting import until

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden"

_numbers = itertools.count()


FREE_BYTES = 768 << 20
"""Free memory that a small service needs, with what is reserved for a spare of each group."""
TRANSPORTS = ("shared_memory", "tcp")


def write_config(
    directory: Path,
    model: Path,
    groups: dict[str, int],
    ranges: Sequence[str],
    extra: str = "",
    transport: str = "shared_memory",
) -> Path:
    """A configuration of cpu groups: ``groups`` maps a name to its number of shards; ``ranges`` like "0-4", in
    order."""
    devices = [f"{name}:{i}" for name, n in groups.items() for i in range(n)]
    text = f'[model]\npath = "{model}"\n'
    for name in groups:
        text += f'[groups.{name}]\nbackend = "cpu"\nthreads = 1\ntransport = "{transport}"\n'
    text += f"[placement]\ntarget_devices = {devices}\ntarget_layer_split = {list(ranges)}\n".replace("'", '"')
    path = directory / f"config{next(_numbers)}.toml"
    path.write_text(text + extra)
    return path


@contextlib.asynccontextmanager
async def running(
    config: Path, directory: Path, overrides: Sequence[str] = (), **options: Any
) -> AsyncIterator[Service]:
    """The service of ``config``, READY; stopped at the end.  ``options`` of :class:`Service`."""
    await until(lambda: available_bytes() > FREE_BYTES)  # else the plan is refused, while others have it for a moment
    loaded = load(config, overrides)
    service = Service(loaded, open_models(loaded), directory, Observer(), **options)
    try:
        await service.start()
        assert await service.wait_ready(180.0), service.reason()
        yield service
    finally:
        await service.stop(0.0)


async def generate(
    service: Service | ModelService, prompt: Sequence[int], n: int, sampling: SamplingParams | None = None
) -> list[int]:
    """Token ids of one request to a service's only model, or to one of several."""
    tokens, finished = await generate_all(service, prompt, n, sampling)
    assert finished.reason == "length", finished
    return tokens


async def generate_all(
    service: Service | ModelService,
    prompt: Sequence[int],
    n: int,
    sampling: SamplingParams | None = None,
    turns: Sequence[int] = (),
    adapter: str = "",
) -> tuple[list[int], FinishedEvent]:
    """Token ids of one request, and how it ended."""
    engine = (service.only if isinstance(service, Service) else service).engine
    assert engine is not None
    request = GenerationRequest(
        request_id=f"test-{next(_numbers)}",
        prompt=TokenBuffer([int(i) for i in prompt], adapter),
        max_tokens=n,
        sampling=sampling or SamplingParams(temperature=0.0),
        turn_boundaries=tuple(turns),
    )
    tokens: list[int] = []
    with engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
            else:
                return tokens, event
    raise AssertionError("the stream ended without a FinishedEvent")


DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"

MODELS = {
    "demo": DEMO,
    **{
        name: GOLDEN / name / "model.gguf"
        for name in ("qwen3", "qwen35", "qwen35moe", "qwen3next", "gemma4_e2b", "gemma4_moe", "laguna")
    },
}

ANSWER = 12


# The repetition penalty counts the whole prompt, also the part from the cache.
GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.3, repetition_penalty=1.05)


@dataclass
class Told:
    """What came of one arm: tokens of each answer, and what was cached of its prompt."""

    answers: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    n_computed: int = 0


async def ask(
    service: Service, prompt: list[int], turns: list[int], n: int = ANSWER
) -> tuple[list[int], FinishedEvent]:
    return await generate_all(service, prompt, n, GREEDY, turns)


async def converse(service: Service, vocabulary: int, n_conversations: int) -> Told:
    """Conversations of three turns, on two system prompts, one after the other."""
    told, rng = Told(), random.Random(5)
    systems = [[rng.randrange(vocabulary) for _ in range(n)] for n in (130, 150)]
    assert service.only.engine is not None
    before = service.only.engine.statistics().steps.n_tokens
    for i in range(n_conversations):
        prompt = list(systems[i % 2])
        turns = [len(prompt)]
        for _ in range(3):
            prompt += [rng.randrange(vocabulary) for _ in range(rng.randrange(5, 40))]
            turns.append(len(prompt))
            prompt += [1, 2]  # what opens an answer
            answer, finished = await ask(service, prompt, turns)
            told.answers.append(answer)
            told.prompts.append(len(prompt))
            told.cached.append(finished.usage.cached_tokens)
            prompt += answer
            turns.append(len(prompt))
    told.n_computed = service.only.engine.statistics().steps.n_tokens - before
    return told


MIN_TOKENS = 8

CONFIG = """
[engine]
dtype = "float32"
prefill_chunk = 64
max_sequences = 4
pages = {pages}
[cache]
min_tokens = {min_tokens}
prefix_slots = {slots}
states = "{states}"
dir = "{directory}"
[draft]
kind = "off"  # tests count the tokens that are computed
"""

SPLITS = {1: "1", 2: "0.5,0.5", 3: "0.08,0.46,0.46"}
PROMPT = [random.Random(3).randrange(5, 500) for _ in range(300)]


class Place:
    """Where a test's snapshots are, and how its services are configured."""

    def __init__(self, model: Path, directory: Path, states: str = "device", transport: str = "shared_memory") -> None:
        self.model, self.directory, self.states, self.transport = model, directory, states, transport
        self.snapshots = directory / "snapshots"

    def config(self, n_groups: int = 2, *, slots: int = 2000, pages: int = 1200, on: bool = True) -> Path:
        groups = dict.fromkeys("abc"[:n_groups], 1)
        where = self.snapshots if on else ""
        extra = CONFIG.format(slots=slots, pages=pages, directory=where, min_tokens=MIN_TOKENS, states=self.states)
        path = write_config(self.directory, self.model, groups, ["0-1"] * n_groups, extra, self.transport)
        text = path.read_text().replace(str(["0-1"] * n_groups).replace("'", '"'), f"[{SPLITS[n_groups]}]")
        path.write_text(text)
        return path

    def files(self) -> list[Path]:
        return sorted(self.snapshots.glob("*.safetensors"))


def snapshots_of(service: Service) -> SnapshotManager:
    assert service.only.snapshots is not None
    return service.only.snapshots


def restore_always(service: Service) -> None:
    """Let computing a prompt look slow: whether reading one is faster depends on the machine."""
    assert service.only.engine is not None
    rate = service.only.engine.core.scheduler.reuse.prompt_rate
    rate.n, rate.seconds = 1.0, 1e9


def told_of(service: Service) -> Counter[str]:
    """What the store counted."""
    now = snapshots_of(service).store.statistics
    return Counter(saved=now.n_saved, restored=now.n_restored, failed=sum(now.failures.values()))
