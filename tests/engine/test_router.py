"""The router alone: any health, any prefixes, any load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lucevisor.api.metrics import _Families, _routing
from lucevisor.engine.router import RUNNING_TOKENS, WAITING_TOKENS, Candidate, Health, Router

NAMES = ("a", "b", "c")
CANDIDATES = st.fixed_dictionaries(
    {
        name: st.builds(Candidate, st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 20), st.integers(1, 20))
        for name in NAMES
    }
)
HEALTH = st.fixed_dictionaries({name: st.sampled_from(Health) for name in NAMES})


def router_of(health: dict[str, Health], draining: set[str] = frozenset()) -> Router:  # type: ignore[assignment]
    router = Router(NAMES)
    router.health.update(health)
    router.draining.update(draining)
    return router


def serving() -> Router:
    return router_of(dict.fromkeys(NAMES, Health.SERVING))


@given(HEALTH, st.sets(st.sampled_from(NAMES)), CANDIDATES, st.integers(1, 5000))
def test_a_request_goes_to_the_best_kind_of_replica_that_there_is(health, draining, candidates, n_tokens):
    router = router_of(health, draining)
    order = router.order(n_tokens, candidates)
    able = {name for name in NAMES if health[name] is Health.SERVING and name not in draining}
    able = able or {name for name in NAMES if health[name] is Health.SERVING}
    able = able or {name for name in NAMES if health[name] is Health.HOLDING}
    assert set(order) == able
    assert len(order) == len(able)


@given(HEALTH, st.sets(st.sampled_from(NAMES)), st.sampled_from(NAMES))
def test_requests_move_only_from_replicas_that_do_not_take_any_to_replicas_that_do(health, draining, name):
    router = router_of(health, draining)
    sources, targets = router.sources(), router.targets()
    assert not {*sources} & {*targets}
    assert {*sources} == ({*NAMES} - {*targets} if targets else set())
    assert name not in router.targets(name)
    may = health[name] is not Health.SERVING or bool(router.targets(name))
    assert router.begin_drain(name) == may
    assert (name in router.draining) == (may or name in draining)
    router.end_drain(name)
    assert name not in router.draining


@given(CANDIDATES, st.integers(4000, 8000))
def test_a_conversation_stays_on_its_prefix_until_the_load_there_is_greater_by_double_of_it(candidates, n_tokens):
    best, *others = serving().order(n_tokens, candidates)
    for other in others:
        gain = candidates[best].n_cached - candidates[other].n_cached
        more = candidates[best].load - candidates[other].load
        assert more <= 2 * gain


@given(st.integers(0, 4000), st.lists(st.integers(0, 4000), min_size=3, max_size=3))
def test_replicas_with_equally_much_of_a_prompt_are_chosen_by_load(n_cached, due):
    candidates = {name: Candidate(n_cached, n) for name, n in zip(NAMES, due, strict=True)}
    assert due[NAMES.index(serving().order(5000, candidates)[0])] == min(due)


def test_equal_replicas_take_turns():
    router, chosen = serving(), []
    for _ in range(6):
        chosen.append(router.order(10, dict.fromkeys(NAMES, Candidate()))[0])
        router.on_routed(chosen[-1])
    assert chosen == [*NAMES, *NAMES]
    assert router.n_routed == dict.fromkeys(NAMES, 2)


@given(st.lists(st.integers(1, 2000), min_size=8, max_size=60))
def test_new_prompts_spread_by_their_tokens(sizes):
    """No replica has more than another by more than one request."""
    router, candidates = serving(), dict.fromkeys(NAMES, Candidate())
    for n_tokens in sizes:
        [name, *_] = router.order(n_tokens, candidates)
        router.on_routed(name)
        before = candidates[name]
        candidates[name] = Candidate(0, before.n_due + n_tokens, before.n_requests + 1)
    loads = [candidate.load for candidate in candidates.values()]
    assert max(loads) - min(loads) <= max(sizes) + RUNNING_TOKENS


def test_requests_that_would_wait_for_a_sequence_weigh_more():
    """A conversation of 1,000 tokens stays beside others that run, and leaves when some wait."""
    for n_requests, expected in ((8, "a"), (15, "a"), (11, "b")):
        slots = 8 if expected == "b" else 16
        candidates = {"a": Candidate(1000, 0, n_requests, slots), "b": Candidate(0, 0, 0, slots)}
        assert serving().order(1100, candidates)[0] == expected
    assert Candidate(0, 5, 10, 8).load == 5 + 10 * RUNNING_TOKENS + 3 * WAITING_TOKENS


def test_only_the_last_replica_that_serves_cannot_be_drained():
    router = serving()
    assert [router.begin_drain(name) for name in NAMES] == [True, True, False]
    router.health["c"] = Health.HOLDING
    assert router.begin_drain("c")  # it serves nobody


def test_the_gauge_of_serving_replicas_is_0_for_one_that_drains():
    router = serving()
    assert router.begin_drain("b")
    gauge = next(family for family in _routing(_Families(model="m"), router) if family.name.endswith("replica_serving"))
    assert {sample.labels["replica"]: sample.value for sample in gauge.samples} == {"a": 1.0, "b": 0.0, "c": 1.0}
