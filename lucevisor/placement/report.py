"""Output of ``lucevisor plan``: a table of shards, text and JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from lucevisor.placement.formatting import format_bytes, in_columns
from lucevisor.placement.result import DevicePlan, Infeasible, Placement

Result = Placement | Infeasible


class TableRow(NamedTuple):
    """Cells of one shard.  ``verdict``: "fits", "short by 1.2 GiB" or "unknown"."""

    group: str
    device: str
    layers: str
    weights: str
    state: str
    workspace: str
    free: str
    verdict: str


HEADINGS = TableRow("GROUP", "DEVICE", "LAYERS", "WEIGHTS", "STATE", "WORKSPACE", "FREE", "")


def placement_of(result: Result) -> Placement:
    return result.placement if isinstance(result, Infeasible) else result


def plan_rows(result: Result) -> list[TableRow]:
    """Return a row for each shard, in layer order, and for each extra model."""
    p = placement_of(result)
    devices = [(d, str(d.layers)) for d in p.devices]
    others = (p.draft_device, "drafter"), (p.scorer_device, "scoring"), (p.encoder_device, "vision")
    devices += [(d, layers) for d, layers in others if d is not None]
    verdicts = {None: "unknown", True: "fits"}
    return [
        TableRow(
            group=d.device.group + (f" on {d.host}" if d.host else ""),
            device=f"{d.device} {d.name}".strip(),
            layers=layers,
            weights=format_bytes(d.weight_bytes),
            state=format_bytes(d.state_bytes),
            workspace=format_bytes(d.workspace_bytes),
            free="unknown" if d.free_bytes is None else format_bytes(d.free_bytes),
            verdict=verdicts.get(d.fits) or f"short by {format_bytes(d.short_bytes)}",
        )
        for d, layers in devices
    ]


def plan_table(result: Result) -> str:
    return in_columns([HEADINGS, *plan_rows(result)], range(3, 7))


def host_table(p: Placement) -> str:
    rows = [
        (use.owner, "half of what is free" if use.limit_bytes is None else format_bytes(use.limit_bytes), use.owner.key)
        for use in p.host_memory
        if use.limit_bytes != 0
    ]
    return in_columns([("HOST MEMORY", "AT MOST", "SET BY"), *rows], (1,))


def plan_text(result: Result) -> str:
    p = placement_of(result)
    where = f"{_counted(len(p.devices), 'device')}, {_counted(len(p.stages), 'stage')}"
    parts = [
        f"{p.model} ({p.architecture}, {p.n_layers} layers, {p.quant}) on {where}",
        plan_table(result),
        host_table(p),
        _sizes(p),
        _listed("Why", p.reasons),
        _listed("Note", p.notices),
    ]
    if isinstance(result, Infeasible):
        parts.append(_listed("It does not fit", result.message.splitlines()))
    return "\n\n".join(part for part in parts if part)


def _sizes(p: Placement) -> str:
    pools = [_counted(p.pools.full_pages, "page")]
    if p.pools.window_pages:
        pools.append(_counted(p.pools.window_pages, "window page"))
    if p.pools.states:
        where = [f"each in the memory of {p.pools.state_pages} pages"] if p.pools.state_pages else []
        where += [f"{p.pools.host_states} of them in host memory"] if p.pools.host_states else []
        pools.append(_counted(p.pools.states, "recurrent state") + (f" ({'; '.join(where)})" if where else ""))
    if p.pools.draft_states:
        pools.append(f"updates for {_counted(p.pools.draft_states, 'draft')}")
    sequences = f"{_counted(p.max_sequences, 'sequence')} of {p.max_context} tokens"
    if p.pool_pages is not None:
        sequences += f" with at most {_counted(p.pool_pages, 'page')} each on the devices"
        if p.pools.host_pages:
            sequences += f" and {p.pools.host_pages} in host memory for all"
    return f"{', '.join(pools)}; steps of {p.max_step_tokens} tokens, {sequences}"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _listed(heading: str, lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join([f"{heading}:", *(f"  {line}" for line in lines)]) if lines else ""


def plan_json(result: Result) -> dict[str, object]:
    """Return the output of ``plan --json``.  Bytes are numbers; unknown values are null."""
    p = placement_of(result)
    verdicts = [d.fits for d in (*p.devices, p.draft_device, p.scorer_device, p.encoder_device) if d is not None]
    pools = p.pools
    return {
        "fits": False if isinstance(result, Infeasible) else None if None in verdicts else True,
        "model": {"name": p.model, "architecture": p.architecture, "layers": p.n_layers, "quant": p.quant},
        "dtype": p.dtype.value,
        "kv_dtype": p.kv_dtype.value,
        "max_context": p.max_context,
        "max_sequences": p.max_sequences,
        "prefill_chunk": p.prefill_chunk,
        "max_step_tokens": p.max_step_tokens,
        "pages": {
            "full": pools.full_pages,
            "resident": p.pool_pages,
            "window": pools.window_pages,
            "states": pools.states,
            "state_pages": pools.state_pages,
            "host_states": pools.host_states,
            "draft_states": pools.draft_states,
            "host": pools.host_pages,
        },
        "host_memory": [use.as_json() for use in p.host_memory],
        "draft": {
            "kind": p.draft.kind.value if p.draft is not None else None,
            "lookup": p.drafting.lookup,
            "max_drafts": p.drafting.max_drafts,
            "fixed": p.drafting.fixed,
            "left_out": p.draft_left_out or None,
            "stage": p.draft.index if p.draft is not None else None,
            "captures": list(p.draft.captures) if p.draft is not None else [],
            "device": _device_json(p.draft_device),
        },
        "pflash": None
        if p.scorer is None
        else {
            "name": p.scorer.name,
            "window_tokens": p.scorer.window_tokens,
            "device": _device_json(p.scorer_device),
        },
        "vision": None
        if p.encoder is None
        else {
            "name": p.encoder.name,
            "min_tokens": p.encoder.min_tokens,
            "max_tokens": p.encoder.max_tokens,
            "device": _device_json(p.encoder_device),
        },
        "goal": p.goal or None,
        "speeds_measured": p.measured or None,
        "stages": [
            {
                "stage": stage.index,
                "group": stage.group,
                "layers": [stage.layers.start, stage.layers.stop],
                "devices": [str(shard.device) for shard in stage.shards],
            }
            for stage in p.stages
        ],
        "devices": [_device_json(d) for d in p.devices],
        "reasons": list(p.reasons),
        "notices": list(p.notices),
        "advice": list(result.advice) if isinstance(result, Infeasible) else [],
    }


def _device_json(d: DevicePlan | None) -> dict[str, object] | None:
    if d is None:
        return None
    plain = {field.name: getattr(d, field.name) for field in fields(d)}
    layers = [d.layers.start, d.layers.stop]
    return plain | {
        "device": str(d.device), "group": d.device.group, "backend": d.backend.value, "layers": layers, "fits": d.fits,
    }  # fmt: skip
