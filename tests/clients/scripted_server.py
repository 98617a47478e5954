"""A server with a long context whose model says what files hold, one after the other, then the last again.

    python -m tests.clients.scripted_server PORT FILE...

For agents whose system prompts do not fit the demo.  It has no API key and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import structlog

from lucevisor.api.server import create_app, listen, serve
from tests.api.scripted_model import Rig, Scored, Seen, say

MAX_CONTEXT = 200_000


async def main(port: int, texts: list[str]) -> None:
    """Serve for ever; the URL is all that is printed, so that nobody need read on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    scripts = [say(text) for text in texts]
    rig = Rig(max_context=MAX_CONTEXT)

    def script(seen: Seen) -> Scored:
        number = next(i for i, one in enumerate(rig.stage.opened) if one is seen)
        return scripts[min(number, len(scripts) - 1)](seen)

    rig.stage.script = script
    _, url = await serve(create_app(rig.context), listen("127.0.0.1", port))
    print(url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), [Path(file).read_text(encoding="utf-8") for file in sys.argv[2:]]))
