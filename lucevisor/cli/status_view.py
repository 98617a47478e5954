"""The status JSON as text for a terminal: `lucevisor status`, and the parts that `top` shares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lucevisor.placement.formatting import format_bytes, format_seconds

Status = dict[str, Any]

STYLES = {"ready": "green", "attached": "green", "failed": "bold red", "quarantined": "bold red", "stopped": "dim"}
CHANGING = "yellow"
"""Style of the states in between, such as loading or backoff."""


def styled_state(state: str) -> Text:
    return Text(state, STYLES.get(state, CHANGING))


def status_view(status: Status, *, folds: bool = True, verbose: bool = False) -> RenderableType:
    """Return everything that `lucevisor status` prints; ``folds``: long lines are folded, not left whole."""
    lines = [line for model in models_of(status) for line in model_lines(model, verbose=verbose)]
    lines += [*cluster_lines(status), *override_lines(status["overrides"])]
    texts = map(indented if folds else Text, filter(None, lines))
    return Group(*headline(status), *shard_tables(status), *problem_lines(status), *warning_lines(status), *texts)


def models_of(status: Status) -> Sequence[Status]:
    """Return the part of each model or replica: the status itself where it has one."""
    models: Sequence[Status] = status["models"]
    if len(models) <= 1:
        return [{**status, "residency": models[0].get("residency") if models else None, "title": "", "replica": ""}]
    return [{**model, "title": _title(model), "replica": model.get("replica", "")} for model in models]


def _title(model: Status) -> str:
    name = f"replica {model['replica']}" if model.get("replica") else model["name"]
    why = f": {model['reason']}" if model.get("replica") and model["reason"] else ""
    return f"{name} {load_state_line(model.get('residency')) or model['state']}{why}"


def model_lines(status: Status, *, verbose: bool = False) -> list[str]:
    engine = status["engine"]
    work = f"running {engine['running']}, queued {engine['queued']}, held {engine['held']}; "
    return [
        status["title"],
        "" if status["title"] else load_state_line(status.get("residency")),
        f"{work}{engine['tokens_per_s']} tokens/s",
        page_line(engine["pages"]),
        *draft_lines(status["draft"], verbose=verbose),
        *pflash_lines(status["pflash"]),
        *vision_lines(status["vision"]),
        *cache_lines(status["cache"]),
        host_memory_line(status["host_memory"]),
    ]


def load_state_line(load_state: Status | None) -> str:
    """Return whether a model is loaded; empty for one that is and stays."""
    if load_state is None or (load_state["state"] == "loaded" and load_state["unloads_in_s"] is None):
        return ""
    parts = [load_state["state"]]
    if load_state["parked_bytes"]:
        parts.append(f"{format_bytes(load_state['parked_bytes'])} of weights in host memory")
    if load_state["unloads_in_s"] is not None and load_state["state"] == "loaded":
        parts.append(f"unloads in {format_seconds(load_state['unloads_in_s'])}")
    if load_state["problem"]:
        parts.append(load_state["problem"])
    return ", ".join(parts)


def indented(line: str) -> RenderableType:
    """Return a line whose spaces at the beginning hold for all lines that it is folded into."""
    text = line.lstrip(" ")
    return Padding(Text(text), (0, 0, 0, len(line) - len(text)))


def headline(status: Status) -> Iterator[Text]:
    yield Text.assemble(
        (status["name"], "bold"), " ", styled_state(status["state"]), f"  {status['url']}  pid {status['pid']}"
    )
    replicas = [part["replica"] for part in models_of(status) if part["replica"]]
    for part in models_of(status)[: 1 if replicas else None]:
        model = part["model"]
        name = f"{model['name']} ({model['architecture']}, {model['layers']} layers, {model['quant']})"
        yield Text(f"{name}, {len(replicas)} replicas" if replicas else name)
        for adapter in part.get("adapters", ()):
            yield Text(f"  adapter {adapter['name']}  {format_bytes(adapter['weight_bytes'])}")


def shard_tables(status: Status) -> Iterator[Table]:
    """Yield a table with a row for each device, and one for a group that has none now; of several models one for each
    that has devices."""
    parts = models_of(status)
    replicas = {name: part["replica"] for part in parts if part["replica"] for name in part["groups"]}
    several = len(parts) > 1 and not replicas
    tables = {part["name"]: _shard_table(title=part["name"]) for part in parts} if several else {}
    tables[""] = _shard_table(more=["replica"] if replicas else [])
    for group in status["groups"]:
        for device in group["devices"] or [None]:
            pid = group["daemon_pid"] if group["host"] else group["pid"]
            process, where = (str(pid or "-"), str(group["restarts"])), f" on {group['host']}" if group["host"] else ""
            if device is None:
                state = styled_state(group["state"])
                tables[""].add_row(Text(group["name"] + where), "-", state, *process, "-", "-", "-")
                continue
            start, stop = device["layers"]
            sizes = (format_bytes(device[key]) for key in ("weight_bytes", "state_bytes", "free_bytes"))
            state = styled_state(group["state"])
            replica = [Text(replicas[group["name"]])] if replicas else []
            table = tables[device["model"] if several else ""]
            table.add_row(Text(device["device"] + where), Text(f"[{start},{stop})"), state, *process, *sizes, *replica)
    yield from (table for table in tables.values() if table.row_count)


def _shard_table(title: str = "", more: Sequence[str] = ()) -> Table:
    name = Text(title, "bold") if title else None
    table = Table(title=name, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("device", "layers", "state"):
        table.add_column(column, overflow="fold", min_width=7)
    for column in ("pid", "restarts", "weights", "state", "free"):
        table.add_column(column, justify="right", no_wrap=True, min_width=8 if column in ("weights", "state") else None)
    for column in more:
        table.add_column(column, overflow="fold")
    return table


def kernel_table(status: Status) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("group", "device", "operation", "runs"):
        table.add_column(title, overflow="fold")
    for group in status["groups"]:
        for key, runs in sorted(group["kernels"].items()):
            device, _, operation = key.partition(" ")
            table.add_row(*map(Text, (group["name"], device, operation, runs)))
    return table


def problem_lines(status: Status) -> Iterator[Text]:
    """Yield what keeps the endpoint from serving, group by group, and how loading goes."""
    awake = [group for group in status["groups"] if group["state"] != "stopped" or status["state"] != "ready"]
    yield from group_lines(awake)  # one that is stopped while the service is ready has idle models only
    for engine in (part["engine"] for part in models_of(status)):
        if engine["held"]:
            held_s = format_seconds(engine["recovery"]["held_s"])
            yield Text(f"{engine['held']} requests are held for {held_s}", CHANGING)
        rebuilding = engine["recovery"]["rebuilding_tokens"]
        if rebuilding["of"]:
            share, counts = rebuilding["done"] / rebuilding["of"], f"{rebuilding['done']} of {rebuilding['of']}"
            yield Text.assemble("  ", bar((share, "cyan"), width=30), f" rebuilt {counts} tokens")
    if status["reason"] and all(group["state"] == "ready" for group in status["groups"]):
        yield Text(status["reason"], CHANGING)


def cluster_lines(status: Status) -> Iterator[str]:
    """Yield a line for each group on another host, and one for connections that were refused."""
    for group in status["groups"]:
        if group["host"] and (path := group["path"]) is not None:
            rate = f", at least {format_bytes(path['bytes_per_s'])}/s" if path["bytes_per_s"] else ""
            yield f"group {group['name']} on {group['host']}: round trip {format_seconds(path['round_trip_s'])}{rate}"
    if status["cluster"] is not None and (refused := status["cluster"]["refused"]):
        yield f"{refused} connections to {status['cluster']['listen']} were refused: see `lucevisor logs`"


def warning_lines(status: Status) -> Iterator[Text]:
    for group in status["groups"]:
        for warning in group["warnings"]:
            yield Text.assemble((f"group {group['name']} is slow: ", CHANGING), warning)


def group_lines(groups: Sequence[Status]) -> Iterator[Text]:
    """Yield a line for each group that is not ready, and a bar below it once something of it is loaded."""
    for group in groups:
        if group["state"] == "ready":
            continue
        age, why = format_seconds(group["state_s"]), f": {group['reason']}" if group["reason"] else ""
        retry = f"; tries again in {format_seconds(group['retry_in_s'])}" if group.get("retry_in_s") else ""
        where = f" on {group['host']}" if group["host"] else ""
        yield Text.assemble(
            f"group {group['name']}{where} is ", styled_state(group["state"]), f" for {age}{why}{retry}"
        )
        loading = group["loading"]
        if loading is not None and not loading["total_bytes"]:
            yield Text(f"  {loading['phase']}")
        if loading is not None and loading["done_bytes"] and loading["total_bytes"]:
            done, total = loading["done_bytes"], loading["total_bytes"]
            sizes = f" {loading['phase']} {format_bytes(done)} of {format_bytes(total)}"
            yield Text.assemble("  ", bar((done / total, "cyan"), width=30), sizes)


def wait_view(what: str, groups: Sequence[Status], elapsed_s: float) -> RenderableType:
    """Return the live view of a start or restart: groups that are not ready, the time passed, what is waited for."""
    not_ready = [group for group in groups if group["state"] != "ready"]
    waiting = ", ".join(f"group {group['name']}" for group in not_ready) or "the pipeline"
    last = Text.assemble((f"{what}: {elapsed_s:.1f} s", "bold"), f", waiting for {waiting}")
    return Group(*group_lines(groups), last)


def page_line(pages: dict[str, Any]) -> str:
    """Return pages and recurrent states in use; the totals are those of `lucevisor plan`."""
    parts = [
        f"{space} {'states' if space == 'recurrent' else 'pages'} {use['used']} of {use['total']}"
        + (f" ({use['cached']} cached)" if use["cached"] else "")
        for space, use in pages["spaces"].items()
    ]
    if pages["out"]:
        in_host = f" ({pages['host']} of {pages['host_total']} in host memory)" if pages["host_total"] else ""
        parts.append(f"{pages['out']} paged out{in_host}")
    return ", ".join(parts)


def bar(*parts: tuple[float, str], width: int) -> Text:
    """Return a bar of ``width`` columns; each part is a share of 1 and a style."""
    text, done, share = Text(), 0, 0.0
    for part, style in parts:
        share = min(1.0, share + max(0.0, part))
        cells = round(share * width) - done
        text.append("━" * cells, style)
        done += cells
    return text.append("─" * (width - done), "dim")


def draft_lines(d: dict[str, Any], *, verbose: bool = False) -> list[str]:
    """Return lines on the drafter and on verified drafts; each fits 80 columns but for names."""
    lines = []
    if d["state"] != "none":
        where, why = f" on {d['device']}" if d["device"] else "", f": {d['reason']}" if d["reason"] else ""
        lines.append(f"drafter {d['name']} ({d['kind']}){where} is {d['state']}{why}")
    if d.get("paused"):
        lines.append(f"  paused: {d['paused']}")
    if not d.get("verify_slices"):
        return lines
    share = d["accepted"] / d["verified"] if d["verified"] else 0.0
    lines.append(f"  {share:.0%} of {d['verified']} drafts were right; {d['tokens_per_step']:.2f} tokens a step")
    if not verbose:
        return lines
    n_looked_up = d["lookups"]["slices"]
    positions = " ".join(f"{share:.2f}" for share in d["acceptance_by_position"][:8])
    return [
        *lines,
        f"  {d['acceptance_length']:.2f} tokens a verify slice ({d['tokens_per_step']:.2f} with plain ones), "
        f"width {d['width']}",
        f"  accepted {d['accepted']} of {d['verified']} verified, of {d['drafted']} drafted; "
        f"looked up {n_looked_up} slices",
        f"  accepted by position: {positions}",
        f"  drafting took {format_seconds(d['draft_s'])}, verifying {format_seconds(d['verify_s'])}, "
        f"the drafter's context {format_seconds(d['upkeep_s'])}",
    ]


def host_memory_line(uses: Sequence[Status]) -> str:
    """Return the host memory of each owner that has some, with its limit."""
    parts = [
        f"{use['owner']} {format_bytes(use['bytes'])}"
        + (f" of {format_bytes(use['limit_bytes'])}" if use["limit_bytes"] not in (None, use["bytes"]) else "")
        for use in uses
        if use["bytes"]
    ]
    return f"host memory: {', '.join(parts)}" if parts else ""


def override_lines(overrides: Sequence[Status]) -> list[str]:
    """Return a line for each overridden key, with the value of the file."""
    lines = []
    for override in overrides:
        hides = (
            "which the file does not set"
            if override["hides"] is None
            else f"the file has {json.dumps(override['hides'])}"
        )
        value = "not shown" if override["value"] is None else override["value"]
        lines.append(f"{override['key']} = {value} by {override['source']} --set; {hides}")
    return lines


def vision_lines(vision: dict[str, Any]) -> list[str]:
    """Return lines on the vision encoder; none without one."""
    if vision["state"] == "none":
        return []
    why = f": {vision['reason']}" if vision["reason"] else ""
    images = f"{vision['encoded']} images encoded in {vision['seconds']:.1f} s, {vision['reused']} known already"
    return [f"vision encoder {vision['name']} on {vision['device']} is {vision['state']}{why}; {images}"]


def pflash_lines(p: dict[str, Any]) -> list[str]:
    """Return lines on the scoring model and the shortened prompts; none without one."""
    if p["state"] == "none":
        return []
    why, n = f": {p['reason']}" if p["reason"] else "", p["prompts"]
    lines = [f"scoring model {p['name']} on {p['device']} is {p['state']}{why}"]
    if n["compressed"] or n["failed"]:
        lines.append(
            f"  shortened {n['compressed']} prompts, {p['tokens']} tokens to {p['kept']}, "
            f"in {format_seconds(p['seconds'])}; {n['failed']} not scored"
        )
    return lines


def cache_lines(c: dict[str, Any]) -> list[str]:
    """Return lines on prefix slots, and on snapshots when they are on."""
    lines = []
    if c["max_slots"]:
        memory = f"{format_bytes(c['used_bytes'])} of {format_bytes(c['max_bytes'])}"
        reused = f"{c['hits']} of {c['prompts']} prompts began with one"
        lines.append(f"prefix slots {c['prefix_slots']} of {c['max_slots']}, {memory}; {reused}")
        if n_tokens := sum(c["tokens"].values()):
            lines.append(f"  {n_tokens} tokens not computed")
    if c["host_max_bytes"]:
        memory = f"{format_bytes(c['host_bytes'])} of {format_bytes(c['host_max_bytes'])}"
        lines.append(f"  in host memory {c['host_slots']}, {memory}")
    if c["dir"]:
        failed = "".join(f", {n} {reason}" for reason, n in c["failures"].items())
        disk = f"{format_bytes(c['snapshot_bytes'])} of {format_bytes(c['disk_max_bytes'])}"
        lines.append(f"snapshots {c['snapshots']}, {disk}; saved {c['saved']}, restored {c['restored']}{failed}")
        lines.append(f"  in {c['dir']}")
    return lines
