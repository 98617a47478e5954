"""A service run inside the test's own event loop, with real daemons: for tests of numbers and faults."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from lucevisor.app.model_files import open_model
from lucevisor.config import load
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden"

_numbers = itertools.count()


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
async def running(config: Path, directory: Path, overrides: Sequence[str] = ()) -> AsyncIterator[Service]:
    """The service of ``config``, READY; stopped at the end."""
    loaded = load(config, overrides)
    service = Service(loaded, open_model(loaded), directory, Observer())
    try:
        await service.start()
        assert await service.wait_ready(180.0), service.reason()
        yield service
    finally:
        await service.stop(0.0)


async def generate(
    service: Service, prompt: Sequence[int], n: int, sampling: SamplingParams | None = None
) -> list[int]:
    """Token ids of one request."""
    tokens, finished = await generate_all(service, prompt, n, sampling)
    assert finished.reason == "length", finished
    return tokens


async def generate_all(
    service: Service, prompt: Sequence[int], n: int, sampling: SamplingParams | None = None, turns: Sequence[int] = ()
) -> tuple[list[int], FinishedEvent]:
    """Token ids of one request, and how it ended."""
    assert service.engine is not None
    request = GenerationRequest(
        request_id=f"test-{next(_numbers)}",
        prompt=tuple(int(i) for i in prompt),
        max_tokens=n,
        sampling=sampling or SamplingParams(temperature=0.0),
        turn_boundaries=tuple(turns),
    )
    tokens: list[int] = []
    with service.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
            else:
                return tokens, event
    raise AssertionError("the stream ended without a FinishedEvent")
