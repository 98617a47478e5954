"""The loop of one page and the engine: the same answers, whatever runs ahead, shares steps or is computed again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.engine.constraint import MadeMasks
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.plain_loop import PlainLoop
from lucevisor.engine.request import GenerationRequest
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Step, StepResult
from tests.engine.toy_engine import ALL_KV_GROUPS, HYBRID, ToyEngine, attached, events_of, limits, request, told
from tests.engine.toy_pipeline import ToyConstraint, ToyLimits, ToyModel, toy_daemons


def plain_loop(bounds: EngineLimits, n_stages: int = 1) -> PlainLoop:
    """The loop over a toy daemon for each stage, one after the other."""
    n_regions = bounds.n_regions(n_stages)
    announced = ToyLimits(n_stages, bounds.max_sequences, bounds.max_step_tokens, n_regions, bounds.max_context)
    model = ToyModel(n_stages, bounds.kv_groups, bounds.window_tokens)
    daemons, _ = toy_daemons(model, bounds.pools, announced, range(n_stages), {})

    def run_step(step: Step, masks: MadeMasks | None) -> StepResult:
        if masks is not None:
            daemons[-1].send(masks.message, payload=masks.payload)
        for stage, daemon in enumerate(daemons):
            daemon.send(encode(step, request_id=step.step_id, flags=stage))
            result, _ = daemon.run_one()
        assert isinstance(result, StepResult)
        return result

    return PlainLoop(bounds, run_step)


BOUNDS = st.builds(
    lambda n_sequences, n_pages, n_slots, window: limits(
        max_sequences=n_sequences,
        kv_groups=ALL_KV_GROUPS if window else HYBRID,
        window_tokens=70 if window else None,
        pools=PoolSizes(n_pages, 12 if window else 0, n_sequences + 3),
        prefix=PrefixSettings(max_slots=n_slots, memory_bytes=1 << 30, min_tokens=16),
    ),
    st.integers(1, 5),
    st.integers(6, 16),
    st.integers(0, 3),
    st.booleans(),
)


@st.composite
def asked(draw: st.DrawFn) -> list[GenerationRequest]:
    """Requests whose prompts begin alike, some with a constraint or a stop id."""
    found = []
    for i in range(draw(st.integers(1, 6))):
        n_common, n_own = draw(st.integers(0, 150)), draw(st.integers(1, 100))
        one = request(f"r{i}", [*range(n_common), *(7 * i + at for at in range(n_own))], n=draw(st.integers(1, 60)))
        stop_ids = frozenset(draw(st.sets(st.integers(0, 60), max_size=2)))
        found.append(replace(one, stop_ids=stop_ids, client_id=f"client {draw(st.integers(0, 1))}"))
    return found


def with_constraint(one: GenerationRequest) -> GenerationRequest:
    """Every third request, with a constraint of its own: it knows what it has allowed."""
    return replace(one, constraint=ToyConstraint(5)) if int(one.request_id[1:]) % 3 == 2 else one


@settings(max_examples=60)
@given(bounds=BOUNDS, requests=asked(), n_stages=st.integers(1, 3))
async def test_the_loop_and_the_engine_give_the_same_answers(
    bounds: EngineLimits, requests: list[GenerationRequest], n_stages: int
) -> None:
    plain = plain_loop(bounds, n_stages).run(map(with_constraint, requests))
    toy: ToyEngine = attached(bounds, n_stages=n_stages)
    handles = [toy.engine.submit(with_constraint(one)) for one in requests]
    toy.run()
    for one, handle in zip(requests, handles, strict=True):
        (ids, end), (expected, engine_end) = told(plain[one.request_id]), told(await events_of(handle))
        assert (ids, end.reason) == (expected, engine_end.reason)
