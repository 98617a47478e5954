"""Time to the first token of long prompts with and without PFlash, on a model and a scoring model of full size.

    python bench/pflash.py --json bench/results/pflash-h200-27b.json
    python bench/pflash.py --shape tiny-qwen3.6-27b --scorer tiny-qwen3-0.6b --backend cpu --tokens 3000    # a try

Makes both files (bench/make_gguf.py; random weights: what is kept means nothing, but takes as long), starts one daemon
with both models, and sends prompts of bytes in turns, whole and shortened, for one token each, no text twice. The time
to the first token includes scoring, selection and prefill, all but HTTP and the tokens of the prompt. A short round
that is not counted compiles kernels.
"""

import argparse
import asyncio
import json
import logging
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import structlog
from make_gguf import SHAPES, write
from services import running

from lucevisor.app.extra_models import make_compressor
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.tokenizer import Tokenizer

WARM_TOKENS = 2500  # more than a message to the scoring model and than most prefill chunks


def make_config(folder, options):
    model, scorer = ((options.files or folder) / f"{name}.gguf" for name in (options.shape, options.scorer))
    for path, shape in ((model, options.shape), (scorer, options.scorer)):
        if not path.exists():
            started = time.perf_counter()
            write(path, SHAPES[shape]())
            print(
                f"{path.name}: {path.stat().st_size / 1e9:.1f} GB in {time.perf_counter() - started:.0f} s", flush=True
            )
    path = folder / "config.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n'
        f"[groups.main]\nbackend = {json.dumps(options.backend)}\npython = {json.dumps(sys.executable)}\n"
        '[placement]\ntarget_devices = ["main:0"]\n'
        f"[engine]\nmax_context = {max(*options.tokens, WARM_TOKENS) + 64}\nmax_sequences = 1\n"
        '[draft]\nkind = "off"\n[cache]\nprefix_slots = 0\n'
        f'[pflash]\nmode = "always"\npath = "{scorer}"\n'
        f"keep_ratio = {options.keep_ratio}\nwindow = {options.window}\n"
    )
    return path


async def first_token(service, compressor, ids, name):
    """Seconds to the first token, of them those until the prompt was shortened, and the tokens that were computed.

    ``compressor`` None: the whole prompt.
    """
    started = time.perf_counter()
    if compressor is not None:
        prompt = await compressor.compress(ids, [], [])
        if prompt.outcome != "compressed":
            raise SystemExit(f"the prompt was not shortened: {prompt.reason}")
        ids = prompt.ids
    shortened_s = time.perf_counter() - started
    request = GenerationRequest(request_id=name, prompt=ids, max_tokens=1, sampling=SamplingParams(temperature=0.0))
    first_s = None
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                first_s = time.perf_counter() - started
            elif first_s is None:
                raise SystemExit(f"request {name} ended with {event}")
    return first_s, shortened_s, len(ids)


async def measure(options, folder):
    rng, rows = random.Random(1), []
    async with running(make_config(folder, options), folder) as service:
        tokenizer = Tokenizer.from_gguf(service.only.model.spec.files.metadata)
        compressor = make_compressor([service.only], tokenizer)

        def text(n):  # bytes that are a token each, for both models
            return [rng.randrange(65, 91) for _ in range(n)]

        for n in (WARM_TOKENS, *options.tokens):
            repeats = options.repeats if n in options.tokens else 1
            found = {"whole": [], "pflash": []}
            for turn in range(repeats):
                for how, by in (("pflash", compressor), ("whole", None)):
                    found[how].append(await first_token(service, by, text(n), f"{how}-{n}-{turn}"))
            if n not in options.tokens:
                continue
            whole_s, first_s = (statistics.median(run[0] for run in found[how]) for how in ("whole", "pflash"))
            rows.append({
                "tokens": n, "kept_tokens": found["pflash"][0][2],
                "whole_s": round(whole_s, 3), "pflash_s": round(first_s, 3),
                "of_it_scoring_s": round(statistics.median(run[1] for run in found["pflash"]), 3),
                "ratio": round(whole_s / first_s, 2),
                "runs": {how: [[round(part, 3) for part in run] for run in runs] for how, runs in found.items()},
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        kernels = service.groups["main"].loads[0].kernels
        scorer = service.only.placement.scorer
        return {
            "shape": options.shape, "scorer": options.scorer,
            "keep_ratio": options.keep_ratio, "window": scorer.window_tokens,
            "prefill_chunk": service.only.placement.prefill_chunk, "python": platform.python_version(),
            "kernels": kernels,
            "rows": rows,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.6-27b")
    parser.add_argument("--scorer", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--files", type=Path, help="folder of the GGUF files, which are kept there; default: temporary")
    parser.add_argument("--backend", choices=("cpu", "cuda", "hip"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--keep-ratio", type=float, default=0.05)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
