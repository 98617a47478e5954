"""What a step costs the supervisor: real daemons that compute nothing, many sequences, no HTTP.

    python bench/supervisor.py [--sequences 64] [--steps 6000] [--rate 100] [--profile] [--name NAME] [--save]

Daemons of the demo model that sample at once (paced_daemon.py), prompts of one page, answers of a page after the other.
As fast as it goes: steps a second, CPU time of this process for a step (what a core of its own would do at most), and
its memory after each quarter.  Then paced by the daemons to --rate steps a second: CPU time as a part of a core.
Targets: 2,000 steps a second, 0.15 of a core at 100, memory flat.  --save writes bench/results/supervisor-NAME.json.
"""

import argparse
import asyncio
import contextlib
import cProfile
import pstats
import tempfile
import time
from pathlib import Path

import psutil
import uvloop
from records import machine, save
from services import DEMO, paced_python, running

from lucevisor.app import logs
from lucevisor.app.run import freeze_gc
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams

PROMPT, ANSWER = 64, 512
TOKEN = 300
STUCK_S = 30.0


@contextlib.contextmanager
def configuration(options, step_s):
    """Two groups of daemons that compute nothing."""
    with tempfile.TemporaryDirectory(prefix="lv") as directory:
        python = paced_python(directory)
        env = f'{{PACED_STEP_S = "{step_s:.6f}", PACED_IDS = "{TOKEN}"}}'
        text = f'[model]\npath = "{DEMO}"\n' + "".join(
            f'[groups.g{i}]\nbackend = "cpu"\nthreads = 1\npython = "{python}"\nenv = {env}\n' for i in (0, 1)
        )
        text += '[placement]\ntarget_devices = ["g0:0", "g1:0"]\ntarget_layer_split = [0.5, 0.5]\n'
        text += f'[engine]\nmax_sequences = {options.sequences}\n[draft]\nkind = "off"\n[cache]\nprefix_slots = 0\n'
        path = Path(directory) / "supervisor.toml"
        path.write_text(text)
        yield path, Path(directory)


async def stream(service, index, stop):
    """One answer after the other until ``stop`` is set."""
    turn = 0
    while not stop.is_set():
        turn += 1
        request = GenerationRequest(
            request_id=f"{index}-{turn}",
            prompt=tuple(1 + (index * 7919 + i * 31 + turn) % 8000 for i in range(PROMPT)),
            max_tokens=ANSWER,
            sampling=SamplingParams(temperature=0.0),
        )
        with service.only.engine.submit(request) as handle:
            async for event in handle:
                if isinstance(event, TokenEvent) and stop.is_set():
                    break


def daemons_cpu_s():
    """CPU seconds of all daemons so far."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


async def steps(service, n):
    """Wait for n more steps; returns seconds, CPU seconds of this process and those of all daemons for each.

    SystemExit if there are none for a while.
    """
    first = service.only.engine.core.totals.n_steps
    began, cpu, others = time.perf_counter(), time.process_time(), daemons_cpu_s()
    seen, seen_at = 0, began
    while (done := service.only.engine.core.totals.n_steps - first) < n:
        if done > seen:
            seen, seen_at = done, time.perf_counter()
        elif time.perf_counter() - seen_at > STUCK_S:
            raise SystemExit(f"no step in {STUCK_S:.0f} s: {service.reason() or 'the log says why'}")
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - began
    return seconds / done, (time.process_time() - cpu) / done, (daemons_cpu_s() - others) / done


async def measure(options, step_s, n_steps, parts):
    """What ``steps`` returns, and memory after it, for each part of the steps."""
    with configuration(options, step_s) as (path, directory):
        async with running(path, directory) as service:
            stop = asyncio.Event()
            tasks = [asyncio.create_task(stream(service, i, stop)) for i in range(options.sequences)]
            await steps(service, n_steps // 4)  # warm up
            freeze_gc()  # as `lucevisor start` does
            profile = cProfile.Profile()
            if options.profile:
                profile.enable()
            found, memory = [], []
            for _ in range(parts):
                found.append(await steps(service, n_steps // parts))
                memory.append(psutil.Process().memory_info().rss)
            if options.profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(35)
            stop.set()
            await asyncio.gather(*tasks)
            return found, memory


async def main(options):
    logs.configure("console", "warning")
    fast, memory = await measure(options, 0.0, options.steps, 4)
    step_s, cpu_s, daemons_s = (sorted(x)[len(x) // 2] for x in zip(*fast, strict=True))
    print("metric | value | target")
    print(f"steps/s | {1 / step_s:.0f} | 2000")
    print(
        f"CPU time a step, {options.sequences} sequences | {cpu_s * 1e6:.0f} us, so at most {1 / cpu_s:.0f} steps/s |"
    )
    print(f"CPU time a step of both daemons | {daemons_s * 1e6:.0f} us |")
    print(f"memory after each quarter | {', '.join(f'{m >> 10} KiB' for m in memory)} | flat")
    slow, _ = await measure(options, 1 / options.rate, 6 * options.rate, 2)
    step_slow, cpu_slow, _ = slow[-1]
    print(f"cores at {1 / step_slow:.0f} steps/s | {cpu_slow / step_slow:.3f} | 0.15 at 100")
    if options.save:
        record = {
            **machine(),
            "sequences": options.sequences, "steps_per_s": 1 / step_s, "cpu_s_per_step": cpu_s,
            "daemons_cpu_s_per_step": daemons_s, "memory": memory,
            "paced_steps_per_s": 1 / step_slow, "paced_cores": cpu_slow / step_slow, "parts": fast,
        }  # fmt: skip
        save(f"supervisor-{options.name}", record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    uvloop.run(main(parser.parse_args()))
