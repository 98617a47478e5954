"""What does KV Flash cost on a GPU?  Layers of a full-size model, as a daemon runs them, without supervisor and link.

    python bench/kv_flash.py --model FILE [--shape qwen3.6-27b --layers 16] [--json OUT]

Loads all layers with the output matrix as one shard (the file is made if it is not there, with the first ``--layers``
layers of the shape) and lets one sequence be as long as a step asks for; what its pages hold matters to no time.
Records
- pinned: GB/s of plain copies of page-locked memory, to the host and to the device;
- lru: milliseconds of a decode at each of --contexts with a pool of --pool tokens and with all pages resident, and the
  device memory of their pages;
- exact: GB/s of pages on their way out, milliseconds of a decode and of a slice of --slice tokens at each of --exact,
  what they read from host memory per second, and how far their last row is from that with all pages resident;
- qk: GB/s of pages swapped, out and in, by batches of --swaps; milliseconds of a ranking decode and of a plain one, and
  what share of decoding ranking and swapping every --tau tokens take, if the most of --swaps were swapped each time.
Medians of --rounds, after three that compile and capture; of slices fewer.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from make_gguf import SHAPES, write

from daemons.device import host_zeros, prepare
from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.pages import HEAD_PAGES
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import (
    CloseSequence,
    OpenSequence,
    PageIn,
    PageOut,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    ZeroState,
)

COPY_BYTES = 512 << 20


def shortened(model, n_layers):
    """The same model without its last layers."""
    kept = {n: s for n, s in model.tensors.items() if not n.startswith("blk.") or int(n.split(".")[1]) < n_layers}
    return replace(model, metadata=model.metadata | {"block_count": n_layers}, tensors=kept)


def loaded(options, spec, pages, host_pages, *, ranks=False):
    """A stage with ``pages`` on the device and ``host_pages`` that its attention reads, or ranks."""
    plan = StagePlan(
        0, [ShardPlan(0, LayerRange(0, spec.n_layers))], source=0, target=None, embedding=False, output=True
    )
    sizes = PoolSizes(pages, 0, 4, host_pages=host_pages)
    files, formats = [str(path) for path in spec.files.paths], (Dtype.BFLOAT16, Dtype.BFLOAT16)
    load = Load(files, *formats, [plan], [], sizes, 4, options.slice,
                attend_host=host_pages > 0 and not ranks, rank_pages=ranks)  # fmt: skip
    return LoadedStage.load(spec, plan, load, Backend.CUDA, lambda _: None)


def reopen(stage, operations):
    if 0 in stage.sequences.by_id:
        stage.apply([CloseSequence(0)])
    stage.apply([ZeroState(0), OpenSequence(0, 0, SamplingParams()), *operations])


def resident(context):
    """All pages of a context on the device."""
    return [SetPages(0, KvGroup.FULL, 0, list(range(context // PAGE_TOKENS + 1)))]


def dropped(context, pool):
    """The pages of a context of which those behind the first were dropped, and the last ones of a pool are there."""
    n_out = context // PAGE_TOKENS + 1 - pool
    if n_out <= 0:
        return resident(context)
    out = list(range(HEAD_PAGES, HEAD_PAGES + n_out))
    tail = SetPages(0, KvGroup.FULL, out[-1] + 1, list(range(HEAD_PAGES, pool)))
    return [SetPages(0, KvGroup.FULL, 0, list(range(HEAD_PAGES))), PageOut(0, out), tail]


def seconds(stage, n, start, ranked=()):
    """Until the token after a slice is known."""
    generator = torch.Generator(stage.device).manual_seed(n)
    rows = torch.randn(n, stage.spec.boundary_width, device=stage.device, dtype=stage.dtype, generator=generator)
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = stage.forward(Step(0, 0, [], [Slice(0, start, [1] * n, True)], rank_pages=list(ranked)), rows)
    stage.logits(out.rows, [n - 1]).argmax(-1).tolist()
    return time.perf_counter() - began, out.rows[-1:].float().clone()


def median_ms(stage, options, n, start, ranked=()):
    warm, rounds = (3, options.rounds) if n == 1 else (1, 3)
    found = [seconds(stage, n, start, ranked)[0] for _ in range(warm + rounds)]
    return round(1e3 * statistics.median(found[warm:]), 3)


def pinned():
    """GB/s of copies between the device and page-locked memory."""
    device = torch.device("cuda", 0)
    host, locked = host_zeros((COPY_BYTES,), torch.uint8, device, "a benchmark", "free some")
    memory = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    out = {"page_locked": locked}
    for name, (target, source) in {"out": (host, memory), "in": (memory, host)}.items():
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        out[f"{name}_gb_per_s"] = round(COPY_BYTES / 1e9 / statistics.median(found), 2)
    return out


def page_bytes(stage):
    return stage.spec.unit_bytes(KvGroup.FULL, stage.plan.shards[0].layers, Dtype.BFLOAT16)


def fill(stage):
    """Write the same numbers into every page of a layer, so that stages with other pages can be compared."""
    [shard] = stage.shards
    for i, layer in enumerate(stage.spec.layers):
        if layer.kv_group is KvGroup.FULL:
            generator = torch.Generator("cuda").manual_seed(i)
            for name in "kv":
                pages = shard.pools.paged(i, name).pages
                one = torch.randn(pages.shape[1:], device="cuda", generator=generator).to(pages.dtype)
                pages.copy_(one.expand_as(pages))


def lru(options, spec, pool):
    stage = loaded(options, spec, max(options.contexts) // PAGE_TOKENS + 2, 0)
    rows = []
    for context in options.contexts:
        row = {"context": context}
        for name, operations in {"pool": dropped(context, pool), "all": resident(context)}.items():
            reopen(stage, operations)
            n_pages = len(stage.sequences.get(0, "here").pages[KvGroup.FULL])
            row |= {f"{name}_ms": median_ms(stage, options, 1, context), f"{name}_bytes": n_pages * page_bytes(stage)}
        rows.append(row)
        print(row, flush=True)
    return rows


def page_out(stage, context, pool):
    """Bring a sequence to a length as prefill does: slices of half the pool push pages out; GB/s of the copies."""
    reopen(stage, [SetPages(0, KvGroup.FULL, 0, list(range(pool)))])
    n_pages, host, seconds_out = context // PAGE_TOKENS + 1, stage.sequences.sizes.full_pages, 0.0
    first = HEAD_PAGES
    for stop in range(pool, n_pages, pool // 2):
        n = min(pool // 2, n_pages - stop)
        table = stage.sequences.get(0, "here").pages[KvGroup.FULL]
        free = table[HEAD_PAGES : HEAD_PAGES + n]
        torch.cuda.synchronize()
        began = time.perf_counter()
        stage.apply([PageOut(0, list(range(first, first + n)), list(range(host, host + n)))])
        torch.cuda.synchronize()
        seconds_out += time.perf_counter() - began
        stage.apply([SetPages(0, KvGroup.FULL, stop, free)])
        first, host = first + n, host + n
    n_out = first - HEAD_PAGES
    return n_out, n_out * page_bytes(stage) / 1e9 / seconds_out


def exact(options, spec, pool):
    most = max(options.exact) // PAGE_TOKENS + 2
    stage, whole = loaded(options, spec, pool, most), loaded(options, spec, most, 0)
    rows = []
    for context in options.exact:
        fill(stage)
        fill(whole)
        n_out, out_rate = page_out(stage, context, pool)
        reopen(whole, resident(context))
        row = {"context": context, "pages_out": n_out, "page_out_gb_per_s": round(out_rate, 2)}
        for name, n, start in (("decode", 1, context), ("slice", options.slice, context - options.slice)):
            ms, resident_ms = (median_ms(one, options, n, start) for one in (stage, whole))
            for one in (stage, whole):
                one.apply([ZeroState(0)])
            found, wanted = (seconds(one, n, start)[1] for one in (stage, whole))
            row[name] = {
                "tokens": n,
                "ms": ms,
                "all_resident_ms": resident_ms,
                "read_gb_per_s": round(n_out * page_bytes(stage) / 1e6 / ms, 2),
                "error": round(float((found - wanted).abs().max() / wanted.abs().max()), 5),
            }
        rows.append(row)
        print(row, flush=True)
    return rows


def swap(stage, n, n_out):
    """Seconds of ``n`` pages that leave for host memory, and of as many that come back."""
    sequence, host = stage.sequences.get(0, "here"), stage.sequences.sizes.full_pages
    back = sequence.out[:n]
    table = sequence.pages[KvGroup.FULL][HEAD_PAGES : HEAD_PAGES + n]
    leaving = [entry for entry in range(n_out + HEAD_PAGES + n + 8) if entry not in set(sequence.out)][HEAD_PAGES:][:n]
    used = set(sequence.hosts.values())
    hosts = [host + row for row in range(stage.sequences.sizes.host_pages) if row not in used][:n]
    found = []
    for operation in (PageOut(0, leaving, hosts), PageIn(0, back, table)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        stage.apply([operation])
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def qk(options, spec, pool):
    most = max(options.exact) // PAGE_TOKENS + 2
    stage, rows = loaded(options, spec, pool, most + max(options.swaps), ranks=True), []
    for context in options.exact:
        n_out, _ = page_out(stage, context, pool)
        row = {"context": context, "pages_out": n_out, "decode_ms": median_ms(stage, options, 1, context)}
        row["ranking_decode_ms"] = median_ms(stage, options, 1, context, [0])
        for n in options.swaps:
            found = [swap(stage, n, n_out) for _ in range(2 + options.rounds)][2:]
            out, back = (statistics.median(one) for one in zip(*found, strict=True))
            row[f"swap_{n}"] = {
                "out_ms": round(1e3 * out, 3), "in_ms": round(1e3 * back, 3),
                "out_gb_per_s": round(n * page_bytes(stage) / 1e9 / out, 2),
                "in_gb_per_s": round(n * page_bytes(stage) / 1e9 / back, 2),
            }  # fmt: skip
        worst = row[f"swap_{max(options.swaps)}"]
        extra = row["ranking_decode_ms"] - row["decode_ms"] + worst["out_ms"] + worst["in_ms"]
        row["share_of_decoding"] = round(extra / (options.tau * row["decode_ms"]), 4)
        rows.append(row)
        print(row, flush=True)
    return rows


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slice", type=int, default=1024)
    parser.add_argument("--pool", type=int, default=8192)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072, 262144 - PAGE_TOKENS])
    parser.add_argument("--exact", type=int, nargs="+", default=[32768, 65536, 262144 - PAGE_TOKENS])
    parser.add_argument("--swaps", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tau", type=int, default=64)
    parser.add_argument("--sections", nargs="+", choices=("lru", "exact", "qk"), default=["lru", "exact", "qk"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def main():
    options = parse()
    began = time.perf_counter()
    if not options.model.exists():
        write(options.model, shortened(SHAPES[options.shape](), options.layers))
    prepare(Backend.CUDA, 0)
    spec, pool = open_spec(options.model.resolve()), options.pool // PAGE_TOKENS
    found = {
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "shape": options.shape,
        "layers": options.layers, "pool": options.pool, "dtype": "bfloat16", "made_in_s": time.perf_counter() - began,
        "pinned": pinned(),
    }  # fmt: skip
    print(found, flush=True)
    for section in options.sections:
        found[section] = {"lru": lru, "exact": exact, "qk": qk}[section](options, spec, pool)
        torch.cuda.empty_cache()
    for row in found.get("exact", ()):
        row["share_of_pinned"] = {
            "out": round(row["page_out_gb_per_s"] / found["pinned"]["out_gb_per_s"], 3),
            "decode": round(row["decode"]["read_gb_per_s"] / found["pinned"]["in_gb_per_s"], 3),
        }
    for row in found.get("qk", ()):
        for n in options.swaps:
            for way in ("in", "out"):
                rate = row[f"swap_{n}"][f"{way}_gb_per_s"]
                row[f"swap_{n}"][f"{way}_share_of_pinned"] = round(rate / found["pinned"][f"{way}_gb_per_s"], 3)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
