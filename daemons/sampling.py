"""Logits to tokens, on the output stage: penalties, bias, temperature, filters, one draw per row.

A draw depends on (seed, position, logits) alone, so batching, placement and restarts do not change it.
Order: penalties, bias, temperature, top_k, top_p, min_p (each filter acts on the distribution the previous one left).
Knows token ids and logits only; sequences are ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lucevisor.protocol.steps import Sampled, Sampling

CANDIDATES = 1024
"""Rows whose filters keep fewer tokens than this need no full sort of the vocabulary."""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from ``seed`` and ``position`` alone.  Source: splitmix64 (Steele, Lea, Flood 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    for _ in range(2):  # twice, to decorrelate adjacent seeds and positions
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z = z ^ (z >> 31)
    return (z >> 11) / (1 << 53)


@dataclass(slots=True)
class SamplingState:
    """Sampling state of one sequence.  ``counts`` [V] int32: occurrences of each id in prompt and output."""

    sampling: Sampling
    counts: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    banned: Tensor | None = None


@dataclass(slots=True)
class Sampler:
    """Sampling state of all open sequences of an output stage.  ``vocabulary`` V; ``device``: that of the logits."""

    vocabulary: int
    device: torch.device
    rows: dict[int, SamplingState] = field(default_factory=dict)

    def open(self, sequence: int, sampling: Sampling, history: list[int]) -> None:
        """Start a sequence, replacing any with that id; ``history``: ids of its context that no step will carry."""
        row = SamplingState(sampling)
        if sampling.penalised:
            row.counts = torch.zeros(self.vocabulary, dtype=torch.int32, device=self.device)
        if sampling.logit_bias:
            row.bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=self.device)
            row.bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self.device)
        if sampling.banned:
            row.banned = torch.tensor(sampling.banned, dtype=torch.long, device=self.device)
        self.rows[sequence] = row
        self.count(sequence, history)

    def close(self, sequence: int) -> None:
        self.rows.pop(sequence, None)

    def reset(self) -> None:
        self.rows.clear()

    def count(self, sequence: int, ids: list[int]) -> None:
        """Count tokens that enter the context of ``sequence``; call once per token."""
        row = self.rows.get(sequence)
        if row is not None and row.counts is not None and ids:
            index = torch.tensor(ids, dtype=torch.long, device=self.device)
            row.counts.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def sample(self, sequences: list[int], positions: list[int], logits: Tensor) -> list[Sampled]:
        """Draw the token at ``positions[i]`` of ``sequences[i]`` from ``logits`` [n, V] float32 (changed in place)."""
        rows = [self.rows[s] for s in sequences]
        reports = self._reports(rows, logits)
        for i, row in enumerate(rows):
            adjust(row, logits[i])
        tokens = [0] * len(rows)
        greedy = [i for i, row in enumerate(rows) if row.sampling.greedy]
        drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
        if greedy:
            chosen = (logits if not drawn else logits[greedy]).argmax(dim=-1).tolist()
            for i, token in zip(greedy, chosen, strict=True):
                tokens[i] = token
        if drawn:
            u = [uniform(rows[i].sampling.seed, positions[i]) for i in drawn]
            tokens_drawn = draw(logits if not greedy else logits[drawn], [rows[i].sampling for i in drawn], u)
            for i, token in zip(drawn, tokens_drawn, strict=True):
                tokens[i] = token
        return [_sampled(s, t, reports.get(i)) for i, (s, t) in enumerate(zip(sequences, tokens, strict=True))]

    def _reports(self, rows: list[SamplingState], logits: Tensor) -> dict[int, tuple[Tensor, list[tuple[int, float]]]]:
        """Log-probabilities of the model itself (before penalties and temperature), for rows that ask for them."""
        out: dict[int, tuple[Tensor, list[tuple[int, float]]]] = {}
        for i, row in enumerate(rows):
            n = row.sampling.n_top_logprobs
            if n >= 0:
                logprobs = torch.log_softmax(logits[i], dim=-1)
                values, ids = logprobs.topk(min(n, self.vocabulary)) if n else (logprobs[:0], logprobs[:0].long())
                out[i] = (logprobs, list(zip(ids.tolist(), values.tolist(), strict=True)))
        return out


def _sampled(sequence: int, token: int, report: tuple[Tensor, list[tuple[int, float]]] | None) -> Sampled:
    if report is None:
        return Sampled(sequence, token)
    logprobs, top = report
    return Sampled(sequence, token, float(logprobs[token]), top)


def adjust(row: SamplingState, x: Tensor) -> None:
    """Apply penalties, bias and bans of ``row`` to logits ``x`` [V], in place.

    Repetition penalty as in Keskar et al. 2019 (CTRL); presence and frequency penalties as in the OpenAI API.
    """
    s = row.sampling
    if row.counts is not None:
        seen = row.counts > 0
        if s.repetition_penalty != 1.0:
            scaled = torch.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty)
            x.copy_(torch.where(seen, scaled, x))
        x.sub_(row.counts * s.frequency_penalty + seen * s.presence_penalty)
    if row.bias_ids is not None and row.bias is not None:
        x.index_add_(0, row.bias_ids, row.bias)
    if row.banned is not None:
        x.index_fill_(0, row.banned, float("-inf"))


def draw(x: Tensor, samplings: list[Sampling], u: list[float]) -> list[int]:
    """Draw one id a row from adjusted logits ``x`` [n, V]; ``u[i]`` in [0, 1) decides row i."""
    device = x.device
    temperature = torch.tensor([[s.temperature] for s in samplings], dtype=torch.float32, device=device)
    scaled = x / temperature
    point = torch.tensor([[v] for v in u], dtype=torch.float64, device=device)
    plain = [s.top_k <= 0 and s.top_p >= 1.0 and s.min_p <= 0.0 for s in samplings]
    if all(plain):
        return _inverse_cdf(torch.softmax(scaled, dim=-1, dtype=torch.float64), point).tolist()
    width = min(x.shape[-1], max(CANDIDATES, *(s.top_k for s in samplings)))
    tokens, complete = _filtered(scaled, samplings, point, width)
    for i, ok in enumerate(complete):
        if plain[i]:
            tokens[i] = int(
                _inverse_cdf(torch.softmax(scaled[i : i + 1], dim=-1, dtype=torch.float64), point[i : i + 1])
            )
        elif not ok:  # a flat distribution: the kept set is wider than the candidates
            again, _ = _filtered(scaled[i : i + 1], samplings[i : i + 1], point[i : i + 1], x.shape[-1])
            tokens[i] = again[0]
    return tokens


def _filtered(scaled: Tensor, samplings: list[Sampling], point: Tensor, width: int) -> tuple[list[int], list[bool]]:
    """Draw among the ``width`` most likely ids; second result: whether the filters certainly keep no others."""
    device, vocabulary = scaled.device, scaled.shape[-1]
    values, ids = scaled.topk(width, dim=-1)
    p = torch.exp(values.double() - torch.logsumexp(scaled.double(), dim=-1, keepdim=True))
    top_k = torch.tensor([[s.top_k if s.top_k > 0 else vocabulary] for s in samplings], device=device)
    top_p = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64, device=device)
    min_p = torch.tensor([[s.min_p] for s in samplings], dtype=torch.float64, device=device)
    p = torch.where(torch.arange(width, device=device) < top_k, p, 0.0)
    # with top_k, renormalise over the k kept; without, p is over the whole vocabulary and need not sum to 1 here
    p = p / torch.where(top_k < vocabulary, p.sum(dim=-1, keepdim=True), 1.0)
    below = p.cumsum(dim=-1)
    keep = ((below - p) < top_p) & (p >= min_p * p[:, :1])
    keep[:, 0] = True
    complete = (top_k <= width) | (below[:, -1:] >= top_p) & (top_p < 1) | (p[:, -1:] < min_p * p[:, :1])
    complete |= torch.tensor(width == vocabulary, device=device)
    kept = torch.where(keep, p, 0.0)
    chosen = ids.gather(1, _inverse_cdf(kept, point)[:, None])[:, 0]
    return chosen.tolist(), complete[:, 0].tolist()


def _inverse_cdf(p: Tensor, point: Tensor) -> Tensor:
    """Index of the first entry at which the running sum of ``p`` [n, W] exceeds ``point`` [n, 1] of the total."""
    running = p.cumsum(dim=-1)
    index = torch.searchsorted(running, point * running[:, -1:], right=True)[:, 0]
    last = (p > 0).to(torch.int32).cumsum(dim=-1).argmax(dim=-1)  # rounding must not pick an entry of probability zero
    return torch.minimum(index, last)
