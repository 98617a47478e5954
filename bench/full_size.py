"""Does a full-size model load fast, fit as planned, and decode?  Random weights, real shapes, real daemons.

    python bench/full_size.py --shape qwen3.6-27b --devices cuda:0 cuda:0 [--set engine.pages=2048] [--save]

Makes the file (bench/make_gguf.py), starts the service in this process with one group for each of --devices, twice:
with the file dropped from the page cache, and with the file in it.  Records
- load: seconds and GB/s of each daemon, beside a plain read of the same file from disk and from the page cache;
- host memory: peak resident bytes of each daemon while it loads;
- device memory: bytes taken on each device while requests run, less a bare context of each daemon, beside the plan's;
- speed: decode tokens/s of 1 and of 8 sequences, prefill tokens/s of a long prompt; medians of --repeats, after one
  round that is not counted.
A device named twice gets two daemons, so that one GPU shows a split over two groups.  The split is even unless --set
placement.target_layer_split says otherwise.  --save writes bench/results/full-size-SHAPE.json, --json PATH any other
file.  Needs no network and no tokenizer.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import structlog
from make_gguf import SHAPES, stats, write
from memory_watch import Poll, Watcher, resident
from records import RESULTS, conditions, write_json

from lucevisor.cli.bench import Case, tokens_per_s
from lucevisor.config import load
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.model.values import Dtype
from lucevisor.model.weight_layout import shard_layouts

READ_BYTES = 16 << 20
HOST_MARGIN_BYTES = 2 << 30
MEMORY_TOLERANCE = 0.10
LOAD_SHARE = 0.60


def plain_read(path, *, cold):
    """Read a file from its start to its end into one buffer: seconds, GB/s, and the share that storage delivered."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if cold:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before, started = storage_bytes(), time.perf_counter()
        buffer, at = memoryview(bytearray(READ_BYTES)), 0
        while n := os.preadv(fd, [buffer], at):
            at += n
        seconds = time.perf_counter() - started
        after = storage_bytes()
    finally:
        os.close(fd)
    share = None if before is None or after is None else round((after - before) / size, 3)
    return {"seconds": seconds, "gb_per_s": size / 1e9 / seconds, "share_from_storage": share}


def storage_bytes():
    """Bytes that storage delivered for this process; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def drop_from_cache(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class Observer:
    """Notes the processes as they appear, and how much each had in memory when it began to load."""

    def __init__(self, poll):
        self.poll, self.service, self.at_load = poll, None, {}

    def state(self, group, state, reason):
        pid = self.service.groups[group].pid if self.service is not None else None
        if pid:
            self.poll.pids[group] = pid
            if state.value == "loading":
                self.at_load[group] = resident(pid).get("resident_bytes")

    def progress(self, group, progress):
        pass

    def ready(self, service):
        pass


def write_config(path, file, devices, settings):
    """One group for each device, an even split unless ``settings`` say otherwise."""
    lines = ["[model]", f"path = {json.dumps(str(file))}"]
    for i, device in enumerate(devices):
        backend, index = device.split(":")
        lines += [f"[groups.g{i}]", f'backend = "{backend}"', f"python = {json.dumps(sys.executable)}"]
        lines += ["threads = 1"] if backend == "cpu" else [f'visible_devices = ["{index}"]']
    names = [f"g{i}:0" for i in range(len(devices))]
    lines += ["[placement]", f"target_devices = {json.dumps(names)}", f"target_layer_split = {[1.0] * len(names)}"]
    lines += ["[engine]", "max_context = 4096", "max_sequences = 8"]
    path.write_text("\n".join(lines) + "\n")
    return load(path, settings)


async def speed(service, options):
    """Tokens/s: decode of 1 and of 8 sequences, prefill; each a list of rounds, the first one left out."""
    streams = min(8, service.only.placement.max_sequences)
    wanted = {"decode_1": Case(answer=options.tokens), "decode_8": Case(answer=options.tokens, streams=streams)}
    wanted["prefill"] = Case(prompt=options.prompt)
    out = {key: [] for key in wanted}
    for turn in range(options.repeats + 1):
        for key, case in wanted.items():
            out[key].append(await tokens_per_s(service, case, turn))
    return {
        f"{key}_tokens_per_s": {"median": statistics.median(v[1:]), "least": min(v[1:]), "most": max(v[1:])}
        for key, v in out.items()
    }


async def start(config, model, run_dir, watcher, options, *, measure):
    """Start the service, record its load, run requests with ``measure``, stop it."""
    poll = Poll(watcher)
    observer = Observer(poll)
    service = Service(config, [model], run_dir, observer)
    observer.service = service
    started = time.perf_counter()
    try:
        await service.start()
        if not await service.wait_ready(options.timeout):
            raise RuntimeError(f"not ready: {service.reason()}")
        ready_s = time.perf_counter() - started
        for name, group in service.groups.items():
            poll.note(name, group.pid)
        loads = {name: dict(poll.peak[name]) for name in service.groups}
        out = {
            "ready_s": ready_s,
            "groups": {
                name: load_of(service, model, name, loads[name], observer.at_load.get(name)) for name in service.groups
            },
        }
        if measure:
            out["speed"] = await speed(service, options)
            out["devices"] = devices_of(service, watcher, options)
        return out
    finally:
        await service.stop(0.0)
        poll.close()


def names_of(spec, shard):
    """Tensors of the file that a shard loads."""
    ends = {"embedding": shard.first, "output": shard.last}
    layouts = shard_layouts(spec, shard.layers, **ends, backend=shard.backend, dtype=Dtype.FLOAT32)
    return [layout.name for layout in layouts]


def load_of(service, model, group, peak, before):
    """One daemon's load: seconds, bytes of the file, host memory against its limit."""
    [loaded] = service.groups[group].loads
    stages = service.only.placement.stages_of(group)
    names = {name for stage in stages for shard in stage.shards for name in names_of(model.spec, shard)}
    sizes = [model.spec.files.tensors[name].n_bytes for name in names]
    limit = max(sizes) + HOST_MARGIN_BYTES
    on_cpu = all(shard.backend.value == "cpu" for stage in stages for shard in stage.shards)
    return {
        "layers": [str(shard.layers) for stage in stages for shard in stage.shards],
        "load_s": loaded.seconds,
        "file_bytes": sum(sizes),
        "gb_per_s": sum(sizes) / 1e9 / loaded.seconds,
        "resident_before_load_bytes": before,
        "peak_resident_bytes": peak.get("peak_bytes"),
        "peak_anonymous_bytes": peak.get("anonymous_bytes"),
        "host_limit_bytes": None if on_cpu else limit,  # on a cpu the weights themselves rest in host memory
        "within_host_limit": None if on_cpu else peak.get("peak_bytes", limit) < limit,
        "kernels": loaded.kernels,
    }


def devices_of(service, watcher, options):
    """What the plan said and what was taken, by device; for cpus what the daemons say they took."""
    out, contexts = {}, watcher.contexts
    for name in dict.fromkeys(options.devices):
        mine = [i for i, device in enumerate(options.devices) if device == name]
        plans = [service.only.placement.devices[i] for i in mine]
        uses = [use for i in mine for use in service.groups[f"g{i}"].loads[0].shards]
        row = {
            "planned_bytes": sum(p.needed_bytes for p in plans),
            "planned_weight_bytes": sum(p.weight_bytes for p in plans),
            "planned_state_bytes": sum(p.state_bytes for p in plans),
            "planned_workspace_bytes": sum(p.workspace_bytes for p in plans),
            "loaded_weight_bytes": sum(u.weight_bytes for u in uses),
            "loaded_state_bytes": sum(u.state_bytes for u in uses),
        }
        index = int(name.split(":")[1])
        if index in watcher.start and not name.startswith("cpu"):
            taken = watcher.start[index] - watcher.least[index] - len(mine) * contexts[index]
            row |= {"context_bytes": contexts[index], "taken_bytes": taken, "ratio": taken / row["planned_bytes"]}
            row["within_tolerance"] = abs(row["ratio"] - 1) <= MEMORY_TOLERANCE
        out[name] = row
    return out


def summary(found):
    """The lines a reader wants: metric | value | beside | ratio."""
    rows = []
    for kind in ("cold", "warm"):
        if kind not in found:
            continue
        plain = found["plain_read"][kind]["gb_per_s"]
        total = sum(g["file_bytes"] for g in found[kind]["groups"].values()) / 1e9
        longest = max(g["load_s"] for g in found[kind]["groups"].values())
        rate = total / longest
        found[kind]["all_gb_per_s"], found[kind]["share_of_plain_read"] = rate, rate / plain
        verdict = "met" if rate >= LOAD_SHARE * plain else "missed"
        rows.append((f"load, {kind}", f"{rate:.2f} GB/s", f"plain read {plain:.2f}", f"{rate / plain:.2f} ({verdict})"))
        for name, g in found[kind]["groups"].items():
            peak = "?" if g["peak_resident_bytes"] is None else f"{g['peak_resident_bytes'] / 2**30:.2f} GiB"
            limit = "none" if g["host_limit_bytes"] is None else f"{g['host_limit_bytes'] / 2**30:.2f} GiB"
            rows.append((f"host memory of {name}, {kind}", peak, f"limit {limit}", f"within: {g['within_host_limit']}"))
    for name, d in found["warm"]["devices"].items():
        taken = d.get("taken_bytes", d["loaded_weight_bytes"] + d["loaded_state_bytes"])
        plan = f"plan {d['planned_bytes'] / 2**30:.2f}"
        rows.append((f"memory of {name}", f"{taken / 2**30:.2f} GiB", plan, f"{taken / d['planned_bytes']:.2f}"))
    for key, v in found["warm"]["speed"].items():
        rows.append((key, f"{v['median']:.1f}", f"{v['least']:.1f} to {v['most']:.1f}", ""))
    return rows


def run(options, directory):
    """Everything; returns what is saved."""
    file = options.file or directory / f"{options.shape}.gguf"
    shape = SHAPES[options.shape]()
    found = {"shape": options.shape, "devices": options.devices, "settings": options.set, **conditions()}
    found["model"] = stats(shape)
    if not file.exists():
        started = time.perf_counter()
        write(file, shape)
        found["made_in_s"] = time.perf_counter() - started
    config = write_config(directory / "config.toml", file, options.devices, options.set)
    model = ServedModel(open_spec(file), (file,), options.shape)
    watcher = Watcher([int(d.split(":")[1]) for d in options.devices if not d.startswith("cpu")])
    try:
        watcher.contexts = watcher.context_bytes()
        found["plain_read"] = {}
        for kind in ("cold", "warm"):
            found["plain_read"][kind] = plain_read(file, cold=kind == "cold")
            if kind == "cold":
                drop_from_cache(file)
            run_dir = directory / kind
            run_dir.mkdir()
            found[kind] = asyncio.run(start(config, model, run_dir, watcher, options, measure=kind == "warm"))
    finally:
        watcher.close()
    return found


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:0"], help="BACKEND:INDEX, one daemon each")
    parser.add_argument("--file", type=Path, help="the GGUF file: used when it is there, else made and kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the configuration")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a sequence decodes")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefilled prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start")
    parser.add_argument("--save", action="store_true", help="write bench/results/full-size-SHAPE.json")
    parser.add_argument("--json", type=Path, help="write to this file")
    return parser.parse_args(arguments)


def main():
    options = parse(sys.argv[1:])
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    with tempfile.TemporaryDirectory(prefix="full-size-", dir=options.file.parent if options.file else None) as folder:
        found = run(options, Path(folder))
    for row in summary(found):
        print(" | ".join(f"{cell:{width}}" for cell, width in zip(row, (34, 16, 20, 0), strict=True)))
    path = RESULTS / f"full-size-{options.shape}.json" if options.save else options.json
    if path:
        write_json(path, found)


if __name__ == "__main__":
    main()
