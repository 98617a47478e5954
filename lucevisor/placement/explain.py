"""Renders a plan for ``lucevisor plan``: table rows, plain text, JSON.

Invariant: everything shown comes from the placement; only sums and differences are computed here.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.result import DevicePlan, Infeasible, Placement

Result = Placement | Infeasible
HEADINGS = ("GROUP", "DEVICE", "LAYERS", "WEIGHTS", "STATE", "WORKSPACE", "FREE", "")


@dataclass(frozen=True, slots=True)
class TableRow:
    """The cells of one shard."""

    group: str
    device: str
    layers: str
    weights: str
    state: str
    workspace: str
    free: str
    verdict: str  # "fits", "short by 1.2 GiB", "unknown"


def placement_of(result: Result) -> Placement:
    """Return the placement, whether or not it fits."""
    return result.placement if isinstance(result, Infeasible) else result


def rows(result: Result) -> list[TableRow]:
    """Return a row for each shard, in layer order, one for the drafter and one for the scoring model."""
    p = placement_of(result)
    devices = [(d, str(d.layers)) for d in p.devices]
    if p.draft_device is not None:
        devices.append((p.draft_device, "drafter"))
    if p.scorer_device is not None:
        devices.append((p.scorer_device, "scoring"))
    return [
        TableRow(
            group=d.device.group,
            device=f"{d.device} {d.name}".strip(),
            layers=layers,
            weights=format_bytes(d.weight_bytes),
            state=format_bytes(d.state_bytes),
            workspace=format_bytes(d.workspace_bytes),
            free="unknown" if d.free_bytes is None else format_bytes(d.free_bytes),
            verdict=_verdict(d),
        )
        for d, layers in devices
    ]


def _verdict(device: DevicePlan) -> str:
    if device.fits is None:
        return "unknown"
    return "fits" if device.fits else f"short by {format_bytes(device.short_bytes)}"


def table(result: Result) -> str:
    """Return the rows with headings as a plain text table."""
    lines = [HEADINGS, *(astuple(row) for row in rows(result))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    right = range(3, 7)
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def text(result: Result, *, verbose: bool = False) -> str:
    """Return the output of ``lucevisor plan``: model, table, sizes, reasons, notices, advice; ``verbose``: details,
    too.
    """
    p = placement_of(result)
    where = f"{_counted(len(p.devices), 'device')}, {_counted(len(p.stages), 'stage')}"
    parts = [
        f"{p.model} ({p.architecture}, {p.n_layers} layers, {p.quant}) on {where}",
        table(result),
        _sizes(p, verbose=verbose),
        _listed("Why", (*p.reasons, *(p.details if verbose else ()))),
        _listed("Note", p.notices),
    ]
    if isinstance(result, Infeasible):
        parts.append(_listed("It does not fit", result.message.splitlines()))
    return "\n\n".join(part for part in parts if part)


def _sizes(p: Placement, *, verbose: bool) -> str:
    pools = [_counted(p.pools.full_pages, "page")]
    if p.pools.window_pages:
        pools.append(_counted(p.pools.window_pages, "window page"))
    if p.pools.states:
        in_host = f" ({p.pools.host_states} of them in host memory)" if p.pools.host_states else ""
        pools.append(_counted(p.pools.states, "recurrent state") + in_host)
    if p.pools.draft_states and verbose:
        pools.append(f"updates for {_counted(p.pools.draft_states, 'draft')}")
    sequences = f"{_counted(p.max_sequences, 'sequence')} of {p.max_context} tokens"
    if p.pool_pages is not None:
        sequences += f" with at most {_counted(p.pool_pages, 'page')} each on the devices"
        if p.pools.host_pages:
            sequences += f" and {p.pools.host_pages} in host memory for all"
    step = f"steps of {p.max_step_tokens} tokens, {sequences}"
    journal = f" and the journal up to {format_bytes(p.journal_bytes)}" if p.journal_bytes else ""
    swap = f", preempted requests up to {format_bytes(p.swap_bytes)}" if p.swap_bytes else ""
    host = f"arenas take {format_bytes(p.arena_bytes)}{journal}{swap} of host memory"
    kept = ", ".join(f"{format_bytes(n_bytes)} of group {group}" for group, n_bytes in p.host_state_bytes.items())
    return f"{', '.join(pools)}; {step}; {host}{f', checkpoints and pages {kept}' if kept else ''}"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _listed(heading: str, lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join([f"{heading}:", *(f"  {line}" for line in lines)]) if lines else ""


def as_json(result: Result) -> dict[str, object]:
    """Return the output of ``plan --json``.  Bytes are numbers; unknown values are null."""
    p = placement_of(result)
    others = (each for each in (p.draft_device, p.scorer_device) if each is not None)
    verdicts = [d.fits for d in (*p.devices, *others)]
    fits = False if isinstance(result, Infeasible) else None if None in verdicts else True
    return {
        "fits": fits,
        "model": {"name": p.model, "architecture": p.architecture, "layers": p.n_layers, "quant": p.quant},
        "dtype": p.dtype.value,
        "kv_dtype": p.kv_dtype.value,
        "max_context": p.max_context,
        "max_sequences": p.max_sequences,
        "prefill_chunk": p.prefill_chunk,
        "max_step_tokens": p.max_step_tokens,
        "pages": {
            "full": p.pools.full_pages,
            "resident": p.pool_pages,
            "window": p.pools.window_pages,
            "states": p.pools.states,
            "host_states": p.pools.host_states,
            "draft_states": p.pools.draft_states,
            "host": p.pools.host_pages,
        },
        "host_state_bytes": p.host_state_bytes,
        "arena_bytes": p.arena_bytes,
        "journal_bytes": p.journal_bytes,
        "swap_bytes": p.swap_bytes,
        "draft": _draft_json(p),
        "pflash": _scorer_json(p),
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
        "reasons": [*p.reasons, *p.details],
        "notices": list(p.notices),
        "advice": list(result.advice) if isinstance(result, Infeasible) else [],
    }


def _draft_json(p: Placement) -> dict[str, object]:
    stage, device = p.draft, p.draft_device
    return {
        "kind": stage.kind.value if stage is not None else None,
        "lookup": p.drafting.lookup,
        "max_drafts": p.drafting.max_drafts,
        "fixed": p.drafting.fixed,
        "left_out": p.draft_left_out or None,
        "stage": stage.index if stage is not None else None,
        "captures": list(stage.captures) if stage is not None else [],
        "device": _device_json(device) if device is not None else None,
    }


def _scorer_json(p: Placement) -> dict[str, object] | None:
    if p.scorer is None or p.scorer_device is None:
        return None
    name, window = p.scorer.name, p.scorer.window_tokens
    return {"name": name, "window_tokens": window, "device": _device_json(p.scorer_device)}


def _device_json(d: DevicePlan) -> dict[str, object]:
    return {
        "device": str(d.device),
        "group": d.device.group,
        "backend": d.backend.value,
        "name": d.name,
        "memory": d.memory,
        "layers": [d.layers.start, d.layers.stop],
        "weight_bytes": d.weight_bytes,
        "state_bytes": d.state_bytes,
        "host_state_bytes": d.host_state_bytes,
        "workspace_bytes": d.workspace_bytes,
        "free_bytes": d.free_bytes,
        "reserve_bytes": d.reserve_bytes,
        "fits": d.fits,
        "short_bytes": d.short_bytes,
        "decode_s": d.decode_s,
        "prefill_s": d.prefill_s,
    }
