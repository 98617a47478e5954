"""Slots of conversations that rest while a stage is lost: it alone computes its part again when a prompt asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine.handle import RequestHandle
from lucevisor.engine.limits import SpeculationSettings
from lucevisor.engine.request import GenerationRequest
from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import ALL_SPACES, HYBRID, ToyEngine, check_answers, events_of, limits, request, told
from tests.engine.toy_pipeline import VOCABULARY

FULL = frozenset({Space.FULL})
SLIDING = frozenset({Space.FULL, Space.WINDOW})
SPACES = [HYBRID, FULL, ALL_SPACES, SLIDING]
CACHED = PrefixSettings(max_slots=16, memory_bytes=1 << 30, min_tokens=1)


def ready(
    spaces: frozenset[Space], n_stages: int = 3, *, n_host: int = 0, pages: int = 400, **more: object
) -> ToyEngine:
    pools = PoolSizes(
        40,
        40 * (Space.WINDOW in spaces),
        16 * (Space.RECURRENT in spaces),
        host_states=n_host * (Space.RECURRENT in spaces),
    )
    window = 70 if Space.WINDOW in spaces else None
    bounds = limits(**{"spaces": spaces, "prefix": CACHED, "window_tokens": window, "pools": pools} | more)
    toy = ToyEngine(bounds, n_stages=n_stages, hold_s=60.0, journal_pages=pages, max_losses=1000)
    toy.attach()
    return toy


def come_back(toy: ToyEngine) -> None:
    """The lost stages are there again; a pipeline that cannot be rebuilt is attached anew."""
    toy.come_back()
    for _ in range(1000):
        if toy.engine.ready or not toy.work(0):
            break
    if not toy.engine.ready:
        toy.attach()


def answer(toy: ToyEngine, one: GenerationRequest) -> tuple[list[int], int]:
    """The tokens of a request that runs alone, and how many of its prompt were cached."""
    handle = toy.engine.submit(one)
    toy.run()
    tokens, finished = told(asyncio.run(events_of(handle)))
    assert tokens == toy.alone(one)
    return tokens, finished.usage.cached_tokens


@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (1, 2), (2, 0)])
@pytest.mark.parametrize("n_host", [0, 8])
def test_a_conversation_that_rested_goes_on_and_only_lost_stages_compute_it_again(
    spaces: frozenset[Space], lost: tuple[int, ...], n_host: int
) -> None:
    toy = ready(spaces, n_host=n_host)
    text = list(range(190))
    first, _ = answer(toy, request("one", text, n=9, turn_boundaries=(70,)))
    text += [*first, 7, 8]
    for stage in lost:
        index = next(i for i, daemon in enumerate(toy.daemons) if stage in daemon.stages)
        assert toy.crash(index)
        come_back(toy)
    assert (toy.n_rebuilt, toy.n_given_up) == (len(lost), 0)
    n_computed = [0, 0, 0]
    for stage, daemon in enumerate(toy.links):
        run = daemon.stages[stage].run

        def counted(step, *rest, run=run, stage=stage):  # type: ignore[no-untyped-def]
            n_computed[stage] += sum(len(piece.tokens) for piece in step.slices)
            return run(step, *rest)

        daemon.stages[stage].run = counted  # type: ignore[method-assign]
    second, n_cached = answer(toy, request("two", text, n=5))
    assert n_cached >= 198
    n_own = len(text) - n_cached + 4
    assert [n >= 198 for n in n_computed] == [stage in lost for stage in range(3)]
    assert all(n_own <= n <= n_own + 1 for stage, n in enumerate(n_computed) if stage not in lost)
    assert toy.engine.statistics().recovery.n_rebuilt >= 198 * len(lost)
    if Space.WINDOW not in spaces:  # what the refill has passed is whole, too
        _, n_cached = answer(toy, request("three", [*range(70), 5, 6], n=5))
        assert n_cached >= 64
    _, n_cached = answer(toy, request("four", [*text, *second, 9], n=5))
    assert n_cached >= 200


@pytest.mark.parametrize("spaces", [HYBRID, FULL])
def test_without_rows_all_stages_compute_and_the_slot_is_whole_again(spaces: frozenset[Space]) -> None:
    toy = ready(spaces, n_stages=2)
    answer(toy, request("one", range(190), n=9))
    assert toy.crash(1)
    come_back(toy)
    journal = toy.engine._stages._journal
    assert journal is not None
    journal.forget()
    text = [*range(190), 3, 4]
    assert answer(toy, request("two", text, n=9))[1] == 0
    assert answer(toy, request("three", [*text, 5], n=9))[1] >= 128


@pytest.mark.parametrize("spaces", [HYBRID, FULL])
@pytest.mark.parametrize("policy", ["exact", "lru", "qk"])
def test_what_was_in_host_memory(spaces: frozenset[Space], policy: ResidencyPolicy) -> None:
    """Refilled if the slot's pages are on the devices and its queries saw all that was before them."""
    kept = policy != "lru"
    pools = PoolSizes(40, 0, 16 * (Space.RECURRENT in spaces), host_pages=40 * kept)
    toy = ready(spaces, 2, max_context=900, residency=Residency(8, policy), pools=pools)
    short, long = list(range(200)), list(range(500, 1150))
    short += answer(toy, request("short", short, n=9))[0]

    def ask(name: str, text: list[int]) -> tuple[list[int], int]:
        if policy == "exact":
            return answer(toy, request(name, text, n=9))
        handle = toy.engine.submit(request(name, text, n=9))
        toy.run()
        tokens, finished = told(asyncio.run(events_of(handle)))
        return tokens, finished.usage.cached_tokens

    long += ask("long", long)[0]
    assert toy.crash(1)
    come_back(toy)
    assert toy.n_rebuilt == 1
    assert answer(toy, request("again", [*short, 3], n=9))[1] >= 208
    n_cached = ask("later", [*long, 3])[1]
    on_devices = spaces == HYBRID  # those of a checkpoint from before they left
    assert (n_cached > 640) == (policy == "exact" and on_devices)
    if kept:
        assert ask("last", [*long, 3, 4])[1] > 640


@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.slow), 6])
def test_a_loss_during_a_refill(spaces: frozenset[Space], every: int) -> None:
    """At every moment, or one in three, of every stage; streams run meanwhile."""
    n_refilled = 0
    for lost in range(3):
        for n_steps in range(1 + (2 * lost) % every, 40, every):
            toy = ready(spaces)
            first, _ = answer(toy, request("one", range(190), n=9, turn_boundaries=(70,)))
            assert toy.crash(1)
            come_back(toy)
            stream = request("stream", range(300, 340), n=60)
            asked = [
                stream,
                *(request(name, [*range(190), *first, *range(n)], n=12) for name, n in (("two", 8), ("x", 3))),
            ]
            handles = {"stream": toy.engine.submit(stream)}
            for _ in range(6):
                toy.work(0)
            handles |= {one.request_id: toy.engine.submit(one) for one in asked[1:]}
            for i in range(n_steps):
                toy.work(i)
            n_refilled += toy.engine._scheduler.refills.n_tokens
            assert toy.crash(lost)
            come_back(toy)
            toy.run()
            assert asyncio.run(check_answers(toy, asked, handles)) == ["length"] * 3
    assert n_refilled


class Conversations:
    """Conversations that go on or rest, requests that end early, and daemons that die at any moment."""

    def __init__(self, toy: ToyEngine) -> None:
        self.toy = toy
        self.asked: list[GenerationRequest] = []
        self.handles: dict[str, RequestHandle] = {}
        self.texts: list[list[int]] = []
        self.running: dict[int, str] = {}  # conversations that wait for an answer

    def ask(self, index: int, n_new: int, n: int) -> None:
        """A new conversation, perhaps on a common beginning, or the next turn of one."""
        if index >= len(self.texts):
            self.texts.append([*range(100 * (index % 2), 100 * (index % 2) + 90), 400 + len(self.texts)])
            index = len(self.texts) - 1
        if (handle := self.handles.get(self.running.get(index, ""))) is not None:
            if handle.finished is None:
                return
            self.texts[index] += self.told(handle)
        text = self.texts[index]
        text += [(7 * len(text) + i) % 500 for i in range(n_new)]
        if len(text) + n > 420:
            return
        one = request(f"r{len(self.asked)}", text, n=n, turn_boundaries=(90,) if index % 3 else ())
        self.asked.append(one)
        self.running[index] = one.request_id
        answer = self.toy.model.alone(one.prompt, one.sampling, one.max_tokens, frozenset())
        self.toy.texts[one.sampling.seed] = [*one.prompt, *answer]
        self.handles[one.request_id] = self.toy.engine.submit(one)

    def told(self, handle: RequestHandle) -> list[int]:
        """The tokens of a request that is over, which are the right ones."""
        tokens, finished = told(asyncio.run(events_of(handle)))
        one = next(one for one in self.asked if one.request_id == handle.request_id)
        assert finished.error is None
        assert tokens == self.toy.alone(one)[: len(tokens) if finished.reason == "cancelled" else None]
        del self.handles[handle.request_id]
        return tokens

    def cancel(self, index: int) -> None:
        waiting = [handle for handle in self.handles.values() if handle.finished is None]
        if waiting:
            waiting[index % len(waiting)].cancel()

    def work(self, n: int) -> None:
        for i in range(n):
            self.toy.work(i * n)

    def lose(self, index: int, *, late: bool) -> None:
        toy = self.toy
        with_stages = [daemon for daemon in toy.daemons if daemon.stages]
        if not toy.crash(index % len(with_stages)):
            toy.attach()
            return
        if late:
            self.work(index)
        come_back(toy)


actions = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 5), st.integers(1, 80), st.integers(1, 30)),
    st.tuples(st.just("ask"), st.integers(0, 5), st.integers(1, 80), st.integers(1, 30)),
    st.tuples(st.just("work"), st.integers(1, 40)),
    st.tuples(st.just("rest")),
    st.tuples(st.just("lose"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("drafter"), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(SPACES),
    st.sampled_from([2, 3]),
    st.sampled_from([0, 8]),
    st.sampled_from([400, 400, 12]),
    st.sampled_from([12, 40]),
    st.lists(actions, min_size=8, max_size=30),
)
def test_conversations_over_losses_have_the_same_tokens(
    data: st.DataObject,
    spaces: frozenset[Space],
    n_stages: int,
    n_host: int,
    pages: int,
    n_full: int,
    played: list[tuple[object, ...]],
) -> None:
    recurrent = Space.RECURRENT in spaces
    toy = ready(
        spaces,
        n_stages,
        pages=pages,
        pools=PoolSizes(n_full, 16 * (Space.WINDOW in spaces), 12 * recurrent, host_states=n_host * recurrent),
        max_context=700,
        max_step_tokens=200,
        prefill_chunk=data.draw(st.sampled_from([40, 64])),
        speculation=SpeculationSettings(max_drafts=3, drafter=True, n_vocabulary=VOCABULARY),
        prefix=replace(CACHED, checkpoint_pages=data.draw(st.sampled_from([1, 4]))),
        window_tokens=data.draw(st.sampled_from([12, 70])) if Space.WINDOW in spaces else None,
    )
    play = Conversations(toy)
    for kind, *values in [*played, ("rest",), ("lose", 1, False), *(("ask", i, 3, 5) for i in range(6))]:
        match kind:
            case "rest":
                toy.run()
            case "drafter" if not toy.engine._scheduler.drafting.attached:
                toy.attach_drafter(with_output=bool(values[0]), wrong=3)
            case "drafter":
                toy.lose_drafter()
            case "lose":
                play.lose(values[0], late=values[1])  # type: ignore[arg-type]
            case _:
                getattr(play, str(kind))(*values)
    toy.run()
    event(f"refilled: {toy.engine._scheduler.refills.n_tokens > 0}")
    for handle in [*play.handles.values()]:
        play.told(handle)
    statistics = toy.engine.statistics()
    assert all(use.used == use.evictable for use in statistics.pages.values())
