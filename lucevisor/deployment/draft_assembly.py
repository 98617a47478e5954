"""Attaches a drafter to the engine, and detaches it: the drafter comes and goes while the pipeline serves.

A drafter in the daemon of a stage is attached with each pipeline.  One in a daemon of its own is attached when that is
READY and has dropped its sequences (Reset, ResetDone) since the pipeline was attached.
Invariant: the engine drafts only with a daemon that was reset after the present pipeline was attached.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from lucevisor.engine.core import Engine
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.steps import Reset
from lucevisor.protocol.transport import Link

log = structlog.get_logger("assembly")


class DraftAssembly:
    """``group`` runs the draft stage; ``alone``: it runs no other stage; ``with_output``: it runs the output stage,
    too.  ``on_change`` is called when ``attached`` changes.
    """

    def __init__(
        self, engine: Engine, group: str, *, alone: bool, with_output: bool, on_change: Callable[[], None]
    ) -> None:
        self.group = group
        self._alone, self._with_output = alone, with_output
        self.attached = False
        self._engine, self._on_change = engine, on_change
        self._link: Link | None = None
        self._serving = False  # a pipeline is attached
        self._n_resets = 0
        self._token = 0  # of the last Reset; 0: none is unanswered

    @property
    def resetting(self) -> bool:
        """Whether its daemon has yet to answer a Reset."""
        return self._token > 0

    def ready(self, link: Link) -> None:
        """Its daemon finished loading, the drafter included."""
        self._link = link
        if self._serving:
            self._prepare()

    def lost(self, reason: str) -> None:
        """Its daemon has exited or is about to."""
        self._link, self._token = None, 0
        self.detach(reason)

    def detach(self, reason: str) -> None:
        """Stop drafting until its daemon or the pipeline is replaced."""
        if self.attached:
            self.attached = False
            log.warning("drafter detached", group=self.group, reason=reason)
            self._engine.drafter.detach()
            self._on_change()

    def pipeline_attached(self, *, kept: bool = False) -> None:
        """The engine has a pipeline, whose daemons hold no sequences; ``kept``: that of the drafter has the state of
        the one before, as of the last step."""
        self._serving = True
        if self._link is not None:
            self._prepare(kept=kept)

    def pipeline_detached(self) -> None:
        """The engine has dropped the pipeline, and the drafter with it."""
        self._serving, self._token = False, 0
        self.attached = False

    def reset_done(self, token: int) -> None:
        """Its daemon, which runs nothing else, dropped its sequences."""
        if token == self._token:
            self._token = 0
            self._attach()

    def _prepare(self, *, kept: bool = False) -> None:
        """Reset a daemon of its own; that of a stage was reset before the pipeline was attached."""
        if not self._alone:
            self._attach(kept=kept)
            return
        assert self._link is not None
        self._n_resets += 1
        self._token = self._n_resets
        try:
            self._link.send(Reset(self._token))
        except ProtocolError:  # the link's on_closed tells supervision, which calls lost()
            self._token = 0

    def _attach(self, *, kept: bool = False) -> None:
        assert self._link is not None
        self.attached = True
        log.info("drafter attached", group=self.group, kept=kept)
        self._engine.drafter.attach(self._link, with_output=self._with_output, kept=kept)
        self._on_change()
