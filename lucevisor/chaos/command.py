"""``lucevisor chaos``: random faults beside real traffic, with every answer checked."""

from __future__ import annotations

import json
import math
import random
import signal
import sys
from pathlib import Path

import click

from lucevisor.chaos.faults import FAULTS
from lucevisor.chaos.run import EXACT, Chaos, Report
from lucevisor.cli.demo import demo_config
from lucevisor.cli.options import RangeOfNumbers
from lucevisor.config import load, merge_overrides, single_model
from lucevisor.errors import ExitCode

_N_SHOWN = 5


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key.")
@click.option("--minutes", type=RangeOfNumbers(0.01, 10_000), default=2.0, show_default=True)
@click.option("--fault", "faults", metavar="NAME", multiple=True, help="Inject only this fault; may be repeated.")
@click.option(
    "--times", "n_faults", type=click.IntRange(min=1), help="End after this many faults instead of after --minutes."
)
@click.option("--seed", type=int, help="Seed for kinds and times of faults (default: random).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def chaos(
    config: Path | None,
    overrides: tuple[str, ...],
    minutes: float,
    faults: tuple[str, ...],
    n_faults: int | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Start CONFIG (default: the demo) in float32, in a directory of its own, and let eight clients ask it while its
    processes are killed, stopped, hung and starved at random.  Exit code 1 if an answer was wrong or lost."""
    if unknown := [name for name in faults if name not in FAULTS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(FAULTS)}", param_hint="--fault")
    file = config or demo_config()
    # Refused here, not by a supervisor whose output is in a file.
    single_model(load(file, merge_overrides(EXACT, overrides)), "chaos")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.FAILED))  # not without its supervisor

    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    seconds = 60 * minutes if n_faults is None else math.inf
    report = Chaos(file, overrides, seed, faults or tuple(FAULTS)).run(seconds, n_faults)
    click.echo(_json(report) if as_json else _table(report))
    for problem in [*report.total.wrong, *report.total.lost, *report.left][:_N_SHOWN]:
        click.echo(problem, err=True)
    return ExitCode.DONE if report.passed else ExitCode.FAILED


def _table(report: Report) -> str:
    lines = [
        "| fault | times | right | wrong | lost | longest pause |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in report.rows.items():
        pause = f"{row.pause_s:.2f} s"
        lines.append(f"| {name} | {row.times} | {row.n_right} | {len(row.wrong)} | {len(row.lost)} | {pause} |")
    total = report.total
    n_faults = sum(row.times for row in report.rows.values())
    lines.append(
        f"| all, each answer once | {n_faults} | {total.n_right} | {len(total.wrong)} | {len(total.lost)} "
        f"| {total.pause_s:.2f} s |"
    )
    recovery, cache = report.recovery, report.recovery["cache"]
    summary = [
        f"{report.seconds:.0f} s, seed {report.seed}; {report.restarts} restarts of daemons",
        f"{recovery['sequences']} sequences went on",
        f"{recovery['rebuilt_tokens']} tokens rebuilt by the lost stages alone",
        f"{recovery['recomputed_tokens']} computed again by all",
        f"{cache['restored']} snapshots restored, refused: {cache['failures'] or 'none'}",
        f"descriptors of the supervisor {report.descriptors[0]} before, {report.descriptors[1]} after",
        f"left over: {', '.join(report.left) or 'nothing'}",
    ]
    lines += ["", "; ".join(summary)]
    return "\n".join(lines)


def _json(report: Report) -> str:
    rows = {
        name: {"times": row.times, "right": row.n_right, "wrong": row.wrong, "lost": row.lost, "pause_s": row.pause_s}
        for name, row in report.rows.items()
    }
    total = report.total
    answers = {"right": total.n_right, "wrong": total.wrong, "lost": total.lost, "pause_s": total.pause_s}
    return json.dumps(
        {
            "seed": report.seed,
            "seconds": report.seconds,
            "faults": rows,
            "answers": answers,
            "restarts": report.restarts,
            "recovery": report.recovery,
            "descriptors": report.descriptors,
            "left": report.left,
        },
        indent=2,
    )
