"""How long is a step?  Some layers of a full-size model on one GPU, without supervisor and link.

    python bench/steps.py --model FILE [--layers 16] [--steps 512@0,1@512,8@513] [--rounds 5] [--profile]
                          [--graphs ROWS] [--device cuda|cpu] [--deterministic] [--json PATH]

Loads the last ``--layers`` layers with the output matrix as one shard, as a daemon does, and runs steps of one slice:
``n@start`` is n tokens at position start.  Printed for each: milliseconds until the next token is known, and until the
step is launched, the first time (kernels are compiled or found on disk), then ``--rounds`` more.  ``--profile`` lists
what the device did in one more round.  On a cpu a launch is the work itself.  ``--graphs``: rows up to which steps of
one long slice are padded and captured, 0: none; by default as a daemon does.  ``--deterministic``: with
``engine.deterministic``.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from records import conditions, write_json

from daemons.device import prepare, synchronize
from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.model.workspace import GRAPH_ROWS
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step, ZeroState


def parsed(text):
    return [tuple(int(part) for part in step.split("@")) for step in text.split(",")]


def loaded(options, spec):
    """The stage, with one sequence open that has pages for every step."""
    n_pages = max(start + n for n, start in options.steps) // PAGE_TOKENS + 1
    layers = LayerRange(spec.n_layers - options.layers, spec.n_layers)
    plan = StagePlan(0, [ShardPlan(0, layers)], source=0, target=None, embedding=False, output=True)
    files = [str(path) for path in spec.files.paths]
    longest = max(GRAPH_ROWS, *(n for n, _ in options.steps))
    load = Load(files, Dtype.BFLOAT16, Dtype.BFLOAT16, [plan], [], PoolSizes(n_pages, n_pages, 4), 4, longest,
                deterministic=options.deterministic)  # fmt: skip
    stage = LoadedStage.load(spec, plan, load, Backend(options.device), lambda _: None)
    kv_groups = spec.kv_groups()
    states = [ZeroState(0)] if KvGroup.RECURRENT in kv_groups else []
    tables = [SetPages(0, s, 0, list(range(n_pages))) for s in (KvGroup.FULL, KvGroup.WINDOW) if s in kv_groups]
    stage.apply([*states, OpenSequence(0, 0, SamplingParams()), *tables])
    return stage


@torch.inference_mode()
def seconds(stage, n, start):
    """Until the token is known, and until all is launched."""
    rows = torch.randn(n, stage.spec.boundary_width, device=stage.device, dtype=stage.dtype)
    synchronize(stage.device)
    began = time.perf_counter()
    out = stage.forward(Step(0, 0, [], [Slice(0, start, [1] * n, True)]), rows)
    launched = time.perf_counter() - began
    stage.logits(out.rows, [n - 1]).argmax(-1).tolist()
    return time.perf_counter() - began, launched


def profile(stage, n, start):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with recording(activities=[ProfilerActivity.CUDA]) as found:
        seconds(stage, n, start)
    rows = [(e.self_device_time_total / 1e3, e.count, e.key) for e in found.key_averages()]
    print(f"  on the device {sum(row[0] for row in rows):.2f} ms")
    for ms, count, name in sorted(rows, reverse=True)[:12]:
        print(f"  {ms:8.2f} ms {count:6d} {name[:90]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=parsed, default=parsed("512@0,2048@512,1@4096,8@4097"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--graphs", type=int, help="rows up to which long slices are captured; default: as a daemon")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare(Backend(options.device), 0)
    stage = loaded(options, open_spec(options.model.resolve()))
    for graphs in filter(None, stage.graphs):
        graphs.chunk_rows = graphs.chunk_rows if options.graphs is None else options.graphs
    captured = max((graphs.chunk_rows for graphs in stage.graphs if graphs is not None), default=0)
    record = {**conditions(), "graphs": captured, "model": stage.spec.name, "layers": options.layers, "steps": []}
    device = record["gpus"][0] if options.device == "cuda" else record["cpu"]
    print(f"{device}, torch {torch.__version__}, {options.layers} layers, bfloat16")
    for n, start in options.steps:
        found = [seconds(stage, n, start) for _ in range(options.rounds + 1)]
        print(f"{n} at {start}:", ", ".join(f"{1e3 * a:.1f} ({1e3 * b:.1f})" for a, b in found), "ms", flush=True)
        known, launched = (statistics.median(column) for column in zip(*found[1:], strict=True))
        record["steps"].append({"tokens": n, "start": start, "known_s": known, "launched_s": launched, "all": found})
        if options.json is not None:
            write_json(options.json, record)
        if options.profile:
            profile(stage, n, start)


if __name__ == "__main__":
    main()
