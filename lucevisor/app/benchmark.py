"""``lucevisor bench``: tokens a second of a configuration in one service without HTTP, and of llama.cpp beside it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lucevisor import __version__
from lucevisor.deployment.group_settings import group_threads, usable_cores
from lucevisor.deployment.service import Service
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.errors import LucevisorError
from lucevisor.protocol.steps import SamplingParams


@dataclass(slots=True)
class BenchmarkResult:
    """Tokens/s of one case in each round.  ``against``: the same by llama-bench; empty if it cannot run the case."""

    case: Case
    rounds: list[float] = field(default_factory=list)
    against: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.rounds) / statistics.median(self.against) if self.against else None

    def as_json(self) -> dict[str, Any]:
        case = self.case
        out: dict[str, Any] = {"name": case.name, "prompt": case.prompt, "answer": case.answer, "depth": case.depth}
        out |= {"streams": case.streams, "tokens_per_s": statistics.median(self.rounds), "rounds": list(self.rounds)}
        if self.against:
            out |= {"against_tokens_per_s": statistics.median(self.against), "against_rounds": list(self.against)}
            out["ratio"] = self.ratio
        return out


async def measure(
    service: Service, wanted: Sequence[Case], n_rounds: int, against: LlamaBench | None
) -> AsyncIterator[list[BenchmarkResult]]:
    """Run the cases ``n_rounds`` times and yield the figures after each round, which llama-bench follows with its own.

    Answers have one warm-up round and prompts two: the first step of a size compiles kernels, the second is captured.

    Raises LucevisorError for a case that does not fit the service's context, or whose requests fail.
    """
    assert service.placement is not None
    longest = max((case.context for case in wanted), default=0)
    if longest > service.placement.max_context:
        raise LucevisorError(
            f"{longest} tokens were asked for, the context has {service.placement.max_context}: "
            f"raise engine.max_context, or ask for less"
        )
    figures = [BenchmarkResult(case) for case in wanted]
    for turn in range(-1, n_rounds + 1):
        for figure in figures:
            if turn < 0 and not figure.case.prompt:
                continue
            rate = await tokens_per_s(service, figure.case, turn)
            if turn > 0:
                figure.rounds.append(rate)
        if against is not None and turn > 0:
            theirs = await asyncio.to_thread(against.run, wanted)
            for figure in figures:
                figure.against += [theirs[figure.case]] if figure.case in theirs else []
        if turn > 0:
            yield figures


async def tokens_per_s(service: Service, case: Case, turn: int) -> float:
    """Measure one round.  Decode counts from the last first token to the first last one of the streams."""
    if case.prompt:
        started, times = await generate(service, case.prompt, 1, f"{case.name}-{turn}")
        return case.prompt / (times[0] - started)
    depth = max(case.depth, SHORT_PROMPT)
    runs = await asyncio.gather(
        *(generate(service, depth, case.answer, f"{case.name}-{turn}-{stream}") for stream in range(case.streams))
    )
    first, last = max(times[0] for _, times in runs), min(times[-1] for _, times in runs)
    made = sum(sum(first < at <= last for at in times) for _, times in runs)
    return made / (last - first)


async def generate(service: Service, n_prompt: int, n_answer: int, name: str) -> tuple[float, list[float]]:
    """Run a request of random ids, seeded by ``name``; return when it was sent, and when each token came."""
    assert service.engine is not None
    ids, vocabulary = random.Random(name), service.model.spec.vocabulary
    request = GenerationRequest(
        request_id=f"bench {name}",
        prompt=tuple(ids.randrange(vocabulary) for _ in range(n_prompt)),
        max_tokens=n_answer,
        sampling=SamplingParams(temperature=0.0),
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


def table(figures: Sequence[BenchmarkResult]) -> str:
    """Return medians with minimum and maximum, and llama-bench's beside them."""
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
    service: Service,
    wanted: Sequence[Case],
    n_rounds: int,
    against: LlamaBench | None,
    keep: Callable[[dict[str, Any]], None],
    show: Callable[[str], None],
) -> list[BenchmarkResult]:
    """Start the service, measure, stop it; ``keep`` gets the record after each round, ``show`` what is measured."""
    try:
        await service.start()
        if not await service.wait_ready(None):
            raise LucevisorError(service.reason() or "the model did not become ready")
        record, figures = conditions(service), []
        show(heading(record))
        if against is not None:
            record["against"] = [str(against.program), *against.arguments]
        async for figures in measure(service, wanted, n_rounds, against):
            keep(record | {"tests": [figure.as_json() for figure in figures]})
        return figures
    finally:
        await service.stop(0.0)


def conditions(service: Service) -> dict[str, Any]:
    assert service.placement is not None
    groups = {}
    for group in service.groups.values():
        hello, loaded = group.hello, group.loaded
        if hello is not None and loaded is not None:
            devices = {f"{hello.backend.value}:{d.index}": d.name for d in hello.devices}
            groups[group.name] = {
                "torch": hello.torch,
                "devices": devices,
                "threads": group_threads(service.config, group.name),
                "kernels": loaded.kernels,
            }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "model": service.model.spec.name,
        "file": service.model.files[0].name,
        "quant": service.model.spec.quant,
        "dtype": service.placement.dtype.value,
        "kv_dtype": service.placement.kv_dtype.value,
        "layers": [f"{device.device} {device.layers}" for device in service.placement.devices],
        "groups": groups,
        "n_cores": len(usable_cores()),
        "load_average": os.getloadavg()[0],
    }


def heading(record: dict[str, Any]) -> str:
    """Return model, formats, devices and threads in lines, as llama-bench has them in columns."""
    lines = [f"{record['model']} ({record['quant']}), {record['dtype']}, KV {record['kv_dtype']}"]
    for name, group in record["groups"].items():
        devices = ", ".join(f"{device} {product}" for device, product in group["devices"].items())
        n = group["threads"]
        threads = f", {n} thread{'s' if n > 1 else ''}" if n else ""
        lines.append(f"group {name}: {devices}{threads}, torch {group['torch']}")
    return "\n".join([*lines, f"layers: {', '.join(record['layers'])}"])


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


def cases(prompts: Sequence[int], answer: int, depths: Sequence[int], streams: Sequence[int]) -> list[Case]:
    """Return all combinations: depths for one stream, streams without depth."""
    out = [Case(prompt=n) for n in prompts if n]
    if answer:
        out += [Case(answer=answer, depth=depth) for depth in depths]
        out += [Case(answer=answer, streams=n) for n in streams if n > 1]
    return list(dict.fromkeys(out))


STREAM_ALIGNMENT = 256
"""llama.cpp rounds the context of a stream up to whole multiples of this."""


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """``program``, and arguments for it and llama-batched-bench, such as ``-t 2`` or ``-ngl 99 -fa on``."""

    program: Path
    model: Path
    arguments: Sequence[str] = ()
    timeout_s: float = 3600.0

    @property
    def batched(self) -> Path:
        return self.program.with_name("llama-batched-bench")

    def run(self, wanted: Sequence[Case]) -> dict[Case, float]:
        """Return tokens/s of one repetition each; without several streams if only llama-bench is there."""
        found: dict[Case, float] = {}
        alone = [case for case in wanted if case.streams == 1]
        for depth in dict.fromkeys(case.depth for case in alone):
            found |= self._alone([case for case in alone if case.depth == depth], depth)
        for answer in dict.fromkeys(case.answer for case in wanted if case.streams > 1):
            if self.batched.exists():
                found |= self._together([c for c in wanted if c.streams > 1 and c.answer == answer], answer)
        return found

    def _alone(self, wanted: Sequence[Case], depth: int) -> dict[Case, float]:
        """Cases of one stream and depth: llama-bench has a result for each prompt and each answer."""
        prompts, answers = (
            ",".join(str(n) for n in sorted({n for n in lengths if n})) or "0"
            for lengths in ([c.prompt for c in wanted], [c.answer for c in wanted])
        )
        command = [str(self.program), "-m", str(self.model), "-p", prompts, "-n", answers]
        command += [*(["-d", str(depth)] if depth else []), "-r", "1", "-o", "json", *self.arguments]
        said = self._output(command)
        try:
            rates = {(int(row["n_prompt"]), int(row["n_gen"])): float(row["avg_ts"]) for row in json.loads(said)}
            return {case: rates[case.prompt, case.answer] for case in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(f"{self.program} printed no result of llama-bench: {said[:200]!r}") from error

    def _together(self, wanted: Sequence[Case], answer: int) -> dict[Case, float]:
        """Cases of several streams with the same answer."""
        streams = sorted({case.streams for case in wanted})
        context = -(-(SHORT_PROMPT + answer) // STREAM_ALIGNMENT) * STREAM_ALIGNMENT * streams[-1]
        command = [str(self.batched), "-m", str(self.model), "-c", str(context), "-npp", str(SHORT_PROMPT)]
        command += ["-ntg", str(answer), "-npl", ",".join(map(str, streams)), "--output-format", "jsonl"]
        said = self._output([*command, *self.arguments])
        try:
            rows: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            rates = {int(row["pl"]): float(row["speed_tg"]) for row in rows}
            return {case: rates[case.streams] for case in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(f"{self.batched} printed no result of llama-batched-bench: {said[:200]!r}") from error

    def _output(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LucevisorError(f"{command[0]}: {error}") from error
        if done.returncode:
            raise LucevisorError(f"{command[0]} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout
