"""How much of a GPU goes to the workspace, and how much of the rest to the pools?  Planned, and measured at the start.

    python bench/make_gguf.py --shape qwen3.6-27b --out 27b.gguf
    python bench/workspace.py --file 27b.gguf --sequences 1 8 64 256 [--daemons 2] [--set draft.kind=off] [--json PATH]

Starts the service in this process for each number of sequences, with --daemons groups on the same GPU, and prints a row
for each daemon:

planned, measured   workspace: the planner's estimate, and the peak of torch while the warm-up ran the largest steps
                    with sampling, with the pools of graphs
steps, graphs       the parts of what was measured; reserved: what torch's allocator took for both
free                what the driver says is left: before, ready, and the least while --streams sequences decoded
other               memory of the driver and of kernels: taken beyond weights, state and what torch has reserved
pool                state over what weights and the measured workspace leave of the free memory
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import structlog
from memory_watch import Poll, Watcher
from records import conditions, write_json

from lucevisor.app.model_files import open_models
from lucevisor.cli.bench import Case, tokens_per_s
from lucevisor.config import DeviceRef, load
from lucevisor.deployment.service import Observer, Service

GB = 1e9


class Events:
    """Log records of the service: keeps those of the workspace, prints warnings."""

    def __init__(self):
        self.kept = []

    def __call__(self, _logger, level, record):
        if "workspace" in record.get("event", ""):
            self.kept.append(record)
        if level in ("warning", "error"):
            print({key: str(value)[:300] for key, value in record.items()})
        raise structlog.DropEvent


def write_config(path, options, n_sequences):
    """One group for each daemon, with an even split; all else automatic."""
    lines = ["[model]", f"path = {json.dumps(str(options.file.resolve()))}"]
    backend, index = options.device.split(":")
    names = [f"g{i}" for i in range(options.daemons)]
    for name in names:
        lines += [f"[groups.{name}]", f'backend = "{backend}"', f"python = {json.dumps(sys.executable)}"]
        lines += [] if backend == "cpu" else [f'visible_devices = ["{index}"]']
    if len(names) > 1:
        lines += ["[placement]", f"target_devices = {json.dumps([f'{name}:0' for name in names])}"]
        lines += [f"target_layer_split = {[1.0] * len(names)}"]
    lines += ["[engine]", f"max_sequences = {n_sequences}"]
    path.write_text("\n".join(lines) + "\n")
    return load(path, options.set)


async def measure(config, models, run_dir, watcher, options, n_sequences):
    """Start a service, let all its sequences decode, and return a row for each daemon."""
    events, poll, free = Events(), Poll(watcher), sum(watcher.free().values())
    structlog.configure(processors=[events], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    service = Service(config, models, run_dir, Observer())
    started = time.perf_counter()
    try:
        await service.start()
        if not await service.wait_ready(options.timeout):
            raise RuntimeError(f"not ready: {service.reason()}")
        ready_s, ready_free = time.perf_counter() - started, sum(watcher.free().values())
        await tokens_per_s(service, Case(answer=16, streams=min(n_sequences, options.streams)), 0)
        watcher.look()
        placement = service.only.placement
        rows = [row(group, service, placement, events.kept, free) for group in service.groups]
        least = sum(watcher.least.values())
        shared = {"ready_s": ready_s, "free": free, "free_ready": ready_free, "free_least": least}
        held = sum(r["weights"] + r["state"] for r in rows)
        shared["other"] = free - ready_free - held - sum(r["reserved"] for r in rows)
        rest = free - sum(r["weights"] + r["measured"] for r in rows)
        shared["pool_share"] = sum(r["state"] for r in rows) / rest if rest > 0 else 0.0
        why = next((reason for reason in placement.reasons if reason.startswith("pages ")), "")
        sizes = {"context": placement.max_context, "step_tokens": placement.max_step_tokens, "why_pages": why}
        return {"sequences": n_sequences, **shared, **sizes, "daemons": rows}
    finally:
        await service.stop(0.0)
        poll.close()


def row(group, service, placement, events, free):
    """What one daemon was planned to take, and took."""
    [loaded] = service.groups[group].loads
    uses = [use for use in (*loaded.shards, loaded.draft) if use is not None]
    measured = sum(loaded.workspace_bytes.values())
    ours = [e for e in events if e.get("group") == group and "steps_bytes" in e]
    parts = {key: sum(int(e[f"{key}_bytes"]) for e in ours) for key in ("steps", "graphs", "rounding", "reserved")}
    devices = dict.fromkeys(DeviceRef(group, use.device) for use in uses)
    planned = sum(placement.workspace_bytes(device) for device in devices)
    return {
        "daemon": group,
        "planned": planned,
        "measured": measured,
        "ratio": planned / measured if measured else 0.0,
        **parts,
        "weights": sum(use.weight_bytes for use in uses),
        "state": sum(use.state_bytes for use in uses),
    }


def show(found):
    gb = {key: f"{found[key] / GB:.2f}" for key in ("free", "free_ready", "free_least", "other")}
    print(
        f"{found['sequences']} sequences, {found['step_tokens']} tokens a step, context {found['context']}: "
        f"ready after {found['ready_s']:.1f} s, free {gb['free']}, ready {gb['free_ready']}, "
        f"least {gb['free_least']} GB, other {gb['other']} GB, pool {found['pool_share']:.1%}"
    )
    print(f"  {found['why_pages']}")
    for r in found["daemons"]:
        parts = "  ".join(f"{key} {r[key] / GB:.3f}" for key in KEYS)
        print(f"  {r['daemon']}  {parts}  planned / measured {r['ratio']:.3f}", flush=True)


KEYS = ("planned", "measured", "steps", "graphs", "rounding", "reserved", "weights", "state")


def run(options, folder):
    gpu = not options.device.startswith("cpu")
    watcher = Watcher([int(options.device.split(":")[1])] if gpu else [])
    found = {**conditions(), "file": options.file.name, "settings": options.set, "runs": []}
    try:
        for n in options.sequences:
            watcher.least = dict(watcher.free())
            run_dir = folder / f"run-{n}"
            run_dir.mkdir()
            config = write_config(folder / "config.toml", options, n)
            one = asyncio.run(measure(config, open_models(config), run_dir, watcher, options, n))
            show(one)
            found["runs"].append(one)
    finally:
        watcher.close()
    return found


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--daemons", type=int, default=1)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--streams", type=int, default=256, help="sequences that decode at most")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the configuration")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start")
    parser.add_argument("--json", type=Path, help="write to this file")
    return parser.parse_args(arguments)


def main():
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="workspace-") as folder:
        found = run(options, Path(folder))
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
