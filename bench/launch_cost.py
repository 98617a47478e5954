"""What the launch of a decode's graph costs a stage whose device is idle, as between two stages of one stream.

    python bench/launch_cost.py --model FILE [--layers 32] [--sequences 1,4] [--rounds 200]

``FILE``: as for decode.py.  Loads the last ``--layers`` layers with the output matrix as one shard, captures decodes,
and prints for each number of sequences medians in us of: the call that launches the graph; graph alone, from the call
until the device is done; graph queued, one of eight launched at once; their difference; and the host's other work of a
step: its layout and tables, its rows (copy and launch of it), drawing and fetching the tokens.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from decode import PROMPT, loaded, opened, step

from daemons.device import prepare
from daemons.kv.batch import Layout
from lucevisor.model.values import Backend
from lucevisor.protocol.steps import Slice

QUEUED = 8


def captured_decodes(stage, options):
    """Sequences, and graphs of a decode of each number of them."""
    opened(stage, max(options.sequences))
    for n in options.sequences:
        for i in range(3):
            step(stage, [Slice(s, PROMPT, [1], True) for s in range(n)], i)


def seconds(work, rounds, *, device_s=True):
    """Median seconds of ``work`` on an idle device, until that is done or, without ``device_s``, until it returns."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device_s:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def parts(stage, n, rounds):
    """Seconds of each part of a step of ``n`` sequences."""
    slices = [Slice(s, PROMPT, [1], True) for s in range(n)]
    [graphs] = stage.graphs
    layout = Layout(slices, stage.sequences, stage.spec)
    captured = graphs._graphs[layout.graph_key]
    rows = torch.zeros(captured.rows.shape, dtype=captured.rows.dtype).pin_memory()

    def queued():
        for _ in range(QUEUED):
            captured.graph.replay()

    def laid_out():
        captured.refill(Layout(slices, stage.sequences, stage.spec), captured.metadata)

    def draw():
        return stage.logits(captured.out.rows, None).argmax(-1).tolist()

    alone, in_line = seconds(captured.graph.replay, rounds), seconds(queued, rounds // QUEUED) / QUEUED
    return {
        "call": seconds(captured.graph.replay, rounds, device_s=False),
        "graph alone": alone,
        "graph queued": in_line,
        "difference": alone - in_line,
        "layout": seconds(laid_out, rounds, device_s=False),
        "rows": seconds(lambda: captured.rows.copy_(rows, non_blocking=True), rounds),
        "tokens": seconds(draw, rounds),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    prepare(Backend.CUDA, 0)
    stage = loaded(options)
    print(torch.cuda.get_device_name(0), torch.__version__, flush=True)
    with torch.inference_mode():
        captured_decodes(stage, options)
        for n in options.sequences:
            found = parts(stage, n, options.rounds)
            print(n, {name: round(1e6 * s, 1) for name, s in found.items()}, flush=True)


if __name__ == "__main__":
    main()
