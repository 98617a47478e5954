"""Several engines of one model behind the interface of one: the asyncio side of the router.

When a replica loses the state of its shards, is given up, or drains, its requests go to others, where prompt and answer
so far are computed again; a draw depends on seed, position and logits, so the stream goes on with the tokens that were
due."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from lucevisor.engine.constraint import Constraint
from lucevisor.engine.events import EngineState
from lucevisor.engine.request import (
    GenerationRequest,
    NotReady,
    RequestError,
    RequestHandle,
    SubmitError,
)
from lucevisor.engine.router import Candidate, Health, Router
from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.shell import Engine
from lucevisor.kv.tokens import TokenBuffer

log = structlog.get_logger("lucevisor.engine")


class _LockedConstraint:
    """A constraint that one engine at a time uses: masks that a lost replica waited for may still be made."""

    def __init__(self, inner: Constraint) -> None:
        self._inner, self._lock = inner, threading.Lock()
        self.row_bytes = inner.row_bytes

    @property
    def n_tokens(self) -> int:
        return self._inner.n_tokens

    def n_valid(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        with self._lock:
            return self._inner.n_valid(start, tokens, drafts)

    def masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        with self._lock:
            return self._inner.masks(start, tokens, drafts)


class ReplicatedEngine:
    """The replicas ``names`` of one model.  Engines are added as they are made."""

    def __init__(self, names: Sequence[str]) -> None:
        self.router: Final = Router(names)
        self._engines: dict[str, Engine] = {}

    def add(self, name: str, engine: Engine) -> None:
        """Route requests to the engine of a replica, too."""
        self._engines[name] = engine
        engine.on_state = self._move
        self._move()

    @property
    def replicas(self) -> Mapping[str, Engine]:
        """The engines by the names of their replicas, in order; without those that are not made yet."""
        return {name: self._engines[name] for name in self.router.health if name in self._engines}

    # ---- requests

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request at the replica that suits it best, or at another one if that refuses it. Raises what
        Engine.submit does."""
        prompt = TokenBuffer.of(request.prompt)
        constraint = None if request.constraint is None else _LockedConstraint(request.constraint)
        request = replace(request, prompt=prompt, constraint=constraint)
        refusal: SubmitError | None = None
        for name in self._order(prompt):
            try:
                handle = self._engines[name].submit(request)
            except SubmitError as error:
                refusal = refusal or error
            else:
                self.router.on_routed(name)
                return handle
        if refusal is None and self._engines:  # why its first one does not serve
            return next(iter(self.replicas.values())).submit(request)
        raise refusal or NotReady("the model is being loaded")

    def _order(self, tokens: TokenBuffer) -> list[str]:
        self._update_health()
        candidates = {name: _candidate(engine, tokens) for name, engine in self._engines.items()}
        return self.router.order(len(tokens), candidates)

    def _update_health(self) -> None:
        for name, engine in self._engines.items():
            self.router.health[name] = _health(engine)

    # ---- moves

    async def drain(self, name: str, drain_s: float, freeze_s: float) -> bool:
        """Send a replica no more requests, and wait up to ``drain_s`` until those that run have ended; the others move.
        Call ``end_drain`` afterwards. False if no other replica serves."""
        self._update_health()
        if not self.router.begin_drain(name):
            return False
        self._move()
        engine = self._engines.get(name)
        if engine is None:
            return True
        scheduler = engine.core.scheduler
        if await engine.changes.holds_within(lambda: scheduler.idle, drain_s):
            return True
        if self.router.targets(name):
            try:
                if await engine.freeze(freeze_s) is not None:
                    self._release(name, running=True)
            finally:  # also where it took too long, or was cancelled
                engine.thaw()
        return True

    def end_drain(self, name: str) -> None:
        self.router.end_drain(name)
        self._move()

    def _move(self) -> None:
        """Move what waits at replicas that do not serve to others that do; called after each change of a state."""
        self._update_health()
        for name in self.router.sources():
            if name in self._engines:
                self._release(name)

    def _release(self, name: str, *, running: bool = False) -> None:
        self._engines[name].release(lambda handle, record: self._take(name, handle, record), running=running)

    def _take(self, source: str, handle: RequestHandle, record: RequestRecord) -> None:
        """Have another replica go on with a request, or the same one if no other can."""
        refusal: SubmitError = NotReady("no other replica serves")
        targets = self.router.targets(source)
        for name in [*(name for name in self._order(record.tokens) if name in targets), source]:
            try:
                self._engines[name].adopt(handle, record)
            except SubmitError as error:
                refusal = error
            else:
                if name != source:
                    self.router.on_routed(name, moved=True)
                    log.info("request moved", request=handle.request_id, replica=name, from_replica=source,
                             n_generated=record.n_generated)  # fmt: skip
                return
        text = f"replica {source} was lost: {refusal}; send the request again later"
        self._engines[source].end(handle, record, RequestError("shard_lost", text))


def _health(engine: Engine) -> Health:
    if engine.ready and not engine.invalid:
        return Health.SERVING
    holds = engine.core.recovery.holding and not engine.core.refusal_reason
    return Health.HOLDING if holds and engine.core.state is not EngineState.CLOSED else Health.AWAY


def _candidate(engine: Engine, tokens: TokenBuffer) -> Candidate:
    scheduler = engine.core.scheduler
    n_requests, most = len(scheduler.unfinished), scheduler.limits.max_sequences
    return Candidate(engine.n_cached(tokens), scheduler.n_tokens_due, n_requests, most)
