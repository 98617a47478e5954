"""Speculative decoding: how many tokens to draft and how many drafts to verify, by what was accepted and what it cost.

Pure: verdicts and measured times in, widths out; no clock.  It maximises expected tokens a second of all sequences that
share a step.  docs/speculation.md has the rules and what they were measured to do.

Invariants: it never asks for more than ``max_drafts``; what drafting costs more than it saves stays within a budget
(``Allowance``), whatever drafter and machine do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from lucevisor.engine.drafting.acceptance import FADED_WEIGHT, AcceptanceModel, DraftLengths, expected_tokens
from lucevisor.engine.drafting.budget import UPKEEP_SHARE, Allowance
from lucevisor.engine.drafting.choices import CHOICE_STEPS, WidthChoice, WidthChoices
from lucevisor.engine.drafting.costs import (
    LEAST_GAIN,
    MANY_SLICES,
    PRIORS,
    BatchCosts,
    BatchSchedule,
    DraftTimes,
    own_widths,
    uneven,
)
from lucevisor.engine.drafting.lookup import LOOKUP_FIRST_CHANCE, LOOKUP_PROBABILITIES
from lucevisor.engine.drafting.probes import EVER, PROBE_STEPS, Probes, WidthProbe, usable_widths, wanted_widths
from lucevisor.engine.drafting.request import RequestDrafts
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import Drafted

UNSURE_GAIN: Final = 0.05
"""What it must promise more, over the root of the plain steps that were measured: their jitter."""
FIRST_UNEVEN_GAIN: Final = 1.05
"""What unequal widths must promise over equal ones before any were measured."""
UNEVEN_CUT: Final = 1.5
"""How much longer a step of unequal slices takes from which slices are rather cut to equal ones when a request ends."""
SLOWEST_STEPS: Final = 16
"""Steps over which the share of the slowest stage is averaged."""
OUTLIER: Final = 2.0
"""A step is charged no more than this times what such steps take: plain steps are disturbed as often.  The first two of
a shape, which compile and capture, are charged what is expected of them: that is paid once."""


class Speculation:
    """Widths of a batch; one per engine."""

    def __init__(
        self, max_drafts: int, kind: DraftKind = DraftKind.MTP, *, fixed: bool = False, ends_early: bool = False
    ) -> None:
        """``fixed``: always ``max_drafts``.  ``ends_early``: unsure drafts are left out (``Slice.p_min``)."""
        self.n_groups = self.n_stages = 1  # micro-batches that share the decoding sequences; stages
        self.apart = False  # the drafter works beside the output stage
        self._max_drafts = max_drafts
        self._fixed, self._all_or_none = fixed, ends_early and kind is DraftKind.DFLASH  # one pass makes all of them
        self._models = [AcceptanceModel(PRIORS[kind].first_chance), AcceptanceModel(LOOKUP_FIRST_CHANCE, trusted=True)]
        self._lengths, self.times = DraftLengths(), DraftTimes(PRIORS[kind])
        self._loss, self.probes = Allowance.for_losses(), Probes()
        self._choices = WidthChoices()
        self._active: dict[str, tuple[int, RequestDrafts]] = {}  # by request id; when drafts were last asked for
        self._n_measured = 0  # steps
        self._n_slices = self._n_decoding = 1  # slices of the last step; sequences that decode
        self._slowest = 1.0  # share of the slowest stage in the time of a step
        self._step_s: float | None = None  # seconds of the last step
        self._groups_at, self._looks = 0, True  # whether waiting for the probabilities of drafts may pay

    # ---- what the scheduler asks

    def n_ahead(self, own: RequestDrafts, n_decoding: int) -> int:
        """Return how many drafts to ask for behind the next sampled token; 0: none."""
        if self._fixed:
            return self._max_drafts
        self._active[own.request_id] = self._n_measured, own
        self._n_decoding = n_decoding
        n_slices = max(1, -(-n_decoding // self.n_groups))
        if own.copying and n_slices == 1:
            return 0  # its own tokens are drafts enough
        probe = self.probes.running
        if probe is not None and probe.asks(n_slices):
            return probe.width
        choice = self._choices.asked(n_slices, self._n_measured)
        if choice is None or (self._loss.spent and choice.width):
            choice = self._choices.keep(n_slices, self._choose(n_slices))
        probe = self.probes.running
        if probe is not None and probe.asks(n_slices):
            return probe.width
        return choice.own.get(own.request_id, choice.width)

    def candidates(self, own: RequestDrafts, drafted: Drafted) -> Drafted:
        """Return the drafts to consider for the next slice: those of the draft stage, if any, or those found in the
        sequence's own tokens where more of them are likely to be accepted.
        """
        lookup, own.looked_up = own.lookup, False
        match = lookup.match() if lookup is not None and not lookup.n_waiting else None
        if lookup is not None and match is not None:
            found = [LOOKUP_PROBABILITIES[match.length]] * self._max_drafts
            promised = self._tokens(own, True, len(found), found)[-1]
            if promised > self._tokens(own, False, len(drafted.tokens), drafted.probabilities)[-1]:
                own.looked_up, own.n_left_out = True, 0
                drafted = Drafted(drafted.sequence, lookup.continuation(match, self._max_drafts), found)
        own.copying = own.copying and own.looked_up
        own.probabilities = drafted.probabilities
        return drafted

    def n_verify(self, drafts: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> dict[str, int]:
        """Return by request id how many drafts the next slices verify, all of one step.

        0: a plain decode.  More than there are: padding makes the slices of a step equally long.
        """
        self._n_slices, self._n_decoding = len(drafts), n_decoding
        return {own.request_id: n for (own, _), n in zip(drafts, self._widths(drafts), strict=True)}

    def evened(self, widths: list[int], wanted: Iterable[int]) -> list[int]:
        """Return what is left of equal widths, some of which were cut as requests end: equal again, of many slices
        whose steps are known to take much longer otherwise.
        """
        stay = len(widths) < MANY_SLICES or self._fixed or len({*wanted}) > 1
        return widths if stay or self.times.uneven_ratio < UNEVEN_CUT else [min(widths)] * len(widths)

    @property
    def uses_probabilities(self) -> bool:
        """Whether to wait for the probabilities of drafts, which say how many are verified."""
        return not self._fixed and self._looks and self._models[False].by_probability

    @property
    def width(self) -> int:
        """Drafts that are asked for at present, the most of any request."""
        probe = self.probes.running
        return self._max_drafts if self._fixed else self._choices.latest.width if probe is None else probe.width

    def choose_groups(self, n_stages: int) -> int:
        """Return the micro-batches to deal sequences into: one a stage, one more if a drafter apart makes it pay."""
        self.n_stages = n_stages
        if self._n_measured >= self._groups_at or not n_stages <= self.n_groups <= n_stages + 1:
            self._groups_at = self._n_measured + CHOICE_STEPS
            self.n_groups = n_stages + (self.apart and self._pays_more_groups())
        return self.n_groups

    @property
    def no_drafts(self) -> str:
        """Why no drafts are asked for at present; empty while they are, or before that was decided."""
        if self._fixed:
            return ""
        if self._loss.spent:
            return "drafts took more time than they saved; they are tried again now and then"
        if self.width or not self._choices.latest.rate:
            return ""
        return "the drafter is not asked: by times and acceptance plain decoding is faster"

    # ---- what it is told

    def drafted(self, own: RequestDrafts, drafted: Drafted, n_left_out: int = 0) -> None:
        """Note drafts of the draft stage, and how many unsure ones it left out: those have no chance."""
        own.n_left_out = n_left_out
        self._lengths.add(len(drafted.tokens), n_left_out)
        self._models[False].drafted(own.rates[False], drafted.probabilities, n_left_out)

    def verified(self, own: RequestDrafts, n_drafts: int, n_accepted: int) -> None:
        """Note a verdict on candidates, padding left out."""
        i = own.looked_up
        self._models[i].verified(own.rates[i], own.probabilities, n_drafts, n_accepted, own.n_left_out)
        own.copying = own.looked_up and n_accepted == n_drafts
        self._loss.gain(n_accepted / self._n_slices)
        self._choices.renew |= self.probes.verified(n_accepted, self._n_slices)
        if not n_accepted:
            self._choices.renew_at = self._n_measured

    def measured(
        self,
        n_rows: int,
        n_slices: int,
        seconds: float,
        slowest_s: float | None = None,
        *,
        cold: bool = False,
        waited: bool = False,
    ) -> None:
        """Note how long the stages took for a step of decodes, one after the other, and the slowest of several.

        ``cold`` as in StepResult.  ``waited``: for drafts, although it may verify none.  Call it when the next step was
        sent: it may choose anew, which takes as long as to plan a step.
        """
        self._learn_step(n_rows, n_slices, seconds, slowest_s, cold=cold, waited=waited)
        if self._choices.lone_is_due(self._n_measured, self._oldest):
            self._choices.keep(1, self._choose(1))

    def _learn_step(
        self, n_rows: int, n_slices: int, seconds: float, slowest_s: float | None, *, cold: bool, waited: bool
    ) -> None:
        steps = self.times.steps
        expected, warm = steps.seconds(n_rows, n_slices), not cold and steps.n_known(n_rows, n_slices) > 0
        self.times.add_step(n_rows, n_slices, seconds, cold=cold)
        if slowest_s is not None and seconds > 0:
            self._slowest += (slowest_s / seconds - self._slowest) / SLOWEST_STEPS
        self._n_measured += 1
        if self._loss.spent:  # what an older probe asks for would not be verified
            self._choices.renew_at = self._n_measured
            self.probes.end_older()
        costs = self._costs(n_slices)
        if costs is None or expected is None:
            return
        self._step_s = min(seconds, OUTLIER * expected if warm else expected)
        charged = costs.charged(self._step_s, drafted=waited or n_rows > n_slices)
        self._earn(charged)
        if waited or n_rows > n_slices:
            self._loss.gain(1 - LEAST_GAIN * charged)
        fewer = self._all_or_none and n_slices == 1 < n_rows and self.width > 0
        if self.probes.stepped(n_rows, n_slices, fewer=fewer, cold=cold):
            self._choices.renew_at = self._n_measured

    def measured_draft(self, n_slices: int, n_ahead: int, seconds: float, *, cold: bool = False) -> None:
        """Note how long the draft stage took for a step of decodes that asked for ``n_ahead`` drafts each; ``cold`` as
        in StepResult.
        """
        drafts, costs = self.times.drafts, self._costs(n_slices)
        expected, warm = drafts.seconds(n_ahead, n_slices), not cold and drafts.n_known(n_ahead, n_slices) > 0
        self.times.add_draft(n_ahead, n_slices, seconds, cold=cold)
        if costs is not None:
            if expected is None:
                expected = min(seconds, costs.draft_s(n_ahead)) if cold else seconds
            charged = self._delay(costs, min(seconds, OUTLIER * expected if warm else expected))
            self._earn(charged)
            self._loss.gain(-LEAST_GAIN * charged)

    def measured_upkeep(self, n_slices: int, seconds: float) -> None:
        """Note how long the draft stage took for a step of decodes behind which it was asked for nothing."""
        costs = self._costs(n_slices)
        if costs is not None:
            self.times.add_upkeep(seconds / costs.plain_s)
            self._loss.gain(-min(UPKEEP_SHARE, self._delay(costs, costs.upkeep_s)))

    # ---- inside: drafts to ask for

    def _earn(self, steps: float) -> None:
        self._loss.earn(steps)
        self.probes.earn(steps)

    def _costs(self, n_slices: int = 0, n_groups: int = 0) -> BatchCosts | None:
        """Costs with ``n_groups`` micro-batches (0: the present ones), of steps of ``n_slices`` (0: what follows)."""
        n, n_groups = max(1, self._n_decoding), n_groups or self.n_groups
        n_slices = n_slices or -(-n // n_groups)
        plain_s = self.times.steps.seconds(n_slices, n_slices)
        if plain_s is None:
            return None
        schedule = BatchSchedule(n, min(n_groups, n), min(self.n_stages, n), self._slowest, self.apart)
        return BatchCosts(self.times, n_slices, plain_s, schedule, self._lengths.shares if n == 1 else ())

    def _delay(self, costs: BatchCosts, draft_s: float) -> float:
        """Return by how many plain rounds such work of the draft stage delays a round."""
        step_s = self._step_s or costs.plain_s
        return (costs.schedule.round_s(step_s, draft_s) - costs.schedule.round_s(step_s)) / costs.bare_round_s

    def _choose(self, n_slices: int) -> WidthChoice:
        costs, now = self._costs(n_slices), self._n_measured
        if costs is None:
            return WidthChoice(0, 0.0, now)  # the first step of all shows what plain decoding takes
        each, mean = self._expected(), [*self._mean_tokens().values()]
        rounds = [costs.round_s(width) for width in range(self._max_drafts + 1)]
        rates = [n_slices * n / s for n, s in zip(mean, rounds, strict=True)]
        usable = usable_widths(costs, self._choosable)
        best = max(usable, key=rates.__getitem__)
        if rates[best] < (LEAST_GAIN + UNSURE_GAIN / math.sqrt(costs.n_plain or 1)) * rates[0]:
            best = 0
        if self._loss.spent:
            self._fade()  # whatever promised to pay off did not
            self.probes.judge(lambda width: False)
            if self._is_new:
                self._begin_probe(costs, rates[0], mean, rounds, False)
            return WidthChoice(0, rates[0], now)
        own, rate = self._own_choice(costs, each, rates[best], usable[-1])
        if rate < (LEAST_GAIN if self.times.uneven_known else FIRST_UNEVEN_GAIN) * rates[best]:
            own, rate = {}, rates[best]
        drafting, self._looks = best > 0 or bool(own), bool(own) or costs.pays_to_look(best, mean[best])
        self.probes.judge(lambda width: drafting or rates[width] >= LEAST_GAIN * rates[0])
        if self.probes.running is None:
            self._begin_probe(costs, rate, mean, rounds, drafting)
        if own:
            return WidthChoice(max(own.values()), rate, now, own)
        return WidthChoice(costs.with_free(best, self._max_drafts) if best else 0, rate, now)

    def _pays_more_groups(self) -> bool:
        usual, more = self._costs(n_groups=self.n_stages), self._costs(n_groups=self.n_stages + 1)
        if usual is None or more is None or (self._loss.spent and not self._fixed):
            return False
        mean = self._mean_tokens()
        best = max((n / more.round_s(width) for width, n in mean.items() if width), default=0.0)
        return best > LEAST_GAIN * max(n / usual.round_s(width) for width, n in mean.items())

    def _mean_tokens(self) -> dict[int, float]:
        """Return the tokens of a slice on average, by width; of a fixed one what it yields does not matter."""
        if self._fixed:
            return {self._max_drafts: 1.0}
        each = self._expected() or {"": [1.0]}
        return dict(enumerate(sum(column) / len(each) for column in zip(*each.values(), strict=True)))

    @property
    def _oldest(self) -> int:  # when drafts were last asked for of a request that decodes
        return self._n_measured - 2 * self.n_groups

    def _expected(self) -> dict[str, list[float]]:
        """Return the tokens of a slice with 0, 1, ... drafts, by request that decodes."""
        self._active = {name: entry for name, entry in self._active.items() if entry[0] >= self._oldest}
        model, n = self._models[False], self._max_drafts
        return {name: expected_tokens(model.chances(own.rates[False], n)) for name, (_, own) in self._active.items()}

    def _begin_probe(
        self, costs: BatchCosts, rate: float, mean: Sequence[float], rounds: Sequence[float], drafting: bool
    ) -> None:
        """Begin to measure a width that is worth it, if the probe budget has room.

        ``rate``: the best known tokens a second; ``drafting``: with drafts.
        """
        n_slices, may_check = costs.n_slices, not drafting and (self._is_new or self.probes.plentiful)
        lost = [(s - n_slices * n / rate) / costs.bare_round_s for n, s in zip(mean, rounds, strict=True)]
        for width in wanted_widths(costs, self._choosable, rate, mean, drafting=drafting, may_check=may_check):
            known, expected = costs.is_known(0, EVER), mean[width] - 1
            probe = WidthProbe(n_slices, width, expected, lost[width], self._loss.spent, is_check=not drafting)
            if self.probes.begin(probe, n_steps=1 if known and not width else PROBE_STEPS):
                if not drafting:
                    self._fade(0.0 if costs.many else FADED_WEIGHT)  # many verdicts tell more than old ones
                return

    @property
    def _choosable(self) -> Sequence[int]:
        return (0, self._max_drafts) if self._all_or_none and self._n_decoding == 1 else range(self._max_drafts + 1)

    @property
    def _is_new(self) -> bool:
        """Whether a request decodes of which no draft was verified: its text may be easier than those before it."""
        return any(not own.rates[False].verdicts for _, own in self._active.values())

    def _fade(self, weight: float = FADED_WEIGHT) -> None:
        for _, own in self._active.values():
            self._models[False].fade(own.rates[False], weight)

    def _own_choice(
        self, costs: BatchCosts, each: dict[str, list[float]], rate: float, most: int
    ) -> tuple[dict[str, int], float]:
        """Return a width for every request, up to ``most``, and the tokens a second they yield; none where that is not
        possible.
        """
        ratio = self.times.uneven_ratio
        if costs.n_slices == 1 or len(each) != costs.n_slices:
            return {}, 0.0
        tokens = [one[: most + 1] for one in each.values()]
        least = rate * ratio * costs.row_s(costs.n_slices)
        widths = uneven(own_widths(tokens, least), tokens)
        if not any(widths):
            return {}, 0.0
        seconds = costs.drafted_round_s(ratio * costs.verify_s(sum(widths)), costs.draft_s(max(widths)))
        found = sum(one[width] for one, width in zip(tokens, widths, strict=True)) / seconds
        return dict(zip(each, widths, strict=True)), found

    # ---- inside: drafts to verify

    def _widths(self, drafts: Sequence[tuple[RequestDrafts, Drafted]]) -> list[int]:
        counts = [min(self._max_drafts, len(drafted.tokens)) for _, drafted in drafts]
        n_slices, most, costs = len(drafts), max(counts), self._costs(len(drafts))
        if self._fixed:
            return [most] * n_slices
        probe = self.probes.running
        if probe is not None and costs is not None and (n := probe.n_verify(most, n_slices)):
            return [n] * n_slices
        if costs is None or self._loss.spent:
            return [0] * n_slices
        if self._all_or_none and self._n_decoding == 1 and not drafts[0][0].looked_up:
            return [most]
        choice = self._choices.get(n_slices)
        rate = max(choice.rate if choice is not None else 0.0, n_slices / costs.round_s(0))
        tokens = [
            self._tokens(own, own.looked_up, n, drafted.probabilities)
            for (own, drafted), n in zip(drafts, counts, strict=True)
        ]
        worth = [
            sum(each[min(width, len(each) - 1)] for each in tokens) - rate * costs.stages_s(n_slices * width)
            for width in range(most + 1)
        ]
        best = max(range(most + 1), key=worth.__getitem__)
        if n_slices > 1:
            ratio = self.times.uneven_ratio
            own_best = uneven(own_widths(tokens, rate * ratio * costs.row_s(n_slices * most)), tokens)
            found = sum(each[width] for each, width in zip(tokens, own_best, strict=True))
            least = 0.0 if self.times.uneven_known else (FIRST_UNEVEN_GAIN - 1) * found  # a first try may cost a step
            if found - rate * ratio * costs.stages_s(sum(own_best)) > worth[best] + least:
                return own_best
        if not best and any(own.looked_up for own, _ in drafts):
            best = self._check_lookups(costs)
        return [best] * n_slices

    def _tokens(self, own: RequestDrafts, looked_up: bool, n: int, probabilities: Sequence[float]) -> list[float]:
        """Return the tokens expected of a slice with 0, 1, ... n drafts."""
        return expected_tokens(self._models[looked_up].offered(own.rates[looked_up], n, probabilities))

    def _check_lookups(self, costs: BatchCosts) -> int:
        """Return how many looked-up drafts to verify although they promise nothing, to learn whether they still do."""
        lost = costs.verify_s(costs.n_slices) / costs.plain_s - 1
        return int(self.probes.pays_for(lost))
