"""``lucevisor top``: the running box, redrawn every second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lucevisor.app.rundir import find_supervisor
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import SECONDS, target_options
from lucevisor.cli.status_view import (
    Status,
    bar,
    draft_lines,
    headline,
    indented,
    models_of,
    page_line,
    problem_lines,
    styled_state,
)
from lucevisor.errors import ExitCode
from lucevisor.placement.formatting import format_bytes, format_seconds

_BLOCKS = "▁▂▃▄▅▆▇█"
_MAX_REQUESTS = 20
_BAR = (24, 72)
"""Columns of a bar on narrow and on wide terminals."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Load of a stage between two answers; ``compute`` and ``wait`` are shares of that time."""

    name: str
    n_steps: int
    compute: float
    wait: float
    step_s: float
    waits_for: str


@click.command()
@target_options
@click.option("--every", "every_s", type=SECONDS, default=1.0, show_default=True, help="Seconds between two updates.")
def top(name: str | None, socket: Path | None, every_s: float) -> int:
    """Watch tokens/s, load and wait of each stage, memory and requests; Ctrl-C ends it.

    Without a terminal it is printed once, after one interval.
    """
    client = AdminClient(find_supervisor(name, socket).socket)
    console = Console()
    every_s = max(0.1, every_s)
    before, speeds = client.call("GET", "/status"), deque[float](maxlen=60)
    began = time.monotonic()
    try:
        if not console.is_terminal:
            time.sleep(every_s)
            console.print(
                screen(before, client.call("GET", "/status"), time.monotonic() - began, speeds, console.width)
            )
            return ExitCode.DONE
        with Live(Text("asking"), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                now, at = client.call("GET", "/status"), time.monotonic()
                speeds.append(total(now, "tokens_per_s"))
                live.update(screen(before, now, at - began, speeds, console.width), refresh=True)
                before, began = now, at
    except KeyboardInterrupt:
        pass
    return ExitCode.DONE


def stage_loads(before: Status, now: Status, seconds: float) -> list[StageLoad]:
    """Return the load of each stage over ``seconds``: of several models those of the first, of replicas all."""
    replicas = [_alone(now, part) for part in models_of(now) if part["replica"]] or [now]
    earlier = [_alone(before, part) for part in models_of(before) if part["replica"]] or [before]
    return [load for one, other in zip(earlier, replicas, strict=True) for load in _stage_loads(one, other, seconds)]


def _alone(status: Status, part: Status) -> Status:
    """Return the status with one replica's engine and groups."""
    groups = [group for group in status["groups"] if group["name"] in part["groups"]]
    return {**status, "engine": part["engine"], "groups": groups}


def total(status: Status, key: str) -> float:
    """Return a number of the engine: of replicas together, else of the first model."""
    replicas = [part["engine"][key] for part in models_of(status) if part["replica"]]
    return float(sum(replicas)) if replicas else float(status["engine"][key])


def _stage_loads(before: Status, now: Status, seconds: float) -> list[StageLoad]:
    names = {index: group["name"] for group in now["groups"] for index in group["stages"]}
    loads = []
    for index, stage in enumerate(now["engine"]["stages"]):
        earlier = before["engine"]["stages"][index] if index < len(before["engine"]["stages"]) else None
        zero = {"steps": 0, "compute_s": 0.0, "wait_s": 0.0}
        steps, compute_s, wait_s = (stage[key] - (earlier or zero)[key] for key in ("steps", "compute_s", "wait_s"))
        busy = steps > 0 and seconds > 0
        compute = min(1.0, max(0.0, compute_s) / seconds) if busy else 0.0
        loads.append(
            StageLoad(
                name=f"{index} {names.get(index, 'drafter')}",
                n_steps=max(0, steps),
                compute=compute,
                wait=min(1.0 - compute, max(0.0, wait_s) / seconds) if busy else 0.0,
                step_s=compute_s / steps if steps > 0 else 0.0,
                waits_for=f"{index - 1} {names.get(index - 1, '')}".strip() if index else "the next step",
            )
        )
    return loads


def screen(before: Status, now: Status, seconds: float, speeds: deque[float], width: int = 80) -> RenderableType:
    """Return all of it for one pair of answers, ``width`` columns wide at most."""
    bar_width = min(_BAR[1], max(_BAR[0], width - 56))
    replicated = any(part["replica"] for part in models_of(now))
    counts = "".join(f"  {key} {total(now, key):.0f}" for key in ("running", "queued", "held"))
    speed = Text.assemble(
        (f"{total(now, 'tokens_per_s'):8.1f}", "bold"), " tokens/s ", (_spark(speeds), "cyan"), counts
    )
    parts: list[RenderableType] = [
        *headline(now), speed, *problem_lines(now), Text(),
        _stages(stage_loads(before, now, seconds), bar_width), Text(),
        _memory(now, bar_width), Text(),
        *(line for part in models_of(now)[: None if replicated else 1] for line in _state_lines(part)), Text(),
        _requests(now["requests"]),
    ]  # fmt: skip
    return Group(*parts)


def _state_lines(part: Status) -> Iterator[RenderableType]:
    if part["replica"]:
        yield Text(part["title"])
    yield Text(page_line(part["engine"]["pages"]))
    yield from map(indented, draft_lines(part["draft"]))


def _spark(speeds: deque[float]) -> str:
    most = max(speeds, default=0.0)
    recent = list(speeds)[-20:]
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * v / most)] if most else _BLOCKS[0] for v in recent)


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _stages(loads: list[StageLoad], bar_width: int) -> Table:
    table = _table("stage", "computes ━ waits ━", "", "a step", "waits for")
    for load in loads:
        shown = bar((load.compute, "green"), (load.wait, "yellow"), width=bar_width)
        if not load.n_steps:
            table.add_row(Text(load.name), shown, "idle", "", "")
            continue
        shares = f"{load.compute:4.0%} {load.wait:4.0%}"
        table.add_row(Text(load.name), shown, shares, format_seconds(load.step_s), Text(load.waits_for))
    return table


def _memory(now: Status, bar_width: int) -> Table:
    table = _table("device", "weights ━ state ━ other ━", "", "group", "state")
    for group in now["groups"]:
        of_all = dict[str, Status]()  # one device has a part of each of several models
        for one in group["devices"]:
            device = of_all.setdefault(one["device"], {**one, "weight_bytes": 0, "state_bytes": 0})
            device["weight_bytes"] += one["weight_bytes"]
            device["state_bytes"] += one["state_bytes"]
        for device in of_all.values():
            weights, state, free = (device[key] for key in ("weight_bytes", "state_bytes", "free_bytes"))
            total = max(device["total_bytes"], weights + state + free, 1)
            other = max(0, total - weights - state - free)
            parts = ((weights / total, "blue"), (state / total, "magenta"), (other / total, "white"))
            sizes = f"{format_bytes(free)} of {format_bytes(total)} free"
            table.add_row(
                Text(device["device"]),
                bar(*parts, width=bar_width),
                sizes,
                Text(group["name"]),
                styled_state(group["state"]),
            )
    return table


def _requests(requests: list[Status]) -> RenderableType:
    if not requests:
        return Text("no request in flight", "dim")
    table = _table("request", "for", "first", "prompt", "generated", "drafts")
    for request in requests[:_MAX_REQUESTS]:
        table.add_row(*_request_cells(request))
    return Group(table, Text(f"and {len(requests) - _MAX_REQUESTS} more")) if len(requests) > _MAX_REQUESTS else table


def _request_cells(request: Status) -> Iterator[Text]:
    first = request["first_token_s"]
    yield Text(request["id"][:20])
    yield Text(format_seconds(request["elapsed_s"]))
    yield Text("waits", "yellow") if first is None else Text(format_seconds(first))
    yield Text(str(request["prompt_tokens"]))
    yield Text(str(request["generated_tokens"]))
    share = f" {request['accepted_tokens'] / request['generated_tokens']:.0%}" if request["generated_tokens"] else ""
    yield Text(f"{request['accepted_tokens']}{share}")
