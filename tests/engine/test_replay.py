"""A step that starts at a later stage: a stage that lost its state is rebuilt from boundary rows that were kept."""

from __future__ import annotations

import pytest

from lucevisor.engine.pipeline import Pipeline, PipelineFailure, PipelineResult
from lucevisor.engine.request import TokenEvent
from lucevisor.engine.scheduler import Scheduler
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Step
from tests.engine.toy_engine import HYBRID, limits, request
from tests.engine.toy_pipeline import ToyLimits, ToyModel, ToyStage, run_all, toy_daemons


def failed(failure: PipelineFailure) -> None:
    raise AssertionError(failure.message)


@pytest.mark.parametrize("lost", [1, 2])
def test_stages_from_one_on_are_rebuilt_by_replaying_their_input(lost: int) -> None:
    bounds = limits(spaces=HYBRID, pools=PoolSizes(16, 0, 4))
    model = ToyModel(3, bounds.spaces, None)
    told = ToyLimits(3, bounds.max_sequences, bounds.max_step_tokens)
    daemons, links = toy_daemons(model, bounds.pools, told)
    scheduler = Scheduler(bounds, n_stages=3)
    journal: list[tuple[Step, list[int]]] = []
    answers: dict[int, list[int]] = {}
    tokens: list[int] = []

    def took(result: PipelineResult) -> None:
        step_id, drawn = result.step.step_id, [sampled.token for sampled in result.results[-1].sampled]
        if step_id in answers:  # a replay
            assert drawn == answers[step_id]
            assert [answer.stage for answer in result.results] == list(range(lost, 3))
            return
        answers[step_id] = drawn
        for _, event in scheduler.apply(result.results[-1], 0.0):
            if isinstance(event, TokenEvent):
                tokens.append(event.token)

    pipeline = Pipeline(links, took, failed)

    def run(n_steps: int) -> None:
        for _ in range(n_steps):  # one after the other: a region holds the rows of one step
            plan = scheduler.next_plan(0.0)
            if plan is None:
                return
            pipeline.submit(plan.step)
            run_all(daemons, pipeline.receive)
            rows = daemons[0].stages[0].regions[lost - 1, plan.step.region][1]
            journal.append((plan.step, rows))

    one = request("a", range(150), n=30)
    scheduler.submit(one, 0.0)
    run(12)
    regions = daemons[0].stages[0].regions
    for stage in range(lost, 3):
        daemons[stage].stages[stage] = ToyStage(model, stage, bounds.pools, regions)
    for step, rows in journal:
        regions[lost - 1, step.region] = step.step_id, rows
        pipeline.submit(step, first_stage=lost)
        run_all(daemons, pipeline.receive)
    run(100)
    assert tokens == model.alone(one.prompt, one.sampling, 30, frozenset())
    assert scheduler.idle
