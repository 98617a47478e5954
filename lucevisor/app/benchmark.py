"""``lucevisor bench``: prompts and answers a second of a configuration, in one service without HTTP.

Cases are named as llama-bench names them, so its figures stand beside ours: pp512 is a prompt of 512 tokens, tg128 an
answer of 128, ``tg128 @ d4096`` one behind 4,096 tokens, ``tg128 x8`` eight of them at once.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lucevisor.app.llama_bench import LlamaBench
from lucevisor.deployment.service import Service
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.errors import LucevisorError
from lucevisor.protocol.steps import Sampling

SHORT_PROMPT = 16
"""Prompt tokens of an answer at depth 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prefill of ``prompt`` tokens, or decode of ``answer`` tokens behind ``depth`` by ``streams`` at once."""

    prompt: int = 0
    answer: int = 0
    depth: int = 0
    streams: int = 1

    @property
    def name(self) -> str:
        if self.prompt:
            return f"pp{self.prompt}"
        at, times = f" @ d{self.depth}" if self.depth else "", f" x{self.streams}" if self.streams > 1 else ""
        return f"tg{self.answer}{at}{times}"

    @property
    def context(self) -> int:
        """Positions that a sequence takes."""
        return self.prompt + 1 if self.prompt else max(self.depth, SHORT_PROMPT) + self.answer


@dataclass(slots=True)
class Figures:
    """Tokens/s of a case, a number a round; ``against``: those of llama-bench, where it knows the case."""

    case: Case
    rounds: list[float] = field(default_factory=list)
    against: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Median over median."""
        return statistics.median(self.rounds) / statistics.median(self.against) if self.against else None

    def as_json(self) -> dict[str, Any]:
        case = self.case
        out: dict[str, Any] = {"name": case.name, "prompt": case.prompt, "answer": case.answer, "depth": case.depth}
        out |= {"streams": case.streams, "tokens_per_s": statistics.median(self.rounds), "rounds": self.rounds}
        if self.against:
            out |= {"against_tokens_per_s": statistics.median(self.against), "against_rounds": self.against}
            out["ratio"] = self.ratio
        return out


def cases(prompts: Sequence[int], answer: int, depths: Sequence[int], streams: Sequence[int]) -> list[Case]:
    """All combinations that are asked for: depths for one stream, streams without depth."""
    out = [Case(prompt=n) for n in prompts if n]
    if answer:
        out += [Case(answer=answer, depth=depth) for depth in depths]
        out += [Case(answer=answer, streams=n) for n in streams if n > 1]
    return list(dict.fromkeys(out))


async def measure(service: Service, wanted: Sequence[Case], n_rounds: int, against: LlamaBench | None) -> list[Figures]:
    """Run the cases in turns, ``n_rounds`` times after one to warm up, each beside llama-bench.

    Raises LucevisorError for a case that does not fit the service's context, or whose requests fail.
    """
    assert service.placement is not None
    longest = max((case.context for case in wanted), default=0)
    if longest > service.placement.max_context:
        raise LucevisorError(
            f"{longest} tokens were asked for, the context has {service.placement.max_context}: "
            f"raise engine.max_context, or ask for less"
        )
    figures = [Figures(case) for case in wanted]
    for turn in range(n_rounds + 1):
        for of_case in figures:
            found = await _run(service, of_case.case, turn)
            if turn == 0:
                continue
            of_case.rounds.append(found)
            if against is not None and of_case.case.streams == 1:
                of_case.against.append(await asyncio.to_thread(_against, against, of_case.case))
    return figures


def _against(bench: LlamaBench, case: Case) -> float:
    return bench.run(prompt=case.prompt, answer=case.answer, depth=case.depth)


async def _run(service: Service, case: Case, turn: int) -> float:
    """Tokens/s of one round.  Decode counts from the last first token to the first last one of the streams."""
    if case.prompt:
        started, times = await _generate(service, case.prompt, 1, (turn, 0))
        return case.prompt / (times[0] - started)
    depth = max(case.depth, SHORT_PROMPT)
    runs = await asyncio.gather(
        *(_generate(service, depth, case.answer, (turn, stream)) for stream in range(case.streams))
    )
    first, last = max(times[0] for _, times in runs), min(times[-1] for _, times in runs)
    made = sum(sum(first < at <= last for at in times) for _, times in runs)
    return made / (last - first)


async def _generate(service: Service, n_prompt: int, n_answer: int, seed: tuple[int, int]) -> tuple[float, list[float]]:
    """One request of random ids: when it was sent, and when each token came."""
    assert service.engine is not None
    ids, vocabulary = random.Random(repr(seed)), service.model.spec.vocabulary
    request = GenerationRequest(
        request_id=f"bench-{seed[0]}-{seed[1]}",
        prompt=tuple(ids.randrange(vocabulary) for _ in range(n_prompt)),
        max_tokens=n_answer,
        sampling=Sampling(temperature=0.0),
    )
    started, times = time.perf_counter(), []
    with service.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
            elif event.reason != "length":
                raise LucevisorError(f"a request of {n_prompt} + {n_answer} tokens ended with {event.reason!r}")
    if len(times) != n_answer:
        raise LucevisorError(f"a request gave {len(times)} tokens, {n_answer} were asked for")
    return started, times


def table(figures: Sequence[Figures]) -> str:
    """Medians with least and most, and llama-bench's beside them."""
    has_peer = any(f.against for f in figures)
    rows = [["test", "tokens/s", "least", "most", *(["llama.cpp", "ratio"] if has_peer else [])]]
    for f in figures:
        row = [f.case.name, *(f"{x:.1f}" for x in (statistics.median(f.rounds), min(f.rounds), max(f.rounds)))]
        if has_peer:
            row += [f"{statistics.median(f.against):.1f}", f"{f.ratio:.2f}"] if f.against else ["-", "-"]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


async def bench(
    service: Service, wanted: Sequence[Case], n_rounds: int, against: LlamaBench | None
) -> tuple[list[Figures], dict[str, str]]:
    """Start the service, measure, stop it; also what each device selected as kernels."""
    try:
        await service.start()
        if not await service.wait_ready(None):
            raise LucevisorError(service.reason() or "the model did not become ready")
        kernels: dict[str, str] = {}
        for group in service.groups.values():
            if group.loaded is not None:
                kernels |= {f"{group.name} {what}": how for what, how in group.loaded.kernels.items()}
        return await measure(service, wanted, n_rounds, against), kernels
    finally:
        await service.stop(0.0)


def conditions(service: Service, file: Path) -> dict[str, Any]:
    """What a figure depends on."""
    placement = service.placement
    devices = [] if placement is None else [f"{d.name} {d.layers}" for d in placement.devices]
    return {"file": str(file), "model": service.model.spec.name, "devices": devices}
