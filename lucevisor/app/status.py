"""The JSON of `lucevisor status --json`.  Field names are stable (docs/prefix-cache.md for those of ``cache``)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from lucevisor.app import logs
from lucevisor.app.extra_models import pflash_status, vision_status
from lucevisor.compression.compressor import Compressor
from lucevisor.deployment.service import ModelService, Observer, Service
from lucevisor.engine.recovery import RecoveryStatistics
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.engine.statistics import CacheStatistics, EngineStatistics
from lucevisor.kv.page_pool import PageUse
from lucevisor.model.values import KvGroup
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.loading import DeviceUse
from lucevisor.protocol.messages import Progress
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor

_RESTART_REASONS: Final = ("failure", "resources", "operator")
"""All reasons: a counter that first appears with 1 hides that restart from Prometheus' increase()."""


def status(
    service: Service,
    name: str,
    url: str,
    progress: LoadProgress,
    requests: list[dict[str, object]],
    compressors: Mapping[str, Compressor | None] = MappingProxyType({}),
    overrides: Sequence[Mapping[str, object]] = (),
) -> dict[str, Any]:
    """Return the whole status; never blocks.  ``compressors``: of PFlash, by model.

    ``models`` has all models, and each replica; the first one is beside the fields of the service, too.
    """
    models = [_model(model, compressors.get(model.name)) for model in service.models.values()]
    own = ("name", "replica", "groups", "state", "reason", "residency")
    first = {key: value for key, value in models[0].items() if key not in own}
    return {
        "name": name,
        "pid": os.getpid(),
        "url": url,
        "tls_cert_file": service.config.server.tls_cert_file,
        "log": str(logs.log_file() or ""),
        "overrides": list(overrides),
        "state": service.state,
        "reason": service.reason(),
        "retry_in_s": service.retry_in_s(),
        "groups": [_group(service, g, progress) for g in service.groups.values()],
        "cluster": _cluster(service),
        "requests": requests,
        **first,
        "models": models,
    }


def _cluster(service: Service) -> dict[str, Any] | None:
    listener = service.listener
    return None if listener is None else {"listen": listener.address, "refused": listener.n_refused}


def _model(service: ModelService, compressor: Compressor | None) -> dict[str, Any]:
    spec = service.model.spec
    statistics = service.engine.statistics() if service.engine is not None else None
    return {
        "name": service.name,
        "replica": service.replica,
        "groups": [*service.groups],
        "state": service.state,
        "reason": service.reason(),
        "residency": _load_state(service),
        "model": {
            "name": service.name,
            "architecture": spec.architecture,
            "layers": spec.n_layers,
            "quant": spec.quant,
            "file": str(service.model.files[0]),
        },
        "adapters": _adapters(service),
        "engine": _engine(statistics),
        "draft": _draft(service, statistics),
        "pflash": pflash_status(service, compressor),
        "vision": vision_status(service),
        "host_memory": _host_memory(service),
        "cache": _cache(service, statistics.cache if statistics is not None else CacheStatistics()),
    }


def _load_state(service: ModelService) -> dict[str, Any]:
    """Whether the model is loaded.  ``unloads_in_s``: of an idle one with a ``ttl``; ``load_s``: of the last load."""
    control = service.control
    n_loads, load_s = control.loads if control is not None else (0, 0.0)
    seconds = control.unloads_in_s if control is not None else None
    return {
        "state": service.model_state.value,
        "problem": control.problem if control is not None else "",
        "unloads_in_s": None if seconds is None else round(seconds, 3),
        "pin": service.config.model.pin,
        "loads": n_loads,
        "load_s": round(load_s, 3),
        "parked_bytes": service.host_memory.used(HostOwner.WEIGHTS),
    }


def _adapters(service: ModelService) -> list[dict[str, Any]]:
    placement = service.placement
    return [
        {
            "name": one.name,
            "file": str(one.files.paths[0]),
            "scale": one.scale,
            "weight_bytes": 0 if placement is None else one.n_bytes(placement.dtype),
        }
        for one in service.model.spec.adapters
    ]


def _draft(service: ModelService, now: EngineStatistics | None) -> dict[str, Any]:
    """Speculative decoding.  ``state``: "attached" while a drafter drafts; ``paused``: why decoding is plain now."""
    placement, drafter = service.placement, service.model.drafter
    configured = service.config.draft.kind
    if placement is None:
        return {"kind": configured, "state": "none", "reason": ""}
    stage, drafting = placement.draft, placement.drafting
    loaded = service.deployment.loads.get(stage.group) if stage is not None else None
    use = loaded.draft if loaded is not None else None
    kind = stage.kind.value if stage is not None else "lookup" if drafting.lookup and drafting.max_drafts else "off"
    state = "none" if drafter is None else "attached" if service.deployment.drafting else "detached"
    drafts = now.drafts if now is not None else DraftStatistics()
    return {
        "kind": kind,
        "lookup": drafting.lookup and drafting.max_drafts > 0,
        "max_drafts": drafting.max_drafts,
        "name": drafter.spec.model.name if drafter is not None else "",
        "file": str(drafter.files.paths[0]) if drafter is not None else "",
        "device": str(stage.device) if stage is not None else "",
        "weight_bytes": use.weight_bytes if use is not None else 0,
        "state_bytes": use.state_bytes if use is not None else 0,
        "state": state,
        "reason": service.deployment.draft_reason(),
        "paused": now.no_drafts if now is not None and state != "detached" else "",
        "width": now.draft_width if now is not None else 0,
        "steps": drafts.n_steps,
        "acceptance_length": round(drafts.acceptance_length, 3),
        "tokens_per_step": round(drafts.tokens_per_step, 3),
        "plain_slices": drafts.n_plain,
        "verify_slices": drafts.n_verify,
        "drafted": drafts.n_drafted,
        "verified": drafts.n_verified,
        "accepted": drafts.n_accepted,
        "acceptance_by_position": [round(share, 3) for share in drafts.acceptance_by_position],
        "draft_s": round(drafts.draft_s, 6),
        "verify_s": round(drafts.verify_s, 6),
        "upkeep_s": round(drafts.upkeep_s, 6),
        "lookups": {
            "slices": drafts.lookups.n_verify,
            "verified": drafts.lookups.n_verified,
            "accepted": drafts.lookups.n_accepted,
        },
    }


def _host_memory(service: ModelService) -> list[dict[str, Any]]:
    """Host memory by owner.  ``limit_bytes`` None: half of what is free."""
    if service.placement is None:
        return []
    loaded = service.deployment.loads.values()
    in_daemons = sum(use.host_state_bytes for uses in loaded for use in uses.shards)
    in_daemons += sum(uses.draft.host_state_bytes for uses in loaded if uses.draft is not None)
    return [
        use.as_json() | {"bytes": in_daemons if use.owner is HostOwner.POOLS else service.host_memory.used(use.owner)}
        for use in service.placement.host_memory
    ]


def _cache(service: ModelService, now: CacheStatistics) -> dict[str, Any]:
    """Prefix slots and snapshots; ``dir`` is empty while snapshots are off."""
    store, host = service.snapshot_store, service.host_tier
    entries, placement = store.entries if store is not None else [], service.placement
    return {
        "prefix_slots": now.n_slots,
        "max_slots": placement.prefix_slots if placement is not None else 0,
        "pinned": now.n_pinned,
        "used_bytes": now.n_bytes,
        "max_bytes": placement.cache_bytes if placement is not None else 0,
        "prompts": now.n_prompts,
        "hits": now.n_hits,
        "evictions": now.n_evictions,
        "tokens": {"device": 0, "host": 0, "disk": 0} | now.tokens,
        "host_slots": len(host.slots) if host is not None else 0,
        "host_bytes": host.n_bytes if host is not None else 0,
        "host_max_bytes": host.limit_bytes if host is not None else 0,
        "dir": str(store.directory.absolute()) if store is not None else "",
        "disk_max_bytes": store.budget if store is not None else service.config.cache.disk,
        "snapshots": len(entries),
        "snapshot_bytes": sum(entry.n_bytes for entry in entries),
        "saved": store.statistics.n_saved if store is not None else 0,
        "restored": store.statistics.n_restored if store is not None else 0,
        "failures": dict(store.statistics.failures) if store is not None else {},
    }


def _group(service: Service, group: GroupSupervisor, progress: LoadProgress) -> dict[str, Any]:
    """One group.  ``pid``: of the daemon, or of the launcher of one on another ``host``; ``daemon_pid``: there.

    ``stages``: of the first model that the group holds.
    """
    path = group.path
    models = [model for model in service.models.values() if group.name in model.groups]
    placement = models[0].placement
    stages = placement.stages_of(group.name) if placement is not None else ()
    kernels = {key: kernel for loaded in group.loads for key, kernel in loaded.kernels.items()}
    return {
        "name": group.name,
        "backend": group.config.backend,
        "host": group.config.host,
        "pid": group.pid,
        "daemon_pid": group.hello.pid if group.hello is not None else None,
        "path": None if path is None else {"round_trip_s": path.round_trip_s, "bytes_per_s": path.bytes_per_s},
        "state": group.state.name.lower(),
        "state_s": round(progress.state_s(group.name), 3),
        "reason": group.reason,
        "retry_in_s": None if group.retry_in_s is None else round(group.retry_in_s, 3),
        "loading": progress.loading(group.name),
        "restarts": group.restarts,
        "restart_reasons": {reason: service.restart_reasons[group.name][reason] for reason in _RESTART_REASONS},
        "quarantined": group.quarantined,
        "stages": [s.index for s in stages],
        "devices": devices(group, [model.name for model in models]),
        "rss_bytes": group.heartbeat.rss_bytes if group.heartbeat is not None else 0,
        "torch": group.hello.torch if group.hello is not None else "",
        "python": group.hello.executable if group.hello is not None else "",
        "kernels": kernels,
        "warnings": list(dict.fromkeys(warning for loaded in group.loads for warning in loaded.warnings)),
        "spare": any(spare["warm"] for spare in group.spares),
        "spares": group.spares,
    }


def devices(group: GroupSupervisor, models: Sequence[str]) -> list[dict[str, Any]]:
    loads = [(name, loaded) for name, loaded in zip(models, group.loads_by_model, strict=False) if loaded is not None]
    indices = sorted({use.device for _, loaded in loads for use in loaded.shards})
    free = dict(zip(indices, group.heartbeat.free_bytes, strict=False)) if group.heartbeat is not None else {}
    return [
        {**_device(group, use, free), "workspace_bytes": loaded.workspace_bytes.get(use.device), "model": model}
        for model, loaded in loads
        for use in loaded.shards
    ]


def _device(group: GroupSupervisor, use: DeviceUse, free: dict[int, int]) -> dict[str, Any]:
    info = {device.index: device for device in group.hello.devices} if group.hello is not None else {}
    known = info.get(use.device)
    return {
        "device": f"{group.name}:{use.device}",
        "name": known.name if known is not None else "",
        "layers": [use.layers.start, use.layers.stop],
        "weight_bytes": use.weight_bytes,
        "state_bytes": use.state_bytes,
        "host_state_bytes": use.host_state_bytes,
        "free_bytes": free.get(use.device, use.free_bytes),
        "total_bytes": known.total_bytes if known is not None else 0,
    }


def _recovery(now: RecoveryStatistics) -> dict[str, Any]:
    """Recovery counters since the start.  ``held_s``: of requests that wait now."""
    return {
        "held_s": round(now.held_s, 3),
        "pauses": {reason: pause.n for reason, pause in now.pauses.items()},
        "pause_s": {reason: round(pause.seconds, 3) for reason, pause in now.pauses.items()},
        "longest_pause_s": round(now.longest_pause_s, 3),
        "sequences": now.n_continued,
        "rebuilding_tokens": {"done": now.rebuilding[0], "of": now.rebuilding[1]},
        "rebuilt_tokens": now.n_rebuilt,
        "recomputed_tokens": now.n_recomputed,
        "kept_tokens": now.n_kept,
    }


def _pages(kv_groups: Mapping[str, PageUse], n_out: int = 0, host: PageUse | None = None) -> dict[str, Any]:
    """Pages of 64 tokens, without recurrent states; ``kv_groups`` has both apart, with the totals that `plan` shows."""
    pages = [use for kv_group, use in kv_groups.items() if kv_group != KvGroup.RECURRENT]
    return {
        "total": sum(p.total for p in pages),
        "used": sum(p.used - p.evictable for p in pages),
        "cached": sum(p.evictable for p in pages),  # held by prefix slots alone
        "host": 0 if host is None else host.used,
        "host_total": 0 if host is None else host.total,
        "out": n_out,
        "spaces": {
            kv_group: {"total": p.total, "used": p.used - p.evictable, "cached": p.evictable}
            for kv_group, p in kv_groups.items()
        },
    }


def _engine(statistics: EngineStatistics | None) -> dict[str, Any]:
    """``compute_s`` and ``wait_s`` of a stage, ``seconds`` of a boundary: totals since the start, for rates."""
    if statistics is None:
        nothing = {"running": 0, "queued": 0, "held": 0, "tokens_per_s": 0.0, "pages": _pages({})}
        return nothing | {"recovery": _recovery(RecoveryStatistics()), "stages": [], "boundaries": []}
    return {
        "running": statistics.running,
        "queued": statistics.queued,
        "held": statistics.recovery.held,
        "recovery": _recovery(statistics.recovery),
        "tokens_per_s": round(statistics.tokens_per_s, 2),
        "generated_tokens": statistics.generated_tokens,
        "preemptions": statistics.preemptions,
        "pages": _pages(statistics.pages, statistics.pages_out, statistics.host_pages),
        "stages": [
            {
                "steps": s.n_steps,
                "compute_ms": round(1e3 * s.compute_s / s.n_steps, 3) if s.n_steps else 0.0,
                "wait_ms": round(1e3 * s.wait_s / s.n_steps, 3) if s.n_steps else 0.0,
                "compute_s": round(s.compute_s, 6),
                "wait_s": round(s.wait_s, 6),
            }
            for s in statistics.steps.stages
        ],
        "boundaries": [{"hops": b.n_hops, "seconds": round(b.seconds, 6)} for b in statistics.steps.boundaries],
    }


class LoadProgress(Observer):
    """Records the groups' states.  ``announces``: whether `ready` may print."""

    def __init__(self) -> None:
        self.announces = True
        self._states: dict[str, tuple[State, str, float]] = {}  # with reason and since when
        self._shards: dict[str, dict[tuple[int, int, int], Progress]] = {}

    def state(self, group: str, state: State, reason: str) -> None:
        self._states[group] = state, reason, time.monotonic()
        self._shards.pop(group, None)

    def listening(self, url: str) -> None:
        """Called when the endpoint has its address, long before it is ready."""

    def progress(self, group: str, progress: Progress) -> None:
        if (
            group in self._states and self._states[group][0] is State.LOADING
        ):  # reports have a channel of their own and may come after READY
            self._shards.setdefault(group, {})[progress.model, progress.stage, progress.device] = progress

    def state_s(self, group: str) -> float:
        return time.monotonic() - self._states[group][2] if group in self._states else 0.0

    def groups(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "state": state.value,
                "reason": reason,
                "state_s": self.state_s(name),
                "loading": self.loading(name),
            }
            for name, (state, reason, _) in list(self._states.items())
            if state is not State.STOPPED
        ]

    def loading(self, group: str) -> dict[str, Any] | None:
        shards = list(self._shards.get(group, {}).values())
        if not shards:
            return None
        last = min(shards, key=lambda shard: shard.done_bytes / max(1, shard.total_bytes))
        return {
            "phase": last.phase,
            "done_bytes": sum(shard.done_bytes for shard in shards),
            "total_bytes": sum(shard.total_bytes for shard in shards),
        }
