"""GEMV and GEMM with packed weights: the selected kernels against Triton's alone and plain torch, on one GPU.

    python bench/kernels.py [--device cuda:0] [--rounds 5] [--name NAME] [--save]

Matrices of the 27B shape, random blocks, bfloat16 activations.  A CUDA graph of each product runs over as many copies
of the matrix as do not fit a GPU's cache, so that neither launches nor caches count; the three take turns within a
round.  `GB/s`: bytes of the packed matrix over the time; plain torch dequantises the matrix first.
--save writes bench/results/kernels-NAME.json.
"""

import argparse
import platform
import statistics
from importlib.metadata import version

import torch
from records import save

from daemons.device import prepare
from daemons.ops.linear import BlockLinear
from daemons.ops.packed_linear import PackedLinear
from daemons.ops.selection import KernelSelector
from daemons.weights.packed import empty_packed, unpack
from lucevisor.model.quant_types import BY_NAME
from lucevisor.model.values import Backend

MATRICES = (
    ("gate and up", "Q4_K", 34816, 5120),
    ("delta net in", "Q4_K", 16480, 5120),
    ("delta net out", "Q4_K", 5120, 6144),
    ("down", "Q6_K", 5120, 17408),
    ("a quarter of output", "Q6_K", 62080, 5120),
    ("down", "Q5_K", 5120, 17408),
    ("down", "Q8_0", 5120, 17408),
    ("down", "Q4_0", 5120, 17408),
)
ROWS = (1, 2, 8, 16, 32, 512)
CACHE_BYTES = 300_000_000


def random_packed(kind, n, k, device, n_matrices=None):
    """Random codes, small scales."""
    packed = empty_packed(kind, n, k, device, n_matrices)
    packed.tiles.random_(0, 255)
    if packed.steps is not None:
        packed.steps.copy_(torch.randn(packed.steps.shape, device=device) * 1e-3)
    if kind.name in ("Q4_K", "Q5_K"):
        packed.scales[..., 3] = 0x04000400  # d and dmin
    return packed


def captured(products, x):
    """A graph of the products, and how many they are."""
    for product in products:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    graph.replay()
    return graph, len(products)


def seconds(graph, count):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def measure(options):
    """The rows of the table, and what was selected."""
    rows_of_table, selector = [], KernelSelector(options.device, torch.bfloat16)
    for name, kind_name, n, k in MATRICES:
        kind = BY_NAME[kind_name]
        n_bytes = n * k // kind.block_elements * kind.block_bytes
        copies = [random_packed(kind, n, k, options.device) for _ in range(max(2, CACHE_BYTES // n_bytes + 1))]
        kernels = [selector.packed_linear(packed, k) for packed in copies]
        selector.finish()
        triton = [PackedLinear(packed, k) for packed in copies]
        plain = [BlockLinear(kind, unpack(packed, k), k) for packed in copies[:2]]
        for rows in ROWS:
            x = torch.randn(rows, k, device=options.device, dtype=torch.bfloat16)
            wanted, found = plain[0](x).float(), kernels[0](x).float()
            error = float((found - wanted).norm() / wanted.norm())
            if not error < 1e-2:
                raise SystemExit(f"{kind_name} {n} x {k}, {rows} rows: relative error {error}")
            graphs = [captured(products, x) for products in (kernels, triton, plain)]
            times = [[seconds(*graph) for graph in graphs] for _ in range(options.rounds + 1)][1:]
            ours, tritons, theirs = (statistics.median(t[i] for t in times) for i in range(3))
            rows_of_table.append(
                {
                    "matrix": name,
                    "kind": kind_name,
                    "shape": [n, k],
                    "rows": rows,
                    "kernel_us": 1e6 * ours,
                    "triton_us": 1e6 * tritons,
                    "plain_us": 1e6 * theirs,
                    "ratio": ours / theirs,
                    "GB/s": n_bytes / ours / 1e9,
                    "error": error,
                }
            )
            del graphs
    return rows_of_table, selector.selected | dict.fromkeys(selector.warnings, "")


def conditions(options):
    return {
        "device": torch.cuda.get_device_name(options.device),
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
        "rounds": options.rounds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="gpu", help="of the result")
    parser.add_argument("--save", action="store_true", help="write bench/results/kernels-NAME.json")
    options = parser.parse_args()
    prepare(Backend.CUDA, 0)
    torch.cuda.set_device(options.device)
    where = conditions(options)
    with torch.inference_mode():
        found, where["kernels"] = measure(options)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{'product':44} | {'kernel':>10} | {'triton':>10} | {'plain':>10} | ratio |   GB/s")
    for row in found:
        label = f"{row['matrix']} {row['kind']} {row['shape'][0]} x {row['shape'][1]}, {row['rows']} rows"
        print(
            f"{label:44} | {row['kernel_us']:7.1f} us | {row['triton_us']:7.1f} us | {row['plain_us']:7.1f} us | "
            f"{row['ratio']:.3f} | {row['GB/s']:6.0f}"
        )
    if options.save:
        save(f"kernels-{options.name}", {"conditions": where, "rows": found})


if __name__ == "__main__":
    main()
