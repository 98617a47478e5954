"""The sampler: logits processors (penalties, DRY, bias, token masks), temperature, filters, random sampling, drafts.

Runs on the output stage.  A draft is accepted if it equals the token drawn from its row (no rejection sampling), so
drafts never change answers.  A draw depends on (seed, position, logits, earlier tokens) alone, so batching, placement
and restarts do not change it either.
Order: penalties, DRY, bias, masks, temperature, then mirostat or filters: top_n_sigma, top_k, typical_p, top_p, min_p,
XTC; each acts on what the previous one left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.async_output import AsyncTokens, PlaceholderFill
from daemons.device import one_thread
from daemons.errors import StateError
from daemons.logprobs import TokenReport
from daemons.ops.topk import likeliest
from daemons.random_sampling import (
    can_draw_on_device,
    draw,
    draw_by_row,
    draw_index,
    draw_key,
    draw_on_device,
    put,
    take,
    uniform,
)
from lucevisor.protocol.steps import (
    PENDING,
    CloseSequence,
    Dry,
    Mirostat,
    OpenSequence,
    Operation,
    PromptLogprobs,
    Sampled,
    SamplingParams,
    Slice,
    Step,
)


def filtered(scaled: Tensor, s: SamplingParams, u_xtc: float) -> tuple[Tensor, Tensor]:
    """Filter logits ``scaled`` [V], divided by the temperature; return the remaining probabilities, descending, and
    ids.

    ``u_xtc`` in [0, 1) decides whether XTC acts.
    """
    x, ids = scaled.double().sort(descending=True, stable=True)
    keep = torch.isfinite(x)
    if s.top_n_sigma > 0:
        keep &= x >= x[0] - s.top_n_sigma * x[keep].std(correction=0)
    if s.top_k > 0:
        keep[s.top_k :] = False
    p, ids = torch.softmax(x[keep], dim=0), ids[keep]
    if s.typical_p < 1:
        p, ids = _typical(p, ids, s.typical_p)
    if s.top_p < 1:
        below = p.cumsum(0) - p
        p, ids = _some(p, ids, (below < s.top_p).index_fill_(0, below.new_zeros(1).long(), True))
    if s.min_p > 0:
        p, ids = _some(p, ids, p >= s.min_p * p[0])
    if u_xtc < s.xtc_probability:
        n_above = int((p >= s.xtc_threshold).sum())
        p, ids = p[max(0, n_above - 1) :], ids[max(0, n_above - 1) :]
    return p / p.sum(), ids


def _some(p: Tensor, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    p = p[keep]
    return p / p.sum(), ids[keep]


def _typical(p: Tensor, ids: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise is nearest the entropy, up to ``mass``."""
    surprise = -p.log()
    distance = (surprise - torch.special.entr(p).sum()).abs()
    order = distance.argsort(stable=True)
    running = p[order].cumsum(0)
    n = int((running <= mass).sum()) + 1
    return _some(p, ids, torch.zeros_like(p, dtype=torch.bool).index_fill_(0, order[:n], True))


def mirostat_keeps(scaled: Tensor, m: Mirostat, mu: float) -> tuple[Tensor, Tensor]:
    """Filter logits ``scaled`` [V] by mirostat; return the remaining probabilities, descending, and ids.

    Source: Basu et al. 2021, algorithm 1, and version 2 as in llama.cpp: tokens of at most ``mu`` bits of surprise.
    """
    x, ids = scaled.double().sort(descending=True, stable=True)
    keep = torch.isfinite(x)
    p, ids = torch.softmax(x[keep], dim=0), ids[keep]
    n = _expected_rank(p, mu, scaled.shape[-1]) if m.version == 1 else int((-p.log2() <= mu).sum())
    p = p[: max(1, n)]
    return p / p.sum(), ids[: max(1, n)]


def _expected_rank(p: Tensor, mu: float, vocabulary: int) -> int:
    """The number of tokens whose expected surprise is ``mu``, if probabilities ``p`` fall by a power of the rank."""
    n = min(100, len(p)) - 1
    if n < 1:
        return 1
    rank = torch.arange(n, dtype=torch.float64)
    t, b = ((rank + 2) / (rank + 1)).log(), (p[:n] / p[1 : n + 1]).log().cpu()
    s = float((t * b).sum() / (t * t).sum())
    epsilon = s - 1
    if s <= 0 or epsilon == 0:
        return len(p)
    # in logarithms: k = (epsilon 2^mu / (1 - V^-epsilon))^(1/s) overflows for flat distributions
    ratio = epsilon / -math.expm1(-epsilon * math.log(vocabulary))
    exponent = (math.log(ratio) + mu * math.log(2)) / s
    return len(p) if exponent > math.log(len(p)) else max(1, int(math.exp(exponent)))


def next_mu(p: float, m: Mirostat, mu: float) -> float:
    """Return mirostat's ``mu`` after a token of probability ``p`` among the remaining ones."""
    return mu - m.eta * (-math.log2(p) - m.tau)


LONGEST = 1024
"""Repetitions of more tokens count as this many: what searching a context of one repeated token costs is bounded."""


Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Tails of the sequence breakers by their heads."""


def breakers_by_head(dry: Dry) -> Breakers:
    """The settings' breakers in the form that the search wants."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for head, *tail in dry.breakers:
        found.setdefault(head, []).append(tuple(tail))
    return found


class TokenHistory:
    """Token ids of a sequence in a growing array."""

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._n = 0

    def extend(self, ids: Sequence[int]) -> None:
        need = self._n + len(ids)
        if need > len(self._ids):
            grown = np.empty(max(need, 2 * len(self._ids)), dtype=np.int64)
            grown[: self._n] = self._ids[: self._n]
            self._ids = grown
        self._ids[self._n : need] = ids
        self._n = need

    def followed_by(self, ids: Sequence[int]) -> np.ndarray:
        """The ids, then others: [n + len(ids)] int64."""
        own = self._ids[: self._n]
        return np.concatenate([own, np.asarray(ids, dtype=np.int64)]) if ids else own


def penalise_repetition(row: Tensor, tokens: np.ndarray, dry: Dry, breakers: Breakers) -> None:
    """Apply the penalty to logits ``row`` [V], in place, for the token after ``tokens`` [n] int64."""
    lengths = repetition_lengths(tokens if dry.last_n < 0 else tokens[-dry.last_n :], dry.allowed_length, breakers)
    if not lengths:
        return
    steepest = int(88.7228391 / math.log(dry.base)) if dry.base > 1 else LONGEST  # the logarithm of the largest float32
    amounts = [min(1e38, dry.multiplier * dry.base ** min(n - dry.allowed_length, steepest)) for n in lengths.values()]
    ids = torch.tensor(list(lengths), dtype=torch.long, device=row.device)
    row[ids] -= torch.tensor(amounts, dtype=torch.float32, device=row.device)


def repetition_lengths(tokens: np.ndarray, least: int, breakers: Breakers) -> dict[int, int]:
    """By token: how long the repetition is that it would continue, where that is ``least`` or more.

    A repetition is a suffix of ``tokens`` that occurs earlier; what followed it there continues it, unless it is a
    breaker by itself.
    """
    n = len(tokens)
    limit = min(_since_break(tokens, breakers), LONGEST)
    if n <= least or limit < least:
        return {}
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of the earlier occurrences
    found: dict[int, int] = {}
    for length in range(1, limit + 1):
        if length >= least:
            found.update(
                (token, length) for token in np.unique(tokens[ends + 1]).tolist() if () not in breakers.get(token, ())
            )
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        if not len(ends):
            break
    return found


def _since_break(tokens: np.ndarray, breakers: Breakers) -> int:
    """Tokens after the last sequence breaker."""
    n = int(tokens.size)
    heads = np.fromiter(breakers, dtype=np.int64, count=len(breakers))
    places: list[int] = np.flatnonzero(np.isin(tokens, heads))[::-1].tolist()
    for at in places:
        fitting = [len(tail) for tail in breakers[tokens[at]] if tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail]
        if fitting:
            return n - 1 - at - max(fitting)
    return n


def apply_masks(x: Tensor, masks: Tensor, rows: Sequence[int]) -> None:
    """Set what ``masks`` uint8 [m, bytes], 8 tokens a byte, forbid in the ``rows`` of logits ``x`` [n, V] to -inf."""
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    bits = (masks.to(x.device, non_blocking=True).unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, : x.shape[1]] == 0
    forbidden = torch.nn.functional.pad(forbidden, (0, x.shape[1] - forbidden.shape[1]), value=True)
    if len(rows) == x.shape[0]:
        x.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=x.device)
        x.index_copy_(0, index, x[index].masked_fill_(forbidden, float("-inf")))


@dataclass(slots=True)
class SamplingState:
    """Sampling state of one sequence.  ``counts`` [V] int32: occurrences of each id in the output; ``prompted`` [V]
    bool: whether it is in the prompt, of which ``n_prompt`` tokens are still to come.

    ``context``: the ids in order, and ``breakers``, for DRY.  ``mu``: where mirostat stands.
    """

    sampling: SamplingParams
    mu: float = 0.0
    n_prompt: int = 0
    counts: Tensor | None = None
    prompted: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    banned: Tensor | None = None
    context: TokenHistory | None = None
    breakers: Breakers = field(default_factory=dict)


@dataclass(slots=True)
class Sampler:
    """Sampling state of all open sequences of an output stage.  ``vocabulary`` V; ``device``: that of the logits.

    ``by_row``: rows are drawn one by one, so that the bits of one do not depend on others.
    """

    vocabulary: int
    device: torch.device
    by_row: bool = False
    states: dict[int, SamplingState] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)  # the token sampled last, by sequence
    _async_tokens: AsyncTokens | None = None  # newer ones that the host does not have yet
    _invalid: list[int] = field(default_factory=list)  # sequences whose logits were NaN or infinite

    def open(
        self, sequence: int, sampling: SamplingParams, history: list[int], mu: float | None = None, n_prompt: int = 0
    ) -> None:
        """Start a sequence, replacing any with that id; ``history``: ids of its context that no step will carry;
        ``mu``: where mirostat stands, None at its start; ``n_prompt``: tokens of its context that were not generated.
        """
        state = SamplingState(sampling, n_prompt=n_prompt)
        if sampling.mirostat is not None:
            state.mu = 2 * sampling.mirostat.tau if mu is None else mu
        if sampling.dry is not None:
            state.context, state.breakers = TokenHistory(), breakers_by_head(sampling.dry)
        if sampling.penalised:
            state.counts = torch.zeros(self.vocabulary, dtype=torch.int32, device=self.device)
            state.prompted = torch.zeros(self.vocabulary, dtype=torch.bool, device=self.device)
        if sampling.logit_bias:
            state.bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=self.device)
            state.bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self.device)
        if sampling.banned:
            state.banned = torch.tensor(sampling.banned, dtype=torch.long, device=self.device)
        self.states[sequence] = state
        self.count(sequence, history)

    def close(self, sequence: int) -> None:
        self.states.pop(sequence, None)
        self._last.pop(sequence, None)

    def apply_operations(self, operations: Sequence[Operation]) -> None:
        """Open and close sequences as a step's operations say."""
        for operation in operations:
            if isinstance(operation, OpenSequence):
                self.open(operation.sequence, operation.sampling, operation.history, operation.mu, operation.n_prompt)
            elif isinstance(operation, CloseSequence):
                self.close(operation.sequence)

    def replayed(self, steps: Sequence[Step]) -> None:
        """Apply steps that were computed while the daemon loaded."""
        for step in steps:
            self.apply_operations(step.operations)
            self.count_context(step.slices)

    def reset(self) -> None:
        self.states.clear()
        self._last.clear()
        self._async_tokens = None
        self._invalid.clear()

    def take_invalid(self) -> list[int]:
        """Return the sequences whose logits were NaN or infinite since the last call; their tokens are void."""
        found, self._invalid = self._invalid, []
        return found

    def fill_placeholders(self, step: Step) -> tuple[Step, PlaceholderFill | None]:
        """Return a step with tokens in place of placeholders (``PENDING``); 0 where only the device has them, which the
        second result copies there.  Raises StateError where none was sampled.
        """
        if not any(s.tokens == [PENDING] for s in step.slices):
            return step, None
        async_tokens, slices, places, row = self._async_tokens, list[Slice](), list[tuple[int, int]](), 0
        for s in step.slices:
            if s.tokens == [PENDING]:
                if async_tokens is not None and s.sequence in async_tokens.sequences:
                    places.append((row, async_tokens.sequences.index(s.sequence)))
                    s = replace(s, tokens=[0])
                elif s.sequence in self._last:
                    s = replace(s, tokens=[self._last[s.sequence]])
                else:
                    raise StateError(f"slice of sequence {s.sequence} at {s.start}", "no token was sampled before it")
            slices.append(s)
            row += len(s.tokens)
        fill = PlaceholderFill.of(async_tokens.tokens, places) if async_tokens is not None and places else None
        return replace(step, slices=slices), fill

    def refill_placeholders(self, slices: Sequence[Slice]) -> list[Slice]:
        """Return slices with the newest tokens in place of placeholders, once the previous step is finished."""
        return [replace(s, tokens=[self._last[s.sequence]]) if s.tokens == [PENDING] else s for s in slices]

    def checked(self, logprobs: Sequence[PromptLogprobs]) -> list[PromptLogprobs]:
        """Return ``logprobs`` with 0 in place of NaN and infinities; ``take_invalid`` then names the sequences."""
        found = []
        for one in logprobs:
            if not all(map(math.isfinite, one.logprobs)):
                self._invalid.append(one.sequence)
                one = replace(one, logprobs=[0.0] * len(one.logprobs), tops=[[] for _ in one.tops])
            found.append(one)
        return found

    def checked_rows(self, sequences: Sequence[int], rows: Tensor) -> Tensor:
        """Return rows [n, width] with 0 in place of NaN and infinities; ``take_invalid`` then names their sequences."""
        valid = rows.isfinite().all(dim=-1).tolist()
        self._invalid += [sequence for sequence, finite in zip(sequences, valid, strict=True) if not finite]
        return rows.nan_to_num(0.0, 0.0, 0.0)

    def defer(self, slices: Sequence[Slice], logits: Tensor) -> AsyncTokens | None:
        """Draw a token per slice as ``sample`` does, without waiting for the device; ``finish_tokens`` returns them.

        None, without any effect, if the host must read something in between.  ``logits`` as for ``sample``.
        """
        states = [self.states[s.sequence] for s in slices]
        samplings = [state.sampling for state in states]
        if (
            self.device.type == "cpu"
            or any(s.n_drafts or s.masked for s in slices)
            or not can_draw_on_device(samplings)
        ):
            return None
        valid = finite_rows(logits)
        for i, state in enumerate(states):
            adjust(state, logits[i : i + 1])
        keys = [draw_key(s.seed, piece.start + len(piece.tokens)) for s, piece in zip(samplings, slices, strict=True)]
        tokens = draw_on_device(logits, samplings, keys, by_row=self.by_row)
        self._async_tokens = AsyncTokens.of([s.sequence for s in slices], tokens, valid)
        return self._async_tokens

    def finish_tokens(self, async_tokens: AsyncTokens) -> list[Sampled]:
        """Wait for asynchronous tokens.  Call it before the next ``sample``."""
        found = async_tokens.wait()
        self._invalid += async_tokens.invalid
        self._last |= {sequence: token for sequence, token in found.items() if sequence in self.states}
        if self._async_tokens is async_tokens:
            self._async_tokens = None
        return [Sampled(sequence, token) for sequence, token in found.items()]

    def count(self, sequence: int, ids: Sequence[int]) -> None:
        """Count tokens that enter the context of ``sequence``; once per token, and drafts only when accepted."""
        state = self.states.get(sequence)
        if state is None or not ids:
            return
        n_prompt, state.n_prompt = min(state.n_prompt, len(ids)), max(0, state.n_prompt - len(ids))
        if n_prompt and max(ids) >= self.vocabulary:
            prompt = [token for token in ids[:n_prompt] if token < self.vocabulary]  # not those of images
            ids, n_prompt = [*prompt, *ids[n_prompt:]], len(prompt)
        if state.context is not None:
            state.context.extend(ids)
        if state.counts is not None and state.prompted is not None:
            index = torch.tensor(ids, dtype=torch.long, device=self.device)
            state.prompted.index_fill_(0, index[:n_prompt], True)
            generated = index[n_prompt:]
            state.counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def count_context(self, slices: Sequence[Slice]) -> None:
        """Count the tokens of a step that is computed."""
        for s in slices:
            self.count(s.sequence, s.tokens[: s.n_context])

    def sample(
        self,
        slices: Sequence[Slice],
        logits: Tensor,
        masks: Tensor | None = None,
        meanwhile: Callable[[Tensor | None], None] = lambda drawn: None,
    ) -> list[Sampled]:
        """Return the tokens of each slice: the one after its context, then one after each accepted draft.

        ``logits`` float32 [n, V], changed in place: the last ``n_drafts + 1`` rows of each slice.  ``masks`` uint8 [m,
        bytes]: those of the masked slices.  All rows are drawn at once, each as if the drafts before it were accepted,
        except with mirostat, which draws in order.  ``meanwhile`` is called before the host waits for a device, with
        the tokens drawn on it, one per row; None if the host draws some.
        """
        valid = finite_rows(logits)
        rows: list[SamplingParams] = []
        positions: list[int] = []
        blocks: list[Tensor] = []
        masked: list[int] = []
        for slice_ in slices:
            blocks.append(_block(logits, len(rows), 1 + len(slice_.drafts)))
            if slice_.masked:
                masked += range(len(rows), len(rows) + len(blocks[-1]))
            rows += [self.states[slice_.sequence].sampling] * len(blocks[-1])
            end = slice_.start + len(slice_.tokens)
            positions += range(end - len(slice_.drafts), end + 1)
        report = TokenReport(logits, rows, by_row=self.by_row)
        for slice_, block in zip(slices, blocks, strict=True):
            adjust(self.states[slice_.sequence], block, slice_.drafts)
        if masks is not None:
            apply_masks(logits, masks, masked)
        drawn, at = _draw_rows(logits, rows, positions, meanwhile, by_row=self.by_row), 0
        spans: list[tuple[int, int, int]] = []
        accepted: list[tuple[int, int, float | None]] = []  # row, sequence and mirostat's mu of each token
        for slice_, block in zip(slices, blocks, strict=True):
            state, drafts = self.states[slice_.sequence], slice_.drafts
            end = at + 1 + len(drafts)
            spans.append((slice_.sequence, at, end))
            mus: Sequence[float | None] = ()
            if state.sampling.uses_mirostat:
                with one_thread(self.device) if self.by_row else nullcontext():
                    tokens, mus = _draw_mirostat(block, state, positions[at:end], drafts)
                drawn[at : at + len(tokens)] = tokens
            else:
                tokens = _accepted(drawn[at:end], drafts)
            self.count(slice_.sequence, drafts[: len(tokens) - 1])
            self._last[slice_.sequence] = tokens[-1]
            accepted += [(at + i, slice_.sequence, mu) for i, mu in enumerate(mus or [None] * len(tokens))]
            at = end
        said = report.of(drawn)
        out = [Sampled(sequence, drawn[row], *said[row], mu) for row, sequence, mu in accepted]
        if not valid.all():
            void = {sequence for sequence, first, stop in spans if not valid[first:stop].all()}
            self._invalid += sorted(void)
            out = [Sampled(one.sequence, one.token) if one.sequence in void else one for one in out]
        return out


def finite_rows(logits: Tensor) -> Tensor:
    """Return for each row [n, V] whether its maximum is finite; a row with a NaN has NaN as its maximum."""
    return logits.amax(dim=-1).isfinite()


def rows_to_sample(slices: Sequence[Slice]) -> list[int]:
    """The rows of a step that are drawn from."""
    rows: list[int] = []
    end = 0
    for s in slices:
        end += len(s.tokens)
        if s.sample:
            rows += range(end - 1 - s.n_drafts, end)
    return rows


def sampled_parts(slices: Sequence[Slice], max_rows: int) -> Iterator[list[Slice]]:
    """Deal slices that are sampled into parts of at most ``max_rows`` rows, or of one slice."""
    part, n_rows = list[Slice](), 0
    for s in slices:
        if part and n_rows + 1 + s.n_drafts > max_rows:
            yield part
            part, n_rows = [], 0
        part.append(s)
        n_rows += 1 + s.n_drafts
    if part:
        yield part


def _accepted(drawn: list[int], drafts: list[int]) -> list[int]:
    """Return the drawn tokens up to the first that differs from its draft: the accepted drafts and one more."""
    n = next((i for i, (token, draft) in enumerate(zip(drawn, drafts, strict=False)) if token != draft), len(drafts))
    return drawn[: n + 1]


def adjust(state: SamplingState, x: Tensor, drafts: Sequence[int] = ()) -> None:
    """Apply penalties, bias and bans to logits ``x`` [n, V] in place; row i follows the first i ``drafts``.

    Repetition penalty as in Keskar et al. 2019 (CTRL), of prompt and output; presence and frequency penalties as in the
    OpenAI API, of the output.
    """
    s = state.sampling
    if state.counts is not None and state.prompted is not None:
        counts = _counts_at_rows(state.counts, drafts)
        generated = counts > 0
        if s.repetition_penalty != 1.0:
            scaled = torch.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty)
            x.copy_(torch.where(generated | state.prompted, scaled, x))
        x.sub_(counts * s.frequency_penalty + generated * s.presence_penalty)
    if state.context is not None and s.dry is not None:
        for i, row in enumerate(x):
            penalise_repetition(row, state.context.followed_by(drafts[:i]), s.dry, state.breakers)
    if state.bias_ids is not None and state.bias is not None:
        x.index_add_(1, state.bias_ids, state.bias.expand(x.shape[0], -1))
    if state.banned is not None:
        x.index_fill_(1, state.banned, float("-inf"))


def _counts_at_rows(counts: Tensor, drafts: Sequence[int]) -> Tensor:
    """``counts`` [V] and the first i drafts, for each row i: [1 + drafts, V]."""
    if not drafts:
        return counts.unsqueeze(0)
    n = 1 + len(drafts)
    where = torch.tensor(
        [(row, token) for i, token in enumerate(drafts, 1) for row in range(i, n)], device=counts.device
    )
    ones = counts.new_ones(()).expand(len(where))
    return counts.repeat(n, 1).index_put_(tuple(where.unbind(1)), ones, accumulate=True)


# ---- random sampling


def _draw_rows(
    logits: Tensor,
    rows: Sequence[SamplingParams],
    positions: Sequence[int],
    meanwhile: Callable[[Tensor | None], None],
    *,
    by_row: bool,
) -> list[int]:
    """A token for each row of adjusted logits [n, V], greedy or drawn for its position; 0 for those of mirostat."""
    greedy = [i for i, s in enumerate(rows) if s.greedy]
    if len(greedy) == len(rows):
        if logits.device.type == "cpu":
            meanwhile(None)
            return likeliest(logits)
        launched = AsyncTokens.of(range(len(rows)), logits.argmax(dim=-1))
        meanwhile(launched.tokens)
        return [*launched.wait().values()]
    meanwhile(None)
    sorting = [i for i, s in enumerate(rows) if s.sorts and not s.greedy and not s.uses_mirostat]
    drawn = [i for i, s in enumerate(rows) if not (s.greedy or s.sorts or s.uses_mirostat)]
    tokens = [0] * len(rows)
    for i in sorting:
        s, position = rows[i], positions[i]
        # XTC has a draw key of its own.
        with one_thread(logits.device) if by_row else nullcontext():
            p, ids = filtered(logits[i] / s.temperature, s, uniform(s.seed, position + (1 << 40)))
            tokens[i] = int(ids[draw_index(p, ids, draw_key(s.seed, position))])
    if greedy:
        put(tokens, greedy, likeliest(take(logits, greedy)))
    if drawn:
        keys = [draw_key(rows[i].seed, positions[i]) for i in drawn]
        how = draw_by_row if by_row else draw
        put(tokens, drawn, how(take(logits, drawn), [rows[i] for i in drawn], keys))
    return tokens


def _draw_mirostat(
    block: Tensor, state: SamplingState, positions: Sequence[int], drafts: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draw from adjusted logits [n, V] of one sequence up to the first rejected draft; with each, mu after it."""
    s, tokens, mus = state.sampling, list[int](), list[float]()
    assert s.mirostat is not None
    for i, (row, position) in enumerate(zip(block, positions, strict=True)):
        p, ids = mirostat_keeps(row / s.temperature, s.mirostat, state.mu)
        chosen = draw_index(p, ids, draw_key(s.seed, position))
        state.mu = next_mu(float(p[chosen]), s.mirostat, state.mu)
        tokens.append(int(ids[chosen]))
        mus.append(state.mu)
        if i < len(drafts) and tokens[-1] != drafts[i]:
            break
    return tokens, mus


def _block(x: Tensor, first: int, n: int) -> Tensor:
    """Neighbouring rows of x; x itself if they are all."""
    return x if n == x.shape[0] else x[first : first + n]
