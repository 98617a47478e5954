"""Probe: a daemon that sends hello, may run a check, and exits, for `plan` and `doctor`; never restarted."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lucevisor.config import Config, GroupConfig
from lucevisor.model.values import Backend
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.handshake import Expected, check_hello
from lucevisor.protocol.loading import Hello
from lucevisor.protocol.messages import Check, Checked, Failed, Shutdown
from lucevisor.protocol.tcp import TcpPath
from lucevisor.supervision.child import ProcessEnd, SpawnError, stage_packages
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.launcher import Launcher, open_listener


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe; ``hello`` may be set with a ``problem``, too.  ``way``: to another host, if any."""

    hello: Hello | None = None
    checked: Checked | None = None
    problem: str = ""
    way: TcpPath | None = None


class _Session:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Hello] = loop.create_future()
        self.checked: asyncio.Future[Checked] = loop.create_future()
        self.ended: asyncio.Future[ProcessEnd] = loop.create_future()
        self.failure = ""  # as the daemon reported it
        self.closed = ""

    def on_frame(self, frame: Frame) -> None:
        match frame.message:
            case Hello() as hello:
                self.hello.set_result(hello)
            case Checked() as checked:
                self.checked.set_result(checked)
            case Failed() as failed:
                self.failure = f"{failed.what} failed at {failed.where}: {failed.reason}; {failed.advice}"
            case _:
                pass

    def on_closed(self, error: ProtocolError) -> None:
        self.closed = str(error)

    def on_ended(self, ended: ProcessEnd) -> None:
        self.ended.set_result(ended)

    async def answer(self, future: asyncio.Future[Hello] | asyncio.Future[Checked], timeout_s: float) -> bool:
        await asyncio.wait({future, self.ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return future.done()

    def problem(self, otherwise: str) -> str:
        if not self.ended.done():
            return self.failure or self.closed or otherwise
        ended = self.ended.result()
        how = f"signal {ended.signal}" if ended.signal is not None else f"code {ended.code}"
        return self.failure or f"its interpreter ended with {how}: {ended.hint or 'nothing on standard error'}"


@contextlib.contextmanager
def probe_launcher(config: Config) -> Iterator[Launcher]:
    """Use it in a running event loop.  Raises ConfigError."""
    listener = open_listener(config)
    try:
        with tempfile.TemporaryDirectory(prefix="lucevisor-probe-") as directory:
            yield Launcher(stage_packages(Path(directory)), listener, config.cluster)
    finally:
        if listener is not None:
            listener.close()


async def probe(
    group: GroupConfig,
    launcher: Launcher,
    devices: Sequence[int],
    check: tuple[Check, Sequence[int]] | None,
    check_s: float,
    payload: Sequence[bytes] = (),
) -> Probe:
    """Start the group's interpreter, take its hello, run ``check`` (a Check and its descriptors) and await its end."""
    session = _Session()
    try:
        child = launcher.launch(group, 0, lambda *_: None, session.on_ended)
    except SpawnError as e:
        return Probe(problem=e.reason)
    link = child.open_link(f"{group.name} link", session.on_frame, session.on_closed)
    heartbeat = child.open_heartbeat(f"{group.name} heartbeat", lambda _: None, lambda _: None)
    expected = Expected(group.name, Backend(group.backend), launcher.source_hash, list(devices))
    try:
        if not await session.answer(session.hello, 60.0):
            return Probe(problem=session.problem("no hello within 60 s"))
        hello = session.hello.result()
        if problems := check_hello(hello, expected):
            return Probe(hello, problem="; ".join(map(str, problems)))
        if check is None:
            return Probe(hello)
        link.send(check[0], fds=check[1], payload=payload)
        answered, way = await session.answer(session.checked, check_s), link.path
        if not answered:
            return Probe(hello, None, session.problem(f"the check did not end within {check_s:.0f} s"), way)
        return Probe(hello, session.checked.result(), way=way)
    finally:
        with contextlib.suppress(ProtocolError):
            link.send(Shutdown("the probe is over"))
        await asyncio.wait({session.ended}, timeout=3.0)
        if not session.ended.done():
            child.send(ProcessSignal.KILL)
            await asyncio.wait({session.ended}, timeout=3.0)
        link.close()
        heartbeat.close()
