"""An engine over toy daemons, driven by hand: nothing happens until a test lets a daemon work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from lucevisor.engine.core import FrozenState
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.pipeline import Pipeline, PipelineResult, StageFailure
from lucevisor.engine.policy import FairShare
from lucevisor.engine.request import Event, FinishedEvent, GenerationRequest, RequestError, RequestHandle, TokenEvent
from lucevisor.engine.shell import DraftStage, Engine, EngineSettings
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import DraftStep, PendingCancelled, SamplingParams, Step, StepResult
from tests.engine.toy_drafter import ToyDrafter, drafter_daemon
from tests.engine.toy_pipeline import ToyConstraint, ToyDaemon, ToyLimits, ToyModel, ToyRows, ToyStage, toy_daemons

LOST = RequestError("shard_lost", "group left was killed; send the request again")
HYBRID = frozenset({KvGroup.FULL, KvGroup.RECURRENT})
ALL_KV_GROUPS = frozenset(KvGroup)


def limits(**changes: object) -> EngineLimits:
    """Small limits, to be changed one by one."""
    usual = EngineLimits(
        max_sequences=4,
        max_context=1024,
        prefill_chunk=64,
        max_step_tokens=128,
        kv_groups=HYBRID,
        pools=PoolSizes(full_pages=16, window_pages=0, states=4),
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def request(name: str, prompt: Sequence[int] = (1, 2, 3), n: int = 4, **more: object) -> GenerationRequest:
    """A request with a seed of its own."""
    sampling = SamplingParams(seed=sum(name.encode()))
    return GenerationRequest(request_id=name, prompt=tuple(prompt), max_tokens=n, sampling=sampling, **more)  # type: ignore[arg-type]


class ToyEngine:
    """``now`` is the clock.  ``homes[s]`` names the daemon of stage s when stages share daemons."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        n_stages: int = 1,
        max_queue: int = 1000,
        homes: Sequence[int] = (),
        hold_s: float = 0.0,
        journal_pages: int = 0,
        max_losses: int = 4,
        policy: type[FairShare] = FairShare,
        blame: Callable[[Step], str] = lambda _: "the output stage",
        call_soon: Callable[[Callable[[], None]], object] = lambda call: call(),
    ):
        self.limits, self.homes = limits, homes or range(n_stages)
        self.rows, self.journal_pages = ToyRows(), journal_pages
        self.n_rebuilt = self.n_given_up = 0  # recoveries
        exact = limits.residency is not None and limits.residency.attends_host
        self.model = ToyModel(n_stages, limits.kv_groups, limits.window_tokens, attends_host=exact)
        self._alone: dict[str, list[int]] = {}
        self.late = False  # answers arrive some time after they are given
        self._mail: list[tuple[ToyDaemon, StepResult | PendingCancelled, memoryview]] = []
        self.now = 0.0
        self.failures: list[StageFailure] = []
        self.lost: list[StageFailure] = []  # why drafters were lost
        self.steps: list[PipelineResult] = []
        self.engine = Engine(
            limits,
            EngineSettings(
                max_queue=max_queue,
                hold_s=hold_s,
                max_losses=max_losses,
                rows=self.rows,
                journal_pages=journal_pages,
                clock=lambda: self.now,
                blame=blame,
                on_step=self.steps.append,
                on_pipeline_failed=self.failures.append,
                on_drafter_lost=self.lost.append,
                validate=True,
                mask_threads=False,
                call_soon=call_soon,
                policy=policy,
            ),
        )
        self.daemons: list[ToyDaemon] = []
        self.dead: dict[int, ToyStage] = {}  # stages of daemons that died
        self.links: list[ToyDaemon] = []
        self.drafter: ToyDrafter | None = None
        self.texts: dict[int, list[int]] = {}  # prompt and answer by seed, for the drafter

    @property
    def has_doorbells(self) -> bool:
        """Whether steps are posted."""
        return len(set(self.homes)) == self.model.n_stages

    def attach(self) -> None:
        """Fresh daemons, and a pipeline over them.  One that cannot be sent to has died."""
        self._make_daemons()
        self.engine.attach(self.links, has_doorbells=self.has_doorbells, on_dead_link=self._on_dead_link)

    def move(self, kept: FrozenState | None) -> None:
        """Leave the pipeline for one over other daemons; they have what was frozen, if given, and nothing else."""
        held = {stage: daemon.stages[stage] for stage, daemon in enumerate(self.links)}
        self.rows = ToyRows()
        self.engine.detach_frozen(LOST, self.rows, self.journal_pages)
        self._make_daemons()
        for stage, other in held.items() if kept is not None else ():
            self.links[stage].stages[stage].take_over(other, kept.units)  # type: ignore[union-attr]
        self.engine.attach(
            self.links,
            has_doorbells=self.has_doorbells,
            restored=kept is not None,
            on_dead_link=self._on_dead_link,
        )

    @property
    def pipeline(self) -> Pipeline | None:
        return self.engine.core.pipeline

    def _make_daemons(self) -> None:
        homes = self.homes if len(self.homes) == self.model.n_stages else range(self.model.n_stages)
        self.daemons, self.links = toy_daemons(self.model, self.limits.pools, self._told, homes, self.rows.regions)

    def attach_drafter(self, *, with_output: bool, wrong: int = 0) -> None:
        """A fresh drafter: in the output stage's daemon, or in one of its own."""
        regions = self.links[0].stages[0].regions
        self.drafter = ToyDrafter(
            self.model, self.limits.pools, regions, lambda sampling: self.texts[sampling.seed], wrong
        )
        if with_output:
            home = self.links[-1]
            home.drafter = self.drafter
        else:
            home = drafter_daemon(self.drafter, self._told)
            self.daemons.append(home)
        self.engine.attach_drafter(DraftStage(home, with_output))

    def lose_drafter(self) -> None:
        """The drafter's daemon dies, if it has one of its own; else it is detached and forgets its steps.  What it
        answered is lost on the way."""
        self._mail = [mail for mail in self._mail if mail[1].stage < self.model.n_stages]
        for home in [*self.daemons]:
            if home.drafter is None:
                continue
            if home.stages:
                made, home.drafter = home.drafter.made, None
                for _, message in home.inbox:
                    if isinstance(message, DraftStep):  # the first stage may wait for them: any will do
                        asked = {piece.sequence: () for piece in message.step.slices if piece.num_draft_tokens}
                        home.stages[self.model.n_stages - 1].tell_drafts(message.step.step_id, asked)
                steps = [(flags, message) for flags, message in home.inbox if isinstance(message, Step)]
                kept = [(flags, _without_drafter(step, made)) for flags, step in steps]
                home.inbox.clear()
                home.inbox.extend(kept)
            else:
                self.daemons.remove(home)
        self.engine.detach_drafter()

    def _on_dead_link(self, stage: int, _reason: str) -> None:
        if self.links[stage] in self.daemons:
            self.crash_stage(stage)

    def crash_stage(self, stage: int) -> bool:
        """The daemon that runs this stage alone dies."""
        return self.crash([daemon.stages.keys() for daemon in self.daemons if daemon.stages].index({stage}))

    def crash(self, index: int) -> bool:
        """A daemon with stages dies; return whether its stages can be rebuilt."""
        home = [daemon for daemon in self.daemons if daemon.stages][index]
        self.daemons.remove(home)  # what it answered is lost on the way
        self.dead |= home.stages
        if home.drafter is not None:
            home.drafter = None
            self.engine.detach_drafter()
        return self.engine.lose_stages(home.stages.keys(), LOST)

    def come_back(self, kept: FrozenState | None = None) -> None:
        """New daemons for all stages that are lost; they have what was frozen, if given, and nothing else."""
        assert self.pipeline is not None
        lost = [stage for stage in range(self.model.n_stages) if self.links[stage] not in self.daemons]
        for daemon in self.daemons:
            if daemon.stages.keys() & self.pipeline.lost:
                raise AssertionError("a daemon that was rebuilt in part must be reset")
        fresh, links = toy_daemons(self.model, self.limits.pools, self._told, self.homes, self.rows.regions)
        self.daemons += [one for one in fresh if one.stages.keys() & set(lost)]
        for stage in lost:
            self.links[stage] = links[stage]
            if kept is not None:
                links[stage].stages[stage].take_over(self.dead[stage], kept.units)
        self.engine.restore({stage: links[stage] for stage in lost}, self._ended, restored=kept is not None)

    def _ended(self, rebuilt: bool) -> None:
        self.n_rebuilt += rebuilt
        self.n_given_up += not rebuilt

    @property
    def _told(self) -> ToyLimits:
        limits, n_stages = self.limits, self.model.n_stages
        return ToyLimits(
            n_stages,
            limits.max_sequences,
            limits.max_step_tokens,
            limits.n_regions(n_stages),
            limits.max_context,
        )

    def lose(self) -> None:
        """A daemon dies: the engine is told, and its pipeline is gone."""
        self.engine.detach(LOST)
        self.daemons = []

    def run(self) -> None:
        """Let the daemons work until nothing is left to do."""
        n_turns = 0
        while self.work(n_turns if self.late else 0):
            n_turns += 1
            assert n_turns < 100_000, "the pipeline is still busy"

    def work(self, index: int) -> bool:
        """Let one busy daemon execute one step; False when all are idle."""
        told = {id(daemon): daemon for daemon, _, _ in self._mail}
        busy = [d for d in self.daemons if d.ready] + [d for d in told.values() if d in self.daemons]
        if not busy:
            return False
        in_flight = [] if self.pipeline is None else self.pipeline.in_flight
        assert len({e.step.step_id for e in in_flight if e.step.slices}) <= 2 * self.model.n_stages
        one, arrives = busy[index % len(busy)], index % len(busy) >= sum(d.ready for d in self.daemons)
        if not arrives:
            self._mail.append((one, *one.run_one()))
        if arrives or not self.late:
            at = next(i for i, (daemon, _, _) in enumerate(self._mail) if daemon is one)
            self.engine.receive(*self._mail.pop(at)[1:])
        return True

    async def play(self) -> None:
        """Let the daemons work until nothing is left to do; other tasks run between their steps."""
        for _ in range(100_000):
            if not self.work(0):
                return
            await asyncio.sleep(0)
        raise AssertionError("the pipeline is still busy after 100000 steps of stages")

    def alone(self, request: GenerationRequest) -> list[int]:
        """What the toy model generates for this request alone."""
        if request.request_id not in self._alone:
            n = min(request.max_tokens, self.limits.capacity_tokens - len(request.prompt))
            assert isinstance(request.constraint, ToyConstraint | None)
            self._alone[request.request_id] = self.model.alone(
                request.prompt, request.sampling, n, request.stop_ids, request.constraint
            )
        return self._alone[request.request_id]


def attached(limits: EngineLimits, **more: Any) -> ToyEngine:
    """An engine with its pipeline."""
    toy = ToyEngine(limits, **more)
    toy.attach()
    return toy


def _without_drafter(step: Step, made: Mapping[int, Sequence[int]]) -> Step:
    """A step that the draft stage does not take along; any drafts will do for what it verifies, if none were made."""
    slices = [piece.with_drafts(made.get(piece.sequence, ())) if piece.drafts_pend else piece for piece in step.slices]
    return structs.replace(step, upkeep=False, slices=slices)


async def events_of(handle: RequestHandle) -> list[Event]:
    """All events of a request that is over."""
    assert handle.finished is not None, f"{handle.request_id} is not over"
    return [event async for event in handle]


def told(events: Sequence[Event]) -> tuple[list[int], FinishedEvent]:
    """The tokens as the model drew them (the stop id included), and how it ended."""
    *tokens, finished = events
    assert isinstance(finished, FinishedEvent)
    ids = [event.token for event in tokens if isinstance(event, TokenEvent)]
    assert len(ids) == len(tokens)
    return ids + ([finished.stop_id] if finished.stop_id is not None else []), finished


async def check_answers(
    toy: ToyEngine, wanted: Sequence[GenerationRequest], handles: Mapping[str, RequestHandle]
) -> list[str]:
    """Nobody failed, no drafter was sent away, and all have their tokens, or the first of them if cancelled; how each
    ended."""
    assert (toy.failures, toy.lost) == ([], [])
    reasons = []
    for name, handle in handles.items():
        one = next(one for one in wanted if one.request_id == name)
        ids, finished = told(await events_of(handle))
        assert finished.error is None
        expected = toy.alone(one)
        assert ids == (expected[: len(ids)] if finished.reason == "cancelled" else expected)
        reasons.append(finished.reason)
    return reasons
