"""Hundreds of killed daemons beside eight streams, over each set-up of test_recovery.py, with spares and without.

    python -m tests.e2e.kills [--kills 200] [--only recurrent] [--spares 0] [--transport tcp]

Answers are compared with those before the first kill, and each recording of the engine is replayed.  Prints a line for
each set-up; exit code 1: an answer differed, failed, or a recording led to other instructions.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

import structlog
import uvloop

from tests.e2e.service import TRANSPORTS
from tests.e2e.test_recovery import CONFIGURATIONS, Streams, kill, serving
from tests.e2e.test_speculation import Case, prompts_of
from tests.engine.recording import Recording, replay

KILLS_A_SERVICE = 100
"""Events of a recording stay in memory."""


async def run(case: Case, n_groups: int, place: str, spares: int, transport: str, n_kills: int) -> tuple[str, bool]:
    """Kill ``n_kills`` daemons of a service, in turn through its groups; what happened, and whether all was right."""
    rng = random.Random(n_kills + n_groups + spares)
    with tempfile.TemporaryDirectory() as folder:
        recordings: list[Recording] = []
        async with serving(case, Path(folder), n_groups, place, transport, spares, recordings) as service:
            streams = Streams(service, prompts_of(case, 9))
            await streams.learn()
            groups = list(service.groups)
            started = time.monotonic()
            async with streams.running():
                for i in range(n_kills):
                    await asyncio.sleep(rng.uniform(0.0, 0.25))
                    await kill(service, groups[i % len(groups)])
            [recording] = recordings
            replay(recording, recording.new_core())
            assert service.only.engine is not None
            recovery = service.only.engine.statistics().recovery
            return (
                f"{n_kills} kills in {time.monotonic() - started:.0f} s, {streams.n_answers} answers, "
                f"{len(streams.wrong)} wrong {streams.wrong[:3]}, rebuilt {recovery.n_rebuilt} tokens, recomputed by "
                f"all stages {recovery.n_recomputed}, longest pause {recovery.longest_pause_s:.1f} s; "
                f"{len(recording.events)} events replay to the same instructions"
            ), not streams.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="for each set-up")
    parser.add_argument("--only", default="", help="set-ups whose name contains this")
    parser.add_argument("--spares", type=int, choices=(0, 1), help="both unless given")
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0])
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    all_right = True
    for setup in CONFIGURATIONS:
        case, n_groups, place = setup.values
        if options.only not in str(setup.id):
            continue
        for spares in (0, 1) if options.spares is None else (options.spares,):
            for first in range(0, options.kills, KILLS_A_SERVICE):
                n_kills = min(KILLS_A_SERVICE, options.kills - first)
                text, is_right = uvloop.run(run(case, n_groups, place, spares, options.transport, n_kills))  # type: ignore[arg-type]
                print(f"({setup.id}) spares {spares}: {text}", flush=True)
                all_right &= is_right
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
