"""How fast does a whole service decode with KV Flash?  Supervisor and daemon, one GPU, any context.

    python bench/kv_flash_service.py --model FILE [--shape qwen3.6-27b --policies qk exact off] [--json OUT] [--resume]

Starts the service once for each policy with a pool of --pool tokens (``off``: all pages resident).  A context is not
prefilled: its pages are reserved as for a snapshot, on the device and in host memory, and published without bytes,
since what they hold matters to no time; then a request goes on from there.  Records tokens/s of --tokens at each of
--contexts after the first --skip (among them is the first ranking of ``qk``, which sketches pages it did not page out
itself), the share of that time above the median token's, which is what rankings take, for ``exact`` the bytes read from
host memory per second, and the GPU's memory in use.  --json is written after
each policy; --resume measures those that it does not have.
"""

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import structlog
from make_gguf import SHAPES, write
from records import conditions, write_json
from services import running

from lucevisor.config import load
from lucevisor.deployment.served_model import ServedModel
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.model.families import open_spec
from lucevisor.model.pages import pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup, LayerRange
from lucevisor.protocol.steps import SamplingParams

CONFIG = """
[model]
path = {path}
[groups.g]
backend = {backend}
python = {python}
[placement]
target_devices = ["g:0"]
[engine]
max_context = {context}
max_sequences = 1
pages = {pages}
[cache]
prefix_slots = 4
memory = "64GiB"
[draft]
kind = "off"
[server]
port = 0
"""


def configured(options, policy, path):
    n_pages, pool = pages_of(max(options.contexts)) + 8, pages_of(options.pool)
    pages = n_pages + 8 if policy == "off" else 3 * pool
    text = CONFIG.format(
        path=json.dumps(str(options.model.resolve())), backend=json.dumps(options.backend), pages=pages,
        python=json.dumps(sys.executable), context=n_pages * PAGE_TOKENS,
    )  # fmt: skip
    if options.backend == "cpu":
        text = text.replace("[placement]", "threads = 1\n[placement]")
    if policy != "off":
        text += f'[kvflash]\npool_tokens = {options.pool}\npolicy = "{policy}"\nhost = "{options.host}"\n'
    path.write_text(text)
    return load(path, [])


def memory_in_use():
    """MiB of the first GPU; None without."""
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


async def decode(service, options, context):
    """Tokens/s behind a context of zeros, and the share of the time that is not the median token's."""
    engine, tokens = service.only.engine, [i % 1000 for i in range(context)]
    reservation = await engine.slots.reserve(context)
    assert reservation is not None, f"no room for {context} tokens"
    slot = engine.slots.adopt(tokens, reservation)
    n = options.tokens if service.config.kvflash.policy != "exact" else options.exact_tokens
    request = GenerationRequest(
        request_id=f"at {context}", prompt=(*tokens, 1), max_tokens=n, sampling=SamplingParams(temperature=0.0)
    )
    times = []
    with engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
            else:
                assert event.usage.cached_tokens == context, event
    engine.slots.release(slot)
    engine.prefixes.clear()
    skip = min(options.skip, len(times) // 3)
    gaps = [b - a for a, b in pairwise(times[skip:])]
    return 1 / statistics.mean(gaps), 1 - statistics.median(gaps) / statistics.mean(gaps)


async def measured(options, policy, directory):
    config = configured(options, policy, directory / f"{policy}.toml")
    spec = open_spec(options.model.resolve())
    model = ServedModel(spec, (options.model.resolve(),), options.shape)
    began, rows = time.perf_counter(), []
    async with running(config, directory, timeout_s=options.timeout, model=model) as service:
        ready_s, before = time.perf_counter() - began, memory_in_use()
        page_bytes = spec.unit_bytes(KvGroup.FULL, range_of(spec), service.only.placement.kv_dtype)
        for context in options.contexts:
            rate, above = await decode(service, options, context)
            row = {"context": context, "tokens_per_s": round(rate, 2), "ms": round(1e3 / rate, 3)}
            row["above_median"] = round(above, 4)
            n_out = max(0, pages_of(context + 1) - pages_of(options.pool))
            if policy == "exact" and n_out:
                row["read_gb_per_s"] = round(n_out * page_bytes / 1e9 * rate, 2)
            rows.append(row)
            print(policy, row, flush=True)
        found = {"ready_s": round(ready_s, 1), "contexts": rows, "used_mib": [before, memory_in_use()]}
    rates = [row["tokens_per_s"] for row in rows]
    return found | {"slowest_of_fastest": round(min(rates) / max(rates), 4)}


def range_of(spec):
    return LayerRange(0, spec.n_layers)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.6-27b")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--policies", choices=("qk", "exact", "off"), nargs="+", default=["qk", "exact", "off"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 65536, 131072, 262144 - 512])
    parser.add_argument("--pool", type=int, default=8192)
    parser.add_argument("--host", default="20GiB")
    parser.add_argument("--tokens", type=int, default=280)
    parser.add_argument("--exact-tokens", type=int, default=24)
    parser.add_argument("--skip", type=int, default=80)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="leave out the policies that --json has")
    return parser.parse_args()


def main():
    options = parse()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if not options.model.exists():
        write(options.model, SHAPES[options.shape]())
    found = {"shape": options.shape, "pool": options.pool, **conditions()}
    if options.resume and options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory() as directory:
        for policy in options.policies:
            if policy in found:
                continue
            found[policy] = asyncio.run(measured(options, policy, Path(directory)))
            print(policy, {key: value for key, value in found[policy].items() if key != "contexts"}, flush=True)
            if options.json is not None:
                write_json(options.json, found)


if __name__ == "__main__":
    main()
