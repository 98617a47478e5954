"""``lucevisor bench``: how fast a configuration is, also beside llama.cpp."""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lucevisor.cli.options import OutputFile, config_argument
from lucevisor.config import load, merge_overrides
from lucevisor.errors import ExitCode

if TYPE_CHECKING:
    from lucevisor.protocol.messages import CheckLine

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
    import uvloop

    from lucevisor.app import logs
    from lucevisor.app.benchmark import LlamaBench, cases, table
    from lucevisor.app.benchmark import bench as run
    from lucevisor.app.model_files import open_model
    from lucevisor.deployment.probe import tune
    from lucevisor.deployment.service import Observer, Service

    if answer == 1:
        raise click.UsageError("--answer 1: a speed needs two tokens at least; 0 measures no answers")
    wanted = cases(prompts, answer, depths, streams)
    if not wanted:
        _refuse_idle(tunes=tunes, writes=json_file is not None)
    peer_arguments = _words(against_args)
    needed = max((case.streams for case in wanted), default=1)
    settings = [*PLAIN, *([f"engine.max_sequences={needed}"] if needed > 1 else [])]
    loaded = load(config, merge_overrides(settings, overrides))
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

        def keep(record: dict[str, Any]) -> None:
            if json_file is not None:
                json_file.write_text(json.dumps(record, indent=1) + "\n")

        async def everything() -> str:
            service = Service(loaded, model, Path(directory), Observer())
            return table(await run(service, wanted, rounds, peer, keep, click.echo))

        click.echo(runner.run(everything()))
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
