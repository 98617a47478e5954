"""A supervisor that kills itself with SIGKILL when it has read or written N chunks of a file for its daemons.

    python -m tests.e2e.killed_supervisor CONFIG DIRECTORY read|write N

It asks for ``PROMPT`` once it serves and has found its snapshots, and prints its answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lucevisor.protocol import files
from tests.e2e.service import PROMPT, ask, running, snapshots_of
from tests.waiting import until


def kill_at(what: str, n: int) -> None:
    real, seen = getattr(files.LocalFile, what), [0]

    def call(self: files.LocalFile, views: Sequence[memoryview], offset: int) -> Any:
        seen[0] += 1
        if seen[0] == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, views, offset)

    setattr(files.LocalFile, what, call)


async def main(config: Path, directory: Path, what: str, n: int) -> None:
    async with running(config, directory) as service:
        await until(lambda: snapshots_of(service).store is not None)
        kill_at(what, n)
        answer, _ = await ask(service, PROMPT, [])
        print(answer)
        await snapshots_of(service).save_all(60.0)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
