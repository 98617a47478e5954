"""What a boundary between groups costs, and what two groups gain: streams and a long prompt on one device and on two.

    python bench/groups.py --shape qwen3.6-27b --devices cuda:0 cuda:1 [--streams 1 8] [--prompt 16384] [--chunk 2048]
                           [--rounds 3] [--threads N] [--file PATH] [--save | --json PATH]

One daemon on the first device, then one on each, with the layers halved; random weights (full_size.py), the same
requests.  Per number of streams n: milliseconds a token of one stream with n and with n / 2 streams on one device, and
with n on two, whose bound is n / T(n / 2) tokens a second where T is one device's step.  Hop: from the doorbell of the
rows until the next stage took them.  Aims (issue 13): one stream within 3 % and two hops of 60 us of one device,
prefill at least 1.85 x, n streams at least 0.95 of their bound.  One device is written to --json before two are
measured, and read from there when it has been, so that a run that was cut off goes on.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from full_size import write_config
from make_gguf import SHAPES, write
from records import RESULTS, conditions, write_json
from services import running

from lucevisor.app import logs
from lucevisor.cli.bench import Case, tokens_per_s
from lucevisor.deployment.served_model import ServedModel
from lucevisor.model.families import open_spec

ROOT = Path(__file__).parents[1]


def configured(path, options, devices):
    """One group for each device, an even split."""
    n_sequences, context = max(8, *options.streams), options.prompt + 512
    settings = [
        f"engine.max_context={context}",
        f"engine.max_sequences={n_sequences}",
        f"engine.prefill_chunk={options.chunk}",
    ]
    settings += ["cache.prefix_slots=0", "draft.kind=off"]
    on_cpu = [i for i, device in enumerate(devices) if device.startswith("cpu")]
    settings += [f"groups.g{i}.threads={options.threads}" for i in on_cpu]
    return write_config(path, options.file, devices, settings)


async def measure(options, devices):
    """Seconds a token by number of streams, seconds of the prompt, and seconds of a hop where one row crosses."""
    counts = sorted({*options.streams, *(max(1, n // 2) for n in options.streams)})
    found: dict = {"streams": {n: [] for n in counts}, "prompt_s": [], "hop_s": []}
    with tempfile.TemporaryDirectory(prefix="groups-") as directory:
        config = configured(Path(directory) / "groups.toml", options, devices)
        model = ServedModel(open_spec(options.file), (options.file,), options.shape)
        async with running(config, directory, model=model) as service:
            turns = range(options.rounds + 1)
            for turn in turns:  # before any stream: beside short prompts, or soon after them, chunks are shorter
                prompt_s = options.prompt / await tokens_per_s(service, Case(prompt=options.prompt), turn)
                found["prompt_s"] += [prompt_s] if turn else []
            for turn in turns:
                for n in counts:
                    before = hops(service)
                    token_s = n / await tokens_per_s(service, Case(answer=options.tokens, streams=n), turn)
                    if turn:
                        found["streams"][n].append(token_s)
                        if n == 1:
                            found["hop_s"].append(mean_since(before, hops(service)))
    return found


def hops(service):
    """Hops so far, and their seconds."""
    totals = service.only.engine.core.totals.boundaries
    return sum(one.n_hops for one in totals), sum(one.seconds for one in totals)


def mean_since(before, now):
    return (now[1] - before[1]) / (now[0] - before[0]) if now[0] > before[0] else 0.0


def rows(options, one, two):
    """metric | one device | two | what it is to be."""
    median = statistics.median
    alone, halved = ({int(n): median(s) for n, s in found["streams"].items()} for found in (one, two))
    hop_s = median(two["hop_s"])
    for n in options.streams:
        text = f"{alone[n] * 1e3:.3f} ms", f"{halved[n] * 1e3:.3f} ms"
        if n == 1:
            bound_s = 1.03 * alone[1] + 120e-6
            aim = f"{(halved[1] - alone[1]) * 1e3:+.3f} ms a token; aim {bound_s * 1e3:.3f} ms"
        else:
            share = alone[max(1, n // 2)] / halved[n]
            aim = f"{share:.3f} of n / T(n / 2); aim 0.95"
        yield f"{n} streams, a token", *text, aim
    yield "hop", "", f"{hop_s * 1e6:.0f} us", "aim 60"
    a, b = median(one["prompt_s"]), median(two["prompt_s"])
    yield f"prompt of {options.prompt}, chunk {options.chunk}", f"{a:.3f} s", f"{b:.3f} s", f"{a / b:.2f} x; aim 1.85"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--file", type=Path, help="the GGUF file: used when it is there, else made and kept")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of a daemon on a cpu")
    parser.add_argument("--save", action="store_true", help="write bench/results/groups-SHAPE.json")
    parser.add_argument("--json", type=Path, help="write to this file, and go on from what it has")
    options = parser.parse_args()
    logs.configure("console", "warning")
    options.file = options.file or Path(tempfile.gettempdir()) / f"{options.shape}.gguf"
    if not options.file.exists():
        write(options.file, SHAPES[options.shape]())
    began = time.perf_counter()
    path = RESULTS / f"groups-{options.shape}.json" if options.save else options.json
    record = {**conditions(), "shape": options.shape, "devices": options.devices}
    if options.json is not None and options.json.exists():
        record = json.loads(options.json.read_text())
    for name, devices in (("one", options.devices[:1]), ("two", options.devices)):
        if name not in record:
            record[name] = asyncio.run(measure(options, devices))
            if path is not None:
                write_json(path, record)
    one, two = record["one"], record["two"]
    print(
        f"{options.shape}, {' + '.join(options.devices)}, {os.cpu_count()} cores, {time.perf_counter() - began:.0f} s"
    )
    for row in rows(options, one, two):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
