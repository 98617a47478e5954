"""Products of a quantised matrix on a cpu: C++ on tiles beside oneDNN's product of dequantised weights, by rows.

    python bench/cpu_products.py [--types Q4_K Q6_K Q8_0 Q5_K] [--rows 1 2 4 8 16 32 64 128 256] [--threads 1]
                                 [--shape 2048 1024] [--repeats 12]

Random blocks, in turns in one process.  Printed for each number of rows: billion multiply-adds a second of the fastest
repeat, C++ / oneDNN.
"""

import argparse
import time

import torch

from daemons.ops.cpu.library import Tiles, cpu_kernels
from daemons.ops.cpu.linear import ALL_ROWS, TiledLinear
from lucevisor.model.quant_types import BY_NAME, row_bytes


def products(name, n_rows, n_columns):
    """The same matrix, multiplied by C++ and by oneDNN."""
    kind, kernels = BY_NAME[name], cpu_kernels()
    raw = torch.randint(64, (n_rows, row_bytes(kind, n_columns)), dtype=torch.uint8)  # so scales are finite
    data = torch.empty(kernels.tiles_bytes(kind, n_rows, n_columns), dtype=torch.uint8)
    kernels.pack(kind, raw, data)
    return [TiledLinear(kernels, [Tiles(kind, n_rows, data)], n_columns, most) for most in (ALL_ROWS, 0)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=["Q4_K", "Q6_K", "Q8_0", "Q5_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1 << i for i in range(9)])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", nargs=2, type=int, default=[2048, 1024], help="rows and columns of the matrix")
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    n_rows, n_columns = options.shape
    for name in options.types:
        forms, line = products(name, n_rows, n_columns), [name]
        for n in options.rows:
            x, best = torch.randn(n, n_columns).bfloat16(), [float("inf")] * len(forms)
            for _ in range(options.repeats):
                for i, product in enumerate(forms):
                    began = time.perf_counter()
                    product(x)
                    best[i] = min(best[i], time.perf_counter() - began)
            line.append(f"{n}: " + "/".join(f"{n_rows * n_columns * n / s / 1e9:.0f}" for s in best))
        print(*line)


if __name__ == "__main__":
    main()
