"""Decode through some layers of a full-size model on one GPU, with and without dependent launches, no supervisor.

    python bench/decode.py --model FILE [--layers 16] [--sequences 1,2,8,16,32] [--rounds 24]

``FILE``: made with 16 layers of the 27B shape when it is not there.  Loads the last ``--layers`` layers with the
output matrix as one shard.  First checks that captured steps with dependent launches give the bits of eager steps
without; then prints, for each number of sequences, median milliseconds until a step's tokens are known, both in turns.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import make_gguf
import model_shapes
import torch

from daemons.device import prepare
from daemons.models.stage import LoadedStage
from daemons.ops.cuda.driver import Kernel
from daemons.ops.triton import dependent_launch as launches
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step, ZeroState

PROMPT, PAGES = 20, 4


def loaded(options):
    """The stage, for as many sequences as the most."""
    spec, most = open_spec(options.model.resolve()), max(options.sequences)
    layers = LayerRange(spec.n_layers - min(options.layers, spec.n_layers), spec.n_layers)
    plan = StagePlan(1, [ShardPlan(0, layers)], source=0, target=None, embedding=False, output=True)
    pools = PoolSizes(PAGES * most, PAGES * most, most + 1)
    files = [str(path) for path in spec.files.paths]
    load = Load(files, Dtype.BFLOAT16, Dtype.BFLOAT16, [plan], [], pools, most, 512)
    return LoadedStage.load(spec, plan, load, Backend.CUDA, lambda _: None)


def switched(graphs, on):
    """Dependent launches on or off; graphs are captured anew."""
    for name, module in sys.modules.items():
        if name.startswith("daemons.ops.triton.") and module is not launches and hasattr(module, "dependent_launch"):
            vars(module)["dependent_launch"] = launches.dependent_launch if on else lambda device: {"PDL": False}
    Kernel.dependent_launches = on
    for graph in graphs:
        graph._graphs.clear()
        graph._chunk_graphs.clear()
        graph._seen.clear()
        graph._pool = None


def opened(stage, most):
    """Sequences 0 to ``most`` - 1, each with a prompt of PROMPT tokens."""
    kv_groups = stage.spec.kv_groups()
    stage.reset()
    for s in range(most):
        tables = [
            SetPages(s, x, 0, list(range(PAGES * s, PAGES * s + PAGES)))
            for x in kv_groups
            if x is not KvGroup.RECURRENT
        ]
        states = [ZeroState(s)] if KvGroup.RECURRENT in kv_groups else []
        stage.apply([*states, OpenSequence(s, s, SamplingParams()), *tables])
        step(stage, [Slice(s, 0, [0] * PROMPT, True)], s)


def run(stage, options, rounds):
    """Logits of every step, and median milliseconds of those after the capture, by number of sequences."""
    most = max(options.sequences)
    opened(stage, most)
    at, logits, ms = [PROMPT] * most, [], {}
    for n in options.sequences:
        times = []
        for i in range(rounds):
            seconds, found = step(stage, [Slice(s, at[s], [1], True) for s in range(n)], 1000 * n + i)
            times.append(seconds)
            logits.append(found)
            for s in range(n):
                at[s] += 1
        ms[n] = round(1e3 * statistics.median(times[4:]), 3)
    return logits, ms


def step(stage, slices, seed):
    """Seconds until the tokens are known, and the last row's logits."""
    n = sum(len(s.tokens) for s in slices)
    rows = torch.randn(
        n,
        stage.spec.boundary_width,
        generator=torch.Generator("cuda").manual_seed(seed),
        device="cuda",
        dtype=stage.dtype,
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = stage.forward(Step(0, 0, [], slices), rows)
    logits = stage.logits(out.rows, None if len(slices) > 1 else [n - 1])
    logits.argmax(-1).tolist()
    return time.perf_counter() - began, logits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    if not options.model.exists():
        made = model_shapes.qwen(
            "16 layers of the 27B shape", n_layers=16, embedding=5120, width=17408, heads=(24, 4), delta_heads=(16, 48),
            vocabulary=248320,
        )  # fmt: skip
        make_gguf.write(options.model, made)
    prepare(Backend.CUDA, 0)
    stage = loaded(options)
    print(torch.cuda.get_device_name(0), torch.__version__, stage.kernels, stage.warnings, flush=True)
    with torch.inference_mode():
        graphs = list(stage.graphs)
        switched(graphs, on=False)
        stage.graphs = [None] * len(graphs)
        wanted, _ = run(stage, options, 6)
        stage.graphs = graphs
        switched(graphs, on=True)
        found, _ = run(stage, options, 6)
        same = [torch.equal(a, b) for a, b in zip(wanted, found, strict=True)]
        print(f"{sum(same)} of {len(same)} steps have equal bits", flush=True)
        for on in (False, True, False, True):
            switched(graphs, on)
            print("dependent launches" if on else "full launches", run(stage, options, options.rounds)[1], flush=True)
    if not all(same):
        raise SystemExit("dependent launches change results")


if __name__ == "__main__":
    main()
