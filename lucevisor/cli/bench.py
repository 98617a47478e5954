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
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import uvloop

from lucevisor import __version__
from lucevisor.app import logs
from lucevisor.app.model_files import open_model
from lucevisor.cli.configured import configured
from lucevisor.cli.options import OutputFile, config_argument, python_option
from lucevisor.config import Config, load, merge_overrides, single_model
from lucevisor.deployment.group_settings import group_threads, usable_cores
from lucevisor.deployment.measurements import tune
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.errors import ExitCode, LucevisorError
from lucevisor.model.pages import pages_of
from lucevisor.placement.formatting import in_columns
from lucevisor.protocol.messages import CheckLine
from lucevisor.protocol.steps import SamplingParams

PLAIN = ("draft.kind=off", "cache.prefix_slots=0", "cache.checkpoint_pages=0", "cache.dir=")
"""Settings that make every round the same work; ``--set`` has the last word."""


class Numbers(click.ParamType[list[int]]):
    """Whole numbers of at least ``least``, separated by commas."""

    name = "numbers"

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            numbers = [int(part) for part in str(value).split(",")]
        except ValueError:
            numbers = [-1]
        if any(n < self.least for n in numbers):
            self.fail(f"{value!r} is not a list of numbers >= {self.least}, such as 1,8", param, ctx)
        return numbers


@click.command()
@config_argument
@python_option
@click.option("-p", "--prompt", "prompts", type=Numbers(), default="512", show_default=True, help="Prompt lengths.")
@click.option(
    "-n", "--answer", type=click.IntRange(0, 1 << 20), default=128, show_default=True, help="Tokens to generate."
)
@click.option("-d", "--depth", "depths", type=Numbers(), default="0", show_default=True, help="Tokens before answers.")
@click.option("-s", "--streams", type=Numbers(1), default="1", show_default=True, help="Concurrent answers.")
@click.option("-r", "--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Rounds to measure.")
@click.option(
    "--tune",
    "tunes",
    is_flag=True,
    help="First measure which kernels are fastest on these devices, and store the result.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write figures to a file, after each round.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A llama-bench to run in turns; streams need llama-batched-bench beside it.",
)
@click.option("--against-args", default="", metavar="ARGS", help="Arguments for both programs, e.g. '-t 2 -fa on'.")
def bench(
    config: Path,
    overrides: tuple[str, ...],
    pythons: tuple[str, ...],
    prompts: list[int],
    answer: int,
    depths: list[int],
    streams: list[int],
    rounds: int,
    tunes: bool,
    json_file: Path | None,
    against: Path | None,
    against_args: str,
) -> int:
    """Start the daemons of CONFIG and measure tokens a second: prompts, answers, answers at depth and several at once.

    Without HTTP, drafts and prefix cache; medians of rounds in turns.
    """
    if answer == 1:
        raise click.UsageError("--answer 1: a speed needs two tokens at least; 0 measures no answers")
    wanted = cases(prompts, answer, depths, streams)
    if not wanted:
        _refuse_idle(tunes=tunes, writes=json_file is not None)
    peer_arguments = _words(against_args)
    needed = max((case.streams for case in wanted), default=1)
    settings = [*PLAIN, *([f"engine.max_sequences={needed}"] if needed > 1 else [])]
    if against is not None:  # both programs hold the model at once: pages for these cases leave memory for the other
        n_pages = max((case.streams * (pages_of(case.context) + 1) for case in wanted), default=1)
        settings.append(f"engine.pages={n_pages}")
    config, _ = configured(config, pythons)
    loaded = single_model(load(config, merge_overrides(settings, overrides)), "bench")
    logs.configure(loaded.log.format, "warning")
    model = open_model(loaded)
    peer = LlamaBench(against, model.files[0], peer_arguments) if against is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="lucevisor-bench-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if tunes:
            click.echo(_tuned(runner.run(tune(model.files, loaded))))
        if not wanted:
            return ExitCode.DONE
        results = runner.run(run(loaded, model, Path(directory), wanted, rounds, peer, json_file))
    click.echo(table(results))
    return ExitCode.DONE


def _refuse_idle(*, tunes: bool, writes: bool) -> None:
    """Raise UsageError if there is nothing to measure, unless --tune alone was asked for."""
    if not tunes:
        raise click.UsageError("nothing to measure: give --prompt or --answer, or --tune")
    if writes:
        raise click.UsageError("--json: nothing to write; --tune keeps its limits itself: give --prompt or --answer")


def _tuned(lines: Sequence[CheckLine]) -> str:
    texts = [f"{line.subject}: {line.detail}" for line in lines]
    return "\n".join(texts) or "nothing to tune: each matrix of the model has one kernel here"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint="--against-args") from None


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
    """Run the cases ``n_rounds`` times and yield the figures after each round; llama-bench takes turns. Answers have
    one warm-up round and prompts two: the first step of a size compiles kernels, the second is captured. Raises
    LucevisorError."""
    assert service.only.placement is not None
    longest = max((case.context for case in wanted), default=0)
    if longest > service.only.placement.max_context:
        raise LucevisorError(
            f"{longest} tokens were asked for, the context has {service.only.placement.max_context}: "
            f"raise engine.max_context, or ask for less"
        )
    figures = [BenchmarkResult(case) for case in wanted]
    for n_round in range(-1, n_rounds + 1):
        for figure in figures:
            if n_round < 0 and not figure.case.prompt:
                continue
            rate = await tokens_per_s(service, figure.case, n_round)
            if n_round > 0:
                figure.rounds.append(rate)
        if against is not None and n_round > 0:
            theirs = await asyncio.to_thread(against.run, wanted)
            for figure in figures:
                figure.against += [theirs[figure.case]] if figure.case in theirs else []
        if n_round > 0:
            yield figures


async def tokens_per_s(service: Service, case: Case, n_round: int) -> float:
    """Measure one round.  Decode counts from the last first token to the first last one of the streams."""
    if case.prompt:
        started, times = await generate(service, case.prompt, 1, f"{case.name}-{n_round}")
        return case.prompt / (times[0] - started)
    depth = max(case.depth, SHORT_PROMPT)
    runs = await asyncio.gather(
        *(generate(service, depth, case.answer, f"{case.name}-{n_round}-{stream}") for stream in range(case.streams))
    )
    first, last = max(times[0] for _, times in runs), min(times[-1] for _, times in runs)
    n_generated = sum(sum(first < at <= last for at in times) for _, times in runs)
    return n_generated / (last - first)


async def generate(service: Service, n_prompt: int, n_answer: int, name: str) -> tuple[float, list[float]]:
    """Run a request of random ids, seeded by ``name``; return when it was sent, and when each token came."""
    assert service.only.engine is not None
    ids, vocabulary = random.Random(name), service.only.model.spec.vocabulary
    request = GenerationRequest(
        request_id=f"bench {name}",
        prompt=tuple(ids.randrange(vocabulary) for _ in range(n_prompt)),
        max_tokens=n_answer,
        sampling=SamplingParams(temperature=0.0),
    )
    started, times = time.perf_counter(), []
    with service.only.engine.submit(request) as handle:
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
    return in_columns(rows, range(1, 6))


async def run(
    config: Config,
    model: ServedModel,
    directory: Path,
    wanted: Sequence[Case],
    n_rounds: int,
    against: LlamaBench | None,
    json_file: Path | None,
) -> list[BenchmarkResult]:
    """Start a service, measure, stop it.  Write the figures to ``json_file`` after each round."""
    service = Service(config, [model], directory, Observer())
    try:
        await service.start()
        if not await service.wait_ready(None):
            raise LucevisorError(service.reason() or "the model did not become ready")
        record, results = conditions(service), []
        click.echo(heading(record))
        if against is not None:
            record["against"] = [str(against.program), *against.arguments]
        async for results in measure(service, wanted, n_rounds, against):
            if json_file is not None:
                write_json(json_file, record | {"tests": [result.as_json() for result in results]})
        return results
    finally:
        await service.stop(0.0)


def write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def conditions(service: Service) -> dict[str, Any]:
    assert service.only.placement is not None
    groups = {}
    for group in service.groups.values():
        hello = group.hello
        if hello is not None and group.loads:
            devices = {f"{hello.backend.value}:{d.index}": d.name for d in hello.devices}
            groups[group.name] = {
                "torch": hello.torch,
                "devices": devices,
                "threads": group_threads(service.config, group.name),
                "kernels": group.loads[0].kernels,
            }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "model": service.only.model.spec.name,
        "file": service.only.model.files[0].name,
        "quant": service.only.model.spec.quant,
        "dtype": service.only.placement.dtype.value,
        "kv_dtype": service.only.placement.kv_dtype.value,
        "layers": [f"{device.device} {device.layers}" for device in service.only.placement.devices],
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
    """Prefill of ``prompt`` tokens, or decode of ``answer`` tokens after ``depth`` others, by ``streams`` at once."""

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
        rates: dict[Case, float] = {}
        alone = [case for case in wanted if case.streams == 1]
        for depth in dict.fromkeys(case.depth for case in alone):
            rates |= self._alone([case for case in alone if case.depth == depth], depth)
        for answer in dict.fromkeys(case.answer for case in wanted if case.streams > 1):
            if self.batched.exists():
                rates |= self._together([c for c in wanted if c.streams > 1 and c.answer == answer], answer)
        return rates

    def _alone(self, wanted: Sequence[Case], depth: int) -> dict[Case, float]:
        """Cases of one stream and depth: llama-bench has a result for each prompt and each answer."""
        prompts, answers = (
            ",".join(str(n) for n in sorted({n for n in lengths if n})) or "0"
            for lengths in ([c.prompt for c in wanted], [c.answer for c in wanted])
        )
        command = [str(self.program), "-m", str(self.model), "-p", prompts, "-n", answers]
        command += [*(["-d", str(depth)] if depth else []), "-r", "1", "-o", "json", *self.arguments]
        output = self._run(command)
        try:
            rates = {(int(row["n_prompt"]), int(row["n_gen"])): float(row["avg_ts"]) for row in json.loads(output)}
            return {case: rates[case.prompt, case.answer] for case in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(f"{self.program} printed no result of llama-bench: {output[:99]!r}") from error

    def _together(self, wanted: Sequence[Case], answer: int) -> dict[Case, float]:
        """Cases of several streams with the same answer."""
        streams = sorted({case.streams for case in wanted})
        context = -(-(SHORT_PROMPT + answer) // STREAM_ALIGNMENT) * STREAM_ALIGNMENT * streams[-1]
        command = [str(self.batched), "-m", str(self.model), "-c", str(context), "-npp", str(SHORT_PROMPT)]
        command += ["-ntg", str(answer), "-npl", ",".join(map(str, streams)), "--output-format", "jsonl"]
        output = self._run([*command, *self.arguments])
        try:
            rows: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            rates = {int(row["pl"]): float(row["speed_tg"]) for row in rows}
            return {case: rates[case.streams] for case in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(
                f"{self.batched} printed no result of llama-batched-bench: {output[:200]!r}"
            ) from error

    def _run(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LucevisorError(f"{command[0]}: {error}") from error
        if done.returncode:
            raise LucevisorError(f"{command[0]} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout
