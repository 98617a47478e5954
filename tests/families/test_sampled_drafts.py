"""Sampling with drafts draws from the model's own distribution: 20,000 draws with and 20,000 without, chi-square.

The demo model, real stages and the real sampler; drafts are the greedy continuation, so some are accepted and some
are not.  The two arms use different seeds: with equal ones they are equal token by token (tests/daemons/test_sampling).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemons.sampling import Sampler
from lucevisor.model.families import open_spec
from lucevisor.protocol.steps import Sampling, Slice
from lucevisor.text.tokenizer import Tokenizer
from tests.families.pipeline import Pipeline, load_stages

DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
SAMPLING = Sampling(temperature=0.8, top_p=0.9)
DRAWS, LENGTH, DRAFTS = 20_000, 4, 3
LEAST_EXPECTED = 5  # of a cell of the test, as is usual
LEAST_P = 1e-3  # of a false alarm, with these seeds once and for all

pytestmark = pytest.mark.slow


class Model:
    """Logits behind a prompt and a continuation, each computed once."""

    def __init__(self, prompt: str) -> None:
        spec = open_spec(DEMO)
        assert spec.files is not None
        self.vocabulary = spec.vocabulary
        self.prompt = Tokenizer.from_gguf(spec.files.metadata).encode(prompt)
        self.pipeline = Pipeline(spec, load_stages(spec, [4]))
        self.plain: dict[tuple[int, ...], Tensor] = {}
        self.verified: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def logits(self, prefix: tuple[int, ...], drafts: tuple[int, ...] = ()) -> Tensor:
        """Float32 [1 + drafts, V]: behind ``prefix``, and behind each of the drafts, from one verify slice."""
        key = prefix, drafts
        if key not in self.verified:
            context = [*self.prompt, *prefix]
            self.pipeline.open(0)
            self.pipeline.run((0, context[:-1]))
            self.verified[key] = self.pipeline.verify((0, [context[-1], *drafts], len(drafts)))
            self.pipeline.accept(0, len(drafts), 0)
            self.pipeline.close(0)
        return self.verified[key].clone()

    def guess(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """The greedy continuation."""
        found = prefix
        for _ in range(DRAFTS):
            if found not in self.plain:
                self.plain[found] = self.logits(found)
            found = (*found, int(self.plain[found].argmax()))
        return found[len(prefix) :]


def continuations(model: Model, seeds: range, *, drafting: bool) -> Counter[tuple[int, ...]]:
    """LENGTH tokens behind the prompt for each seed, by the sampler of the output stage."""
    open_: dict[tuple[int, ...], list[int]] = {(): list(seeds)}
    done: Counter[tuple[int, ...]] = Counter()
    while open_:
        later: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for prefix, mine in open_.items():
            drafts = model.guess(prefix) if drafting else ()
            for some in (mine[i : i + 500] for i in range(0, len(mine), 500)):
                for seed, tokens in zip(some, draw(model, some, prefix, drafts), strict=True):
                    found = (*prefix, *tokens)
                    if len(found) >= LENGTH:
                        done[found[:LENGTH]] += 1
                    else:
                        later[found].append(seed)
        open_ = later
    return done


def draw(model: Model, seeds: Sequence[int], prefix: tuple[int, ...], drafts: tuple[int, ...]) -> list[list[int]]:
    sampler = Sampler(model.vocabulary, torch.device("cpu"))
    start = len(model.prompt) + len(prefix) - 1
    slices = [Slice(i, start, [0, *drafts], True, len(drafts)) for i in range(len(seeds))]
    for i, seed in enumerate(seeds):
        sampler.open(i, Sampling(temperature=SAMPLING.temperature, top_p=SAMPLING.top_p, seed=seed), [])
    found: list[list[int]] = [[] for _ in seeds]
    for sampled in sampler.sample(slices, model.logits(prefix, drafts).repeat(len(seeds), 1)):
        found[sampled.sequence].append(sampled.token)
    return found


def p_value(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
    """Of the two-sample chi-square test; rare outcomes share a cell."""
    pooled = [(a[key], b[key]) for key in {*a, *b} if a[key] + b[key] >= 2 * LEAST_EXPECTED]
    rest = (sum(a.values()) - sum(x for x, _ in pooled), sum(b.values()) - sum(y for _, y in pooled))
    cells = [*pooled, *([rest] if sum(rest) >= 2 * LEAST_EXPECTED else [])]
    statistic = sum((x - y) ** 2 / (x + y) for x, y in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.fixture(scope="module")
def arms() -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    model = Model(
        "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"
        "os.path.join(path, *paths) joins one or more path"
    )
    with torch.inference_mode():
        return (
            continuations(model, range(DRAWS), drafting=False),
            continuations(model, range(DRAWS, 2 * DRAWS), drafting=True),
        )


def test_next_tokens(arms: tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]) -> None:
    first = [Counter[tuple[int, ...]]() for _ in arms]
    for counts, arm in zip(first, arms, strict=True):
        for found, n in arm.items():
            counts[found[:1]] += n
    assert len(first[0]) >= 3
    assert p_value(*first) > LEAST_P


def test_continuations_of_four_tokens(arms: tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]) -> None:
    assert len(arms[0]) > 20
    assert p_value(*arms) > LEAST_P


def test_the_test_sees_a_wrong_distribution(arms: tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]) -> None:
    """One draw in ten replaced by the most frequent outcome."""
    wrong = arms[1].copy()
    best = max(wrong, key=lambda key: wrong[key])
    for key in wrong:
        moved = wrong[key] // 10
        wrong[key] -= moved
        wrong[best] += moved
    assert p_value(arms[0], wrong) < LEAST_P
