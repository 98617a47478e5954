"""How fast does a model load, beside reading its file, and how much host memory does that take?

    python bench/load.py [--model PATH] [--kind Q8_0] [--mb 500] [--backend cpu] [--dtype bfloat16] [--rounds 5]
                         [--cold] [--save]

Without --model a file of random blocks is made and removed again.  Each measurement is a process of its own (what it
does: load_child.py), reading and loading in turns; the first of each warms up.  --cold: the file's pages are thrown out
of the page cache before each.  --save writes bench/results/load-BACKEND-KIND[-cold].json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from records import machine, save

CHILD = Path(__file__).with_name("load_child.py")
TARGET_RATIO, TARGET_PEAK_BYTES = 0.6, 2 << 30


def child(*words):
    paths = [str(CHILD.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(CHILD), *map(str, words)]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def forget(path):
    """Throw the file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure(path, options):
    found = {"read": [], "load": []}
    for turn in range(options.rounds + 1):
        for verb, rest in (("read", ()), ("load", (options.backend, options.dtype))):
            if options.cold:
                forget(path)
            result = child(verb, path, *rest)
            if turn:  # the first round warms up
                found[verb].append(result)
    return found


def summarise(found):
    rows, base = [], None
    for verb, results in found.items():
        speeds = sorted(r["n_bytes"] / r["seconds"] / 1e9 for r in results)
        p50 = statistics.median(speeds)
        base = base or p50
        extra = max(r["peak_bytes"] - r["kept_bytes"] for r in results)
        rows.append(
            {"metric": verb, "p50_gb_s": p50, "least_gb_s": speeds[0], "ratio": p50 / base, "peak_extra_bytes": extra}
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kind", default="Q8_0")
    parser.add_argument("--mb", type=float, default=500)
    parser.add_argument("--backend", choices=["cpu", "cuda", "hip"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model.gguf"
        if options.model is None:
            child("make", path, options.kind, options.mb)
        found = measure(path, options)
    one = found["load"][-1]
    where = {
        **machine(),
        "torch": one["torch"],
        "device": one["device"],
        "dtype": options.dtype,
        "kind": options.kind if options.model is None else options.model.name,
        "bytes": one["n_bytes"],
        "page cache": "cold" if options.cold else "warm",
    }
    rows = summarise(found)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{'metric':8} | {'p50':>10} | {'least':>10} | ratio | host memory at the peak, beside what stays")
    for row in rows:
        speeds = f"{row['p50_gb_s']:5.2f} GB/s | {row['least_gb_s']:5.2f} GB/s | {row['ratio']:5.2f}"
        print(f"{row['metric']:8} | {speeds} | {row['peak_extra_bytes'] / 1e6:.0f} MB")
    limit = one["largest_bytes"] + TARGET_PEAK_BYTES
    fast, small = rows[1]["ratio"] >= TARGET_RATIO, rows[1]["peak_extra_bytes"] <= limit
    print(f"target, speed >= {TARGET_RATIO} x read: {'met' if fast else 'missed'}")
    print(f"target, peak <= largest tensor + 2 GiB = {limit / 1e6:.0f} MB: {'met' if small else 'missed'}")
    if options.save:
        name = f"load-{options.backend}-{Path(where['kind']).stem}{'-cold' if options.cold else ''}"
        save(name, {"conditions": where, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
