"""The server on uvloop in a process of its own, which watches how long its event loop cannot run anything.

`python -m tests.api.watched_server`: prints its URL, then for each line on standard input one JSON line: the gaps in
milliseconds since the last one.

A gap is how late a timer of 1 ms is, but at most the CPU time that the process took meanwhile: whoever holds up the
loop, a callback or another thread with the interpreter lock, computes.  A busy machine delays the timer as well, and
then the process does not compute.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import structlog
import uvloop

from lucevisor.api.contexts import ServedModels
from lucevisor.api.server import create_app, listen, serve
from lucevisor.app.run import freeze_gc
from tests.api.scripted_model import Rig

PERIOD_S = 0.001


class Watch:
    """Gaps of the running loop, in seconds."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._set()

    def take(self) -> list[float]:
        gaps, self.gaps = self.gaps, []
        return gaps

    def _set(self) -> None:
        self._due, self._cpu = time.perf_counter() + PERIOD_S, time.process_time()
        self._loop.call_later(PERIOD_S, self._note)

    def _note(self) -> None:
        late, computed = time.perf_counter() - self._due, time.process_time() - self._cpu
        self.gaps.append(max(0.0, min(late, computed)))
        self._set()


async def main() -> None:
    rig = Rig(max_queue=1024, max_context=1 << 18)
    assert rig.context.server.preprocessor is not None
    rig.context.server.preprocessor.start(ServedModels([rig.context]))
    runner, url = await serve(create_app(rig.context), listen("127.0.0.1", 0))
    freeze_gc()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    watch = Watch()
    print(url, flush=True)
    while await reader.readline():
        print(json.dumps([round(1000 * gap, 3) for gap in watch.take()]), flush=True)
    await runner.cleanup()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    uvloop.run(main())
