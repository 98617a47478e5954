"""Speculation on simulated machines: close to the best fixed width, never far below plain decoding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from lucevisor.engine import drafting
from lucevisor.engine.request import FinishedEvent, TokenEvent
from lucevisor.engine.spec_decode.controller import TRIAL_ROUNDS, RequestDrafts, SpecDecodeController
from lucevisor.engine.spec_decode.ngram import MAX_MATCH, NgramLookup, NgramMatch
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.engine.step import ScheduledSequence
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import DraftKind, PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import Drafted, Sampled
from tests.combinations import combinations
from tests.engine.toy_engine import HYBRID, ToyEngine, attached, events_of, limits, request, told


@dataclass(frozen=True)
class Machine:
    """``verify_s(rows, slices)``, ``draft_s(n)``: seconds of a step, and of ``n`` drafts of each slice.

    ``jitter``: measured times vary by up to this share.  ``first_s``: what the first two steps of a shape take more, to
    compile and capture.  ``apart``: drafts are made beside the stage.  ``wait_s``: between a step that asks for drafts
    and the next one, beside them; plain steps run ahead.
    """

    verify_s: Callable[[int, int], float]
    draft_s: Callable[[int], float]
    jitter: float = 0.0
    first_s: float = 0.0
    apart: bool = False
    wait_s: float = 0.0


def cpu_demo(jitter: float = 0.0) -> Machine:
    """A small model on a cpu: a plain step 16 ms, one of 8 rows 1.4 x, drafts 4 ms."""
    return Machine(lambda rows, slices: 0.016 * (1 + 0.4 / 7 * (rows - 1)), lambda n: 0.004, jitter)


def h200_dflash(jitter: float = 0.0) -> Machine:
    """27B on an H200: 8 rows 1.15 x, more than 32 rows other kernels, a block of drafts 0.13 x."""

    def verify(rows: int, slices: int) -> float:
        return 0.014 * (1 + 0.15 / 7 * (rows - 1) + (0.03 * (rows - 32) if rows > 32 else 0.0) + 0.005 * slices)

    return Machine(verify, lambda n: 0.0019, jitter, first_s=0.04, wait_s=0.001)


def h200_mtp(jitter: float = 0.0) -> Machine:
    """The same with an MTP head: each draft reads a block and the output matrix."""
    return Machine(h200_dflash().verify_s, lambda n: 0.0009 * n + 0.0002, jitter, first_s=0.04, wait_s=0.001)


@dataclass
class Run:
    """Tokens and seconds of a simulated decode; ``plain_s``: of the same tokens without drafts."""

    n_tokens: int = 0
    seconds: float = 0.0
    plain_s: float = 0.0
    widths: list[int] = field(default_factory=list)  # drafts of a slice, by step

    @property
    def rate(self) -> float:
        return self.n_tokens / self.seconds


class Simulation:
    """Requests that decode for ever over one stage; ``chances[i]``: of a draft at position i of any request, given that
    all before it were accepted.
    """

    def __init__(
        self, machine: Machine, chances: Sequence[float], n: int, controller: SpecDecodeController, seed: int = 0
    ) -> None:
        self.machine, self.chances, self.controller, self.rng = machine, chances, controller, random.Random(seed)
        controller.apart = machine.apart
        self.requests: list[RequestDrafts] = []
        self._drafts: dict[int, list[bool]] = {}
        self._ready_at: list[float] = []
        self._done: dict[frozenset[int], tuple[float, int, int, bool]] = {}  # result, asked, verified, cold
        self._seen: dict[object, int] = {}
        self._now = self._drafter_free_at = 0.0
        self.join(n)

    def join(self, n: int) -> None:
        """So many requests more decode."""
        for _ in range(n):
            self.requests.append(RequestDrafts())
            self._ready_at.append(self._now)

    def decode(self, n_tokens: int) -> Run:
        """Until every request has on average so many tokens more."""
        run, began_at = Run(), self._now
        while run.n_tokens < n_tokens * len(self.requests):
            self._step(run)
        run.seconds = self._now - began_at
        return run

    def _step(self, run: Run) -> None:
        m, controller = len(self.requests), self.controller
        n_groups = controller.choose_groups(1)
        chosen = sorted(sorted(range(m), key=self._ready_at.__getitem__)[: -(-m // n_groups)])
        n = len(chosen)
        requests = [self.requests[i] for i in chosen]
        right = [self._drafts.pop(i, []) for i in chosen]
        offers = [
            (r, controller.candidates(r, Drafted(0, [1] * len(own)), m)) for r, own in zip(requests, right, strict=True)
        ]
        width = controller.num_verify_tokens(offers, m) if any(right) else 0
        asked, *_ = [controller.num_draft_tokens(r, m) for r in requests]
        step_s, cold = self._timed(self.machine.verify_s(n * (1 + width), n), ("verify", n, width))
        batch = frozenset(chosen)
        before = self._done.pop(batch, None)
        wait_s = self.machine.wait_s if before is not None and before[1] else 0.0
        self._now = max(self._now, *(self._ready_at[i] for i in chosen)) + wait_s + step_s
        controller.record_step()
        self._done = {other: done for other, done in self._done.items() if other.isdisjoint(batch)}
        if before is not None and before[1] == width and (width or not before[2]):
            jitter = 1 + self.machine.jitter * self.rng.uniform(-1, 1)
            seconds = (self._now - before[0]) * jitter
            controller.record_round(width, seconds, asked=width > 0, cold=cold or before[3])
        for i, own in zip(chosen, right, strict=True):
            n_accepted = [*own[:width], False].index(False)
            if width:
                controller.record_verdict(self.requests[i], width, n_accepted)
            run.n_tokens += 1 + n_accepted
            run.plain_s += (1 + n_accepted) / m * self.machine.verify_s(m, m)
        run.widths.append(width)
        cold = self._draft(chosen, asked)
        self._done[batch] = self._result_at, asked, width, cold

    def _draft(self, chosen: Sequence[int], asked: int) -> bool:
        self._result_at = self._now
        if not asked:
            for i in chosen:
                self._ready_at[i] = self._now
            return False
        seconds, cold = self._timed(self.machine.draft_s(asked), ("draft", len(chosen), asked), 0.25)
        if self.machine.apart:
            self._drafter_free_at = ready_at = max(self._now, self._drafter_free_at) + seconds
        else:
            self._now = ready_at = self._now + seconds
        for i in chosen:
            self._ready_at[i] = ready_at
            chances = [self.chances[min(at, len(self.chances) - 1)] for at in range(asked)]
            self._drafts[i] = [self.rng.random() < chance for chance in chances]
        return cold

    def _timed(self, seconds: float, shape: tuple[object, ...], share: float = 1.0) -> tuple[float, bool]:
        """Return what a step takes, and whether it was cold; plain decoding was warmed up at load."""
        self._seen[shape] = self._seen.get(shape, 0) + 1
        cold = self._seen[shape] <= 2 and self.machine.first_s > 0 and shape[2] != 0
        return seconds + cold * share * self.machine.first_s, cold


def fixed_rate(machine: Machine, chances: Sequence[float], n: int, width: int) -> float:
    """Tokens a second with always ``width`` drafts, on average and without first steps; 0: plain decoding."""
    tokens, product = 1.0, 1.0
    for at in range(width):
        product *= chances[min(at, len(chances) - 1)]
        tokens += product
    drafts_s = machine.draft_s(width) + machine.wait_s if width else 0.0
    alone = n * tokens / (machine.verify_s(n * (1 + width), n) + drafts_s)
    if not machine.apart or n == 1 or not width:
        return alone
    half = -(-n // 2)
    step_s = machine.verify_s(half * (1 + width), half)
    return max(alone, n * tokens / max(step_s + drafts_s, 2 * step_s, 2 * drafts_s))


MAX = 7
MACHINES = {
    "cpu": (cpu_demo, DraftKind.DFLASH),
    "dflash": (h200_dflash, DraftKind.DFLASH),
    "mtp": (h200_mtp, DraftKind.MTP),
}
CODE = [0.92, 0.91, 0.77, 0.83, 0.83, 0.78, 0.75]
"""Chances by position: those published for an MTP head of a 27B model."""
GOOD = [0.85, 0.8, 0.8, 0.75, 0.75, 0.7, 0.7]
PROSE = [0.5, 0.45, 0.4, 0.4]
TEXTS = {"code": CODE, "prose": PROSE}
BAD = [0.0]


def simulate(name: str, chances: Sequence[float], n: int = 1, jitter: float = 0.1, seed: int = 0) -> Simulation:
    machine, kind = MACHINES[name]
    return Simulation(machine(jitter), chances, n, SpecDecodeController(MAX, kind), seed)


def warm(simulation: Simulation) -> Simulation:
    """The same without what compiling and capturing take, which is paid once."""
    simulation.machine = replace(simulation.machine, first_s=0.0)
    return simulation


def best_rate(simulation: Simulation) -> float:
    """Tokens a second of the best fixed width, plain decoding included."""
    machine, n = simulation.machine, len(simulation.requests)
    return max(fixed_rate(machine, simulation.chances, n, width) for width in range(MAX + 1))


@combinations(name=MACHINES, text=TEXTS, n=[1, 4, 16])
def test_within_five_percent_of_the_best_fixed_width(name: str, text: str, n: int) -> None:
    """The mean of four runs, as acceptance alone makes one vary by a percent."""
    shares = []
    for seed in range(4):
        simulation = simulate(name, TEXTS[text], n, 0.2, seed)
        simulation.decode(1000)
        shares.append(warm(simulation).decode(1500 if n == 1 else 400).rate / best_rate(simulation))
    assert sum(shares) / len(shares) > 0.95


@combinations(name=MACHINES, n=[1, 4, 16])
def test_a_useless_drafter_costs_two_percent_at_most(name: str, n: int) -> None:
    simulation = warm(simulate(name, BAD, n))
    first = simulation.decode(200)
    assert first.seconds < 1.12 * first.plain_s, "it is found out within a few steps"
    run = simulation.decode(2000)
    assert run.seconds < 1.02 * run.plain_s


@pytest.mark.parametrize("name", MACHINES)
def test_drafting_turns_itself_off_and_on_again(name: str) -> None:
    simulation = simulate(name, GOOD)
    simulation.decode(1000)
    simulation.chances = BAD
    simulation.decode(100)
    run = simulation.decode(900)
    assert run.widths.count(0) > 0.9 * len(run.widths)
    simulation.chances = GOOD
    simulation.decode(600)
    assert simulation.decode(1000).rate > 0.92 * best_rate(simulation)  # one run: acceptance varies by 2 %


@combinations(row_share=[0.015, 0.5], draft_s=[0.006, 0.012], n=[1, 4])
def test_a_drafter_beside_the_stages_works_while_they_do_where_that_pays(
    n: int, draft_s: float, row_share: float
) -> None:
    """Where steps of half the sequences are no cheaper, micro-batches gain nothing; where they are, drafting hides."""
    shares = []
    for seed in range(3):
        machine = Machine(lambda rows, _: 0.01 * (1 + row_share * (rows - 1)), lambda _: draft_s, 0.05, apart=True)
        simulation = Simulation(machine, CODE, n, SpecDecodeController(MAX, DraftKind.DFLASH), seed)
        simulation.decode(600)
        shares.append(simulation.decode(2000 // n).rate / best_rate(simulation))
    assert sum(shares) / len(shares) > 0.9


# ---- single decisions


def measured(controller: SpecDecodeController) -> SpecDecodeController:
    """A controller that was told that more rows cost nothing, and drafts a twentieth; none was verified yet."""
    for width in range(MAX + 1):
        for _ in range(4):
            controller.record_round(width, 0.01 if not width else 0.0105, asked=width > 0)
    return controller


def test_a_fixed_width_is_kept() -> None:
    controller, drafts, other = SpecDecodeController(3, fixed=True), RequestDrafts(), RequestDrafts()
    assert controller.num_draft_tokens(drafts, 2) == 3
    for _ in range(50):
        controller.record_round(0, 0.01, asked=False)
        controller.record_round(3, 1.0, asked=True)
        controller.record_verdict(drafts, 3, 0)
    assert controller.num_draft_tokens(drafts, 2) == 3
    assert controller.num_verify_tokens([(drafts, Drafted(0, [5, 6, 7])), (other, Drafted(1, []))], 2) == 3


COPIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6)


def looked_up(tokens: Sequence[int] = COPIED) -> RequestDrafts:
    lookup = NgramLookup(TokenBuffer.of(tokens))
    lookup.index()
    return RequestDrafts(lookup=lookup)


def test_the_source_from_which_more_drafts_are_expected_is_used() -> None:
    controller, drafts = SpecDecodeController(3), looked_up()
    assert controller.candidates(drafts, Drafted(0, [50]), 1).tokens == [7, 8, 9]  # three are more than one
    for _ in range(30):
        controller.candidates(drafts, Drafted(0, []), 1)
        controller.record_verdict(drafts, 3, 0)
    drafted = Drafted(0, [50, 51, 52])
    assert controller.candidates(drafts, drafted, 1) is drafted


def test_a_copied_passage_asks_the_drafter_for_nothing() -> None:
    controller, tokens = measured(SpecDecodeController(MAX)), TokenBuffer(COPIED)
    drafts = looked_up(tokens)
    controller.candidates(drafts, Drafted(0, []), 1)
    controller.record_verdict(drafts, 3, 3)
    assert controller.num_draft_tokens(drafts, 1) == 0
    tokens.append(99)  # where the passage ends
    assert drafts.lookup is not None
    drafts.lookup.index()
    controller.candidates(drafts, Drafted(0, []), 1)
    assert controller.num_draft_tokens(drafts, 1) > 0


def test_a_sequence_that_copies_alone_looks_up_more_than_the_drafter_drafts() -> None:
    controller, drafts = SpecDecodeController(3, max_lookup=15), looked_up()
    lengths = []
    for n_accepted in (3, 3, 15, 14, 3, 3):
        n = len(controller.candidates(drafts, Drafted(0, []), 1).tokens)
        assert len(controller.candidates(drafts, Drafted(0, []), 2).tokens) == 3, "two take turns with their drafts"
        lengths.append(n)
        controller.record_verdict(drafts, n, n_accepted)
    assert lengths == [3, 3, 15, 15, 3, 3]
    assert len(controller.candidates(drafts, Drafted(0, []), 1).tokens) == 15


def test_the_longest_lookup_is_tried_and_stays_where_it_is_the_fastest() -> None:
    for row_s, wanted in ((0.0001, 15), (0.0015, 3), (0.02, 0)):
        controller, drafts = SpecDecodeController(3, max_lookup=15), looked_up()
        for width in range(4):
            controller.record_round(width, 0.01 + row_s * width**1.5, asked=False)
        for _ in range(2):
            controller.candidates(drafts, Drafted(0, []), 1)
            controller.record_verdict(drafts, 3, 3)
        offer = controller.candidates(drafts, Drafted(0, []), 1)
        for _ in range(TRIAL_ROUNDS):
            assert controller.num_verify_tokens([(drafts, offer)], 1) == 15
            controller.record_round(15, 0.01 + row_s * 15**1.5, asked=False)
        assert controller.num_verify_tokens([(drafts, offer)], 1) == wanted


# ---- counts of speculation


def test_acceptance_is_counted_by_position() -> None:
    counts = DraftStatistics()
    for n_drafts, n_accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        counts.decoded(n_drafts, n_accepted, looked_up=False)
    assert (counts.n_plain, counts.n_verify) == (1, 3)
    assert (counts.verified, counts.accepted) == ([3, 3, 2], [2, 1, 1])
    assert counts.acceptance_by_position == [2 / 3, 1 / 3, 1 / 2]
    assert counts.acceptance_length == pytest.approx(1 + 4 / 3)
    assert counts.tokens_per_step == pytest.approx(1 + 4 / 4)


# ---- of an engine


def widths_of(toy: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafts that each decode verifies from now on."""
    widths, on_tokens = list[int](), toy.engine.core.scheduler.drafting.on_tokens

    def counted(part: ScheduledSequence, drawn: Sequence[Sampled]) -> None:
        widths.append(part.slice.n_drafts)
        on_tokens(part, drawn)

    monkeypatch.setattr(toy.engine.core.scheduler.drafting, "on_tokens", counted)
    return widths


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("kv_groups", [frozenset({KvGroup.FULL}), HYBRID])
def test_a_copy_is_verified_in_long_slices_with_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, kv_groups: frozenset[KvGroup], *, drafter: bool
) -> None:
    """Twice: where the copy leaves its source, slices are short again until two are whole."""
    settings = SpeculationSettings(max_drafts=3, max_lookup=15, drafter=drafter, lookup=True)
    pools = PoolSizes(16, 0, 4 if kv_groups == HYBRID else 0, draft_states=15 if kv_groups == HYBRID else 0)
    toy = attached(limits(speculation=settings, pools=pools, kv_groups=kv_groups))
    one = request("copy", list(range(40)), n=120)
    text = toy.texts[one.sampling.seed] = [*one.prompt, *toy.alone(one)]
    source = [*text]
    source[100] = text[100] + 1  # what differs

    class Copied(NgramLookup):
        def match(self) -> NgramMatch | None:
            return NgramMatch(len(self._tokens), MAX_MATCH)

        def continuation(self, match: NgramMatch, n: int) -> list[int]:
            return source[match.start : match.start + n]

    monkeypatch.setattr(drafting, "NgramLookup", Copied)
    if drafter:
        toy.attach_drafter(with_output=True)
    widths = widths_of(toy, monkeypatch)
    handle = toy.engine.submit(one)
    toy.run()
    assert told(asyncio.run(events_of(handle)))[0] == toy.alone(one)
    whole = [width for width in widths if width]
    again = whole.index(3, 3)
    assert whole[:3] == [3, 3, 15], "after two whole ones"
    assert whole[again - 1] == 15, "the one that went wrong"
    assert whole[again : again + 3] == [3, 3, 15]
    drafts = toy.engine.statistics().drafts
    assert sum(whole) == drafts.n_verified


@pytest.mark.parametrize("with_output", [True, False])
def test_counts_agree_with_the_tokens_of_fresh_and_restored_requests(*, with_output: bool) -> None:
    settings = SpeculationSettings(max_drafts=4, drafter=True, fixed=True)
    cached = PrefixSettings(max_slots=4, memory_bytes=1 << 30, min_tokens=1)
    toy = attached(limits(speculation=settings, prefix=cached, pools=PoolSizes(16, 0, 8, draft_states=12)))
    toy.attach_drafter(with_output=with_output, wrong=3)
    prompt, n_before = list(range(40)), 0
    for name in ("first", "again"):
        one = request(name, prompt, n=30)
        answer = toy.alone(one)
        toy.texts[one.sampling.seed] = [*prompt, *answer]
        handle = toy.engine.submit(one)
        toy.run()
        *tokens, finished = asyncio.run(events_of(handle))
        assert isinstance(finished, FinishedEvent)
        usage, counts = finished.usage, toy.engine.statistics().drafts
        assert (usage.cached_tokens > 0) == (name == "again")
        assert 0 < usage.accepted_tokens < usage.draft_tokens
        assert usage.accepted_tokens == sum(isinstance(token, TokenEvent) and token.drafted for token in tokens)
        # The prompt yields one token, every decode one and its accepted drafts.
        n_decoded = counts.n_plain + counts.n_verify + counts.n_accepted
        assert usage.generated_tokens == 1 + n_decoded - n_before
        prompt, n_before = [*prompt, *answer], n_decoded
    drafts = toy.engine.statistics().drafts
    assert drafts.n_verified <= drafts.n_drafted
    answered = toy.steps  # 0.25 s each for the stage, and for the draft stage
    assert 0 < drafts.verify_s < 0.25 * len(answered)
    assert drafts.draft_s + drafts.upkeep_s == pytest.approx(0.25 * len(answered))
    assert drafts.draft_s > 0
