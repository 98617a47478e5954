"""Joins READY daemons to a chain and keeps the engine told: the place where supervision and engine meet.

When every group is READY, all daemons drop their sequences (Reset) and answer; only then a chain over their links is
attached to
the engine.  When a daemon is lost, the chain is closed at once and running requests end with an error that names the
group.
Invariant: the engine has a chain if and only if every link of it is READY and was reset after the last loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from lucevisor.engine.core import Engine
from lucevisor.engine.pipeline import Pipeline
from lucevisor.engine.request import RequestError
from lucevisor.protocol.asyncio_link import Link
from lucevisor.protocol.errors import WireError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import RESET_BASE, Failed
from lucevisor.protocol.steps import Reset, StepResult

log = structlog.get_logger("assembly")


class PipelineAssembly:
    """``stage_groups[s]`` is the group that runs stage s."""

    def __init__(self, engine: Engine, stage_groups: Sequence[str], on_change: Callable[[], None]) -> None:
        self._engine = engine
        self._stage_groups = list(stage_groups)
        self._on_change = on_change
        self._links: dict[str, Link] = {}
        self._resetting: set[str] = set()
        self._token = RESET_BASE
        self._chain: Pipeline | None = None
        self._closed = False

    @property
    def complete(self) -> bool:
        """Whether requests are being served."""
        return self._chain is not None

    @property
    def resetting(self) -> frozenset[str]:
        """The groups that have yet to answer a Reset."""
        return frozenset(self._resetting)

    def ready(self, group: str, link: Link) -> None:
        """A daemon finished loading."""
        if self._closed:  # it was loading when the supervisor was told to stop
            return
        self._links[group] = link
        if set(self._links) == set(self._stage_groups):
            self._token += 1
            self._resetting = set(self._links)
            for one in self._links.values():
                try:
                    one.send(Reset(self._token), request_id=self._token)
                except WireError:  # its own on_closed tells supervision, which calls lost()
                    return

    def lost(self, group: str, reason: str) -> None:
        """A daemon is gone or going."""
        self._links.pop(group, None)
        self._resetting.clear()
        self._close(
            RequestError(
                "shard_lost", f"group {group} was lost while the request ran: {reason}; send the request again"
            )
        )

    def frame(self, group: str, frame: Frame) -> None:
        """Every frame of a READY daemon's link."""
        match frame.message:
            case StepResult() as result if result.step_id > RESET_BASE:
                if result.step_id == self._token and group in self._resetting:
                    self._resetting.discard(group)
                    if not self._resetting:
                        self._attach()
            case StepResult() as result if self._chain is not None:
                if not self._runs(group, result.stage):  # the chain would blame the group whose stage it is
                    reason = f"it answered for stage {result.stage}, which it does not run"
                    advice = "the daemon is restarted; report it with the log if it happens again"
                    failed = Failed(f"step {result.step_id}", f"group {group}", reason, advice, fatal=False)
                    self._chain.failed(self._stage_groups.index(group), failed)
                    return
                self._chain.receive(result, frame.payload)
            case Failed() as failed if self._chain is not None:
                self._chain.failed(self._stage_groups.index(group), failed)
            case _:
                pass  # an answer to a step of a chain that is closed by now

    def _runs(self, group: str, stage: int) -> bool:
        return 0 <= stage < len(self._stage_groups) and self._stage_groups[stage] == group

    def close(self, error: RequestError) -> None:
        """Detach for good."""
        self._closed = True
        self._links.clear()
        self._resetting.clear()
        self._close(error)

    def _attach(self) -> None:
        senders = {
            group: _Sender(link) for group, link in self._links.items()
        }  # one a daemon: it runs one step at a time
        chain = Pipeline([senders[g] for g in self._stage_groups], self._engine.on_result, self._engine.on_failed)
        self._chain = chain
        self._engine.attach(chain)
        log.info("chain ready", stages=self._stage_groups)
        self._on_change()

    def _close(self, error: RequestError) -> None:
        if self._chain is not None:
            self._chain.close()
            self._chain = None
            self._engine.detach(error)
            self._on_change()


class _Sender:
    """A stage link for the chain.  A dead link is not its business: supervision hears of it and calls ``lost``."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, data: bytes) -> None:
        try:
            self._link.send(data)
        except WireError as e:
            log.debug("a step was not sent", reason=str(e))
