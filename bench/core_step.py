"""CPU time of the engine core for one step, in this process: results in, the next step encoded, events delivered.

    python bench/core_step.py [--sequences 32] [--stages 1] [--steps 2000] [--json FILE]

Daemons are counters: a frame is taken and dropped, and every stage's answer is made outside the measured time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import GenerationRequest
from lucevisor.engine.shell import Engine, EngineSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Sampled, SamplingParams, StepResult


class Counter:
    """A link that takes frames."""

    n_sent = 0

    def send(self, _message: object, /, *, payload: object = ()) -> None:
        self.n_sent += 1


def measure(n_sequences: int, n_stages: int, n_steps: int) -> list[float]:
    """Return seconds of each step, in which every sequence decodes."""
    pages = n_sequences * (2 + (n_steps + 64) // 64)
    limits = EngineLimits(
        max_sequences=n_sequences,
        max_context=n_steps + 256,
        prefill_chunk=64,
        max_step_tokens=64 + 64 * n_sequences,
        kv_groups=frozenset({KvGroup.FULL, KvGroup.RECURRENT}),
        pools=PoolSizes(pages, 0, 2 * n_sequences),
    )
    engine = Engine(limits, EngineSettings(max_queue=n_sequences, hold_s=60.0))
    engine.attach([Counter() for _ in range(n_stages)], has_doorbells=n_stages > 1)
    for i in range(n_sequences):
        sampling = SamplingParams(seed=i)
        engine.submit(
            GenerationRequest(
                request_id=f"r{i}", prompt=TokenBuffer(range(20)), max_tokens=n_steps + 100, sampling=sampling
            )
        )
    scheduler, seconds = engine.core.scheduler, list[float]()
    while len(seconds) < n_steps:
        oldest = scheduler.in_flight[0]
        sampled = [Sampled(part.slice.sequence, 7) for part in oldest.parts.values() if part.slice.sample]
        answers = [StepResult(oldest.step_id, stage, sampled, compute_s=1e-3) for stage in range(n_stages - 1)]
        answers.append(StepResult(oldest.step_id, n_stages - 1, sampled, compute_s=1e-3))
        started = time.process_time()
        for answer in answers:
            engine.receive(answer)
        if oldest.plain:
            seconds.append(time.process_time() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for n_stages in arguments.stages:
        for n_sequences in arguments.sequences:
            seconds = measure(n_sequences, n_stages, arguments.steps)
            p50, p95 = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
            rows.append({"stages": n_stages, "sequences": n_sequences, "p50_us": p50 * 1e6, "p95_us": p95 * 1e6})
            print(f"{n_stages} stages, {n_sequences:3} sequences: {p50 * 1e6:6.0f} us a step, p95 {p95 * 1e6:6.0f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
