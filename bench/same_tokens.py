"""How many answers change when other things happen meanwhile: table of docs/reliability.md by dtype and sampling.

    python bench/same_tokens.py [--device cpu|cuda] [--dtypes float32 bfloat16] [--answers 100] [--tokens 96]
                                [--devices cuda:0 cuda:0] [--deterministic] [--json PATH]

The demo model over two daemons answers the beginnings of texts that its training never saw: first one request after
the other, then again, eight at once if not said otherwise

- undisturbed;
- 25 at once while a daemon is killed in the middle of each 25, the two in turn;
- with room for three, so that sequences are preempted, and computed again;
- from the prefix cache, which has the prompt's pages;
- under another split;
- with drafts.

An answer counts as changed when one of its tokens differs.  Printed: changed answers of all, greedy, and seeded at
temperature 1.
"""

import argparse
import asyncio
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from perplexity import DEMO, held_out
from records import conditions, write_json
from recovery import GREEDY, ask, kill, until, warm
from services import running

from lucevisor.app import logs
from lucevisor.protocol.steps import SamplingParams

DRAFTER = DEMO.with_name("demo-qwen35-22m-dflash2-q4_0.gguf")
TOGETHER = 8
SAMPLINGS = {"greedy": lambda _: GREEDY, "seeded": lambda i: SamplingParams(temperature=1.0, seed=i)}


def configuration(directory, name, options, dtype, *, together=TOGETHER, pages=0, split=(1, 1), slots=0, draft=False):
    lines = [f'[model]\npath = "{DEMO}"']
    for group, device in zip(("left", "right"), options.devices, strict=True):
        backend, index = device.split(":")
        lines += [f'[groups.{group}]\nbackend = "{backend}"']
        lines += ["threads = 1"] if backend == "cpu" else [f'visible_devices = ["{index}"]']
    lines += [f'[placement]\ntarget_devices = ["left:0", "right:0"]\ntarget_layer_split = {list(split)}']
    lines += [f'[engine]\ndtype = "{dtype}"\nmax_context = 1024\nmax_sequences = {together}']
    lines += [f"pages = {pages}"] if pages else []
    lines += ["deterministic = true"] if options.deterministic else []
    lines += [f"[cache]\nprefix_slots = {slots}", '[recovery]\nrestart_limit = "999/60s"\nspares = 1']
    lines += [f'[draft]\npath = "{DRAFTER}"' if draft else '[draft]\nkind = "off"']
    path = Path(directory) / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


async def answers(service, prompts, sampling, n_tokens, together=TOGETHER, kills=False):
    found = []
    for first in range(0, len(prompts), together):
        told = [0]

        def on_token(told=told):
            told[0] += 1

        batch = range(first, min(first + together, len(prompts)))
        tasks = [asyncio.create_task(ask(service, prompts[i], n_tokens, on_token, sampling(i))) for i in batch]
        if kills:
            await until(lambda told=told, tasks=tasks: told[0] >= 12 * len(tasks) or all(t.done() for t in tasks))
            await kill(service, ("left", "right")[first // together % 2])
            await warm(service)
        found += await asyncio.gather(*tasks)
    return found


async def measure(options, dtype, keep):
    texts, _ = held_out(16, 1024)
    prompts = [texts[i % 16][: 150 + 7 * i % 667] for i in range(options.answers)]
    with tempfile.TemporaryDirectory() as directory:
        right = {}

        async def arm(name, config, *, again=False, **how):
            async with running(configuration(directory, "arm", options, dtype, **config), directory) as service:
                for kind, sampling in SAMPLINGS.items():
                    if again:
                        await answers(service, prompts, sampling, 1)
                    found = await answers(service, prompts, sampling, options.tokens, **how)
                    right.setdefault(kind, found)
                    n = sum(a != b for a, b in zip(right[kind], found, strict=True))
                    keep({"dtype": dtype, "arm": name, "sampling": kind, "changed": n, "of": len(prompts),
                          "preempted": service.only.engine.statistics().preemptions})  # fmt: skip

        await arm("one at a time", {}, together=1)
        await arm("eight at once", {})
        await arm("killed", {"together": 25}, together=25, kills=True)
        await arm("preempted", {"pages": 24})
        await arm("prefix cache", {"slots": 2 * options.answers}, again=True)
        await arm("other split", {"split": (1, 3)})
        await arm("drafts", {"draft": True})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", nargs=2, help="default: the first one of --device, twice")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--answers", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--deterministic", action="store_true", help="with engine.deterministic")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.devices = options.devices or [f"{options.device}:0"] * 2
    logs.configure("console", "error")
    record = {"date": datetime.now(UTC).date().isoformat(), **conditions(), "devices": options.devices, "rows": []}

    def keep(row):
        record["rows"].append(row)
        print(f"{row['dtype']}, {row['arm']}, {row['sampling']}: {row['changed']} of {row['of']} changed, "
              f"{row['preempted']} preemptions", flush=True)  # fmt: skip
        if options.json is not None:
            write_json(options.json, record)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for dtype in options.dtypes:
            runner.run(measure(options, dtype, keep))


if __name__ == "__main__":
    main()
