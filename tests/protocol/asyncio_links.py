"""Ends of an asyncio link for tests: an event loop of each kind, what its handler saw, a raw socket for the peer."""

import asyncio
import os
import socket

from lucevisor.protocol.codec import encode
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Sampled, Slice, Step, StepResult
from lucevisor.protocol.transport import Link

RESULT = StepResult(7, 1, [Sampled(3, 5)], segments=[("logits", [4])])
RESULT_BYTES = encode(RESULT, 7, payload_bytes=16) + b"0123456789abcdef"
STEP = Step(1, 0, slices=[Slice(3, 100, [5], True)])


class Seen:
    """Collects what a link reports."""

    def __init__(self):
        self.frames = []
        self.reasons = []
        self._changed = asyncio.Event()

    def on_frame(self, frame):
        self.frames.append(frame)
        self._changed.set()

    def on_closed(self, reason):
        self.reasons.append(reason)
        self._changed.set()

    async def until(self, condition):
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def closed(self):
        await self.until(lambda: self.reasons)
        await asyncio.sleep(0.01)  # a second call would come now
        assert len(self.reasons) == 1
        return self.reasons[0]


def new_link(**options):
    """(link in READY, what it saw, the daemon's bare socket)."""
    ours, theirs = socket.socketpair()
    seen = Seen()
    link = Link(ours, seen.on_frame, seen.on_closed, name="link of left", **options)
    link._connection.state = LinkState.READY
    return link, seen, theirs


def open_fds():
    return len(os.listdir("/proc/self/fd"))
