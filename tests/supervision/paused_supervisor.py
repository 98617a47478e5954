"""A supervisor process of its own, to be continued after a stop while a request streams from the demo's two daemons.

Prints the daemons' pids when the stream runs, and stops itself; at the stream's end prints what came of it.  On uvloop
as in production: there the timers that came due during a stop run before anything is read.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from lucevisor.app.model_files import open_model
from lucevisor.config import load
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams
from lucevisor.supervision.machine import SupervisionLimits
from tests.daemon_forks import Forker
from tests.e2e.process import DEMO

LIMITS = SupervisionLimits(step_s=3.0, heartbeat_s=3.0, busy_heartbeat_s=3.0, recheck_s=0.1)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def main(run_dir: str, n_tokens: int) -> None:
    config = load(DEMO, [])
    service = Service(config, [open_model(config)], Path(run_dir), Observer(), limits=LIMITS)
    await service.start()
    assert await service.wait_ready(60.0), service.reason()
    assert service.only.engine is not None
    pids = [group.pid for group in service.groups.values()]
    request = GenerationRequest(
        request_id="r", prompt=(1, 2, 3), max_tokens=n_tokens, sampling=SamplingParams(temperature=0.0)
    )
    n, reason = 0, ""
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                n += 1
                if n == 5:
                    say(pids=pids)
                    os.kill(os.getpid(), signal.SIGSTOP)  # nobody else could do it before the stream ends, for sure
            else:
                reason = event.reason
    say(n_tokens=n, reason=reason, pids=[group.pid for group in service.groups.values()], why=service.reason(),
        states=[group.state for group in service.groups.values()])  # fmt: skip
    await service.stop(0.0)


structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
with Forker.inherited().installed(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1], int(sys.argv[2])))
