"""The engine on one page: choose a step, run it, apply its result. Read this first.

``core.EngineCore`` does the same over the same scheduler, with several steps on their way, over daemons that come and
go; tests compare the answers of both. Nothing here drafts, ranks pages or swaps requests out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lucevisor.engine.constraint import MadeMasks, make_masks
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.policy import FairShare
from lucevisor.engine.request import Event, GenerationRequest, RequestError
from lucevisor.engine.scheduler import Events, Scheduler
from lucevisor.protocol.steps import Step, StepResult

RunStep = Callable[[Step, MadeMasks | None], StepResult]
"""Computes a step with the masks of its constrained slices, and returns the tokens that were sampled."""


class PlainLoop:
    """Requests in, events out, one step after the other."""

    def __init__(self, limits: EngineLimits, run_step: RunStep, policy: type[FairShare] = FairShare) -> None:
        self.scheduler = Scheduler(limits, policy=policy)
        self._run_step = run_step

    def step(self, now: float) -> Events | None:
        """Run one step and return its events; None if no request has anything to compute."""
        plan = self.scheduler.next_plan(now)
        events, self.scheduler.failed = self.scheduler.failed, []
        if plan is None:
            return events or None
        masks = make_masks(plan.step.step_id, plan.mask_jobs) if plan.mask_jobs else None
        events += self.scheduler.apply(self._run_step(plan.step, masks), now)
        for request_id, why in masks.failures if masks is not None else ():
            events += self.scheduler.cancel(request_id, now, RequestError("constraint_failed", why))
        return events

    def run(self, requests: Iterable[GenerationRequest]) -> dict[str, list[Event]]:
        """Answer requests that come at once; return the events of each.  Raises what ``Scheduler.submit`` raises."""
        found: dict[str, list[Event]] = {}
        for request in requests:
            self.scheduler.submit(request, 0.0)
            found[request.request_id] = []
        while (events := self.step(0.0)) is not None:
            for request_id, event in events:
                found[request_id].append(event)
        return found
