"""``engine.deterministic`` on a cpu in bfloat16: a row's logits have the same bits whatever is computed beside it.

Oracle: the same tokens in one step, alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.daemons.tiny_models import write_data
from tests.families.golden import FIXTURES, GOLDEN, OPTIONS
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.test_captured_steps import DEMO
from tests.families.test_weight_formats import MIXES, MODELS

pytestmark = needs_cpu_kernels
N = 100
OTHERS = 3
ALWAYS = ("laguna",)
"""Sliding attention and experts; the demo model has recurrent layers."""


def how(kv_dtype: Dtype = Dtype.BFLOAT16, *, deterministic: bool = True) -> How:
    return How(Dtype.BFLOAT16, kv_dtype, deterministic=deterministic)


class Served:
    """A model, and the logits of its text."""

    def __init__(self, spec: ModelSpec, layout: How) -> None:
        self.spec, self.how, self.whole = spec, layout, load_stages(spec, (), layout)
        self.ids = [(i * 37 + 11) % min(spec.vocabulary, 300) for i in range(N)]
        c = self.pipeline()
        self.logits = c.run((0, self.ids))

    def pipeline(self, stages: list[LoadedStage] | None = None) -> Pipeline:
        c = Pipeline(self.spec, stages or self.whole)
        c.open(0)
        return c

    def other(self, c: Pipeline, sequence: int, n: int) -> tuple[int, list[int]]:
        """The next tokens of another sequence, which begins anew when it is long."""
        if sequence in c.texts and c.texts[sequence].length > N:
            c.close(sequence)
        if sequence not in c.texts:
            c.open(sequence)
        return sequence, self.ids[sequence : sequence + n]


@cache
def served(name: str, kv_dtype: Dtype = Dtype.BFLOAT16) -> Served:
    spec = open_spec(DEMO) if name == "demo" else open_spec(GOLDEN / name / "model.gguf", OPTIONS.get(name))
    return Served(spec, how(kv_dtype))


def in_chunks(size: int) -> Callable[[Served], Tensor]:
    return lambda m: m.pipeline().run_in_chunks(0, m.ids, size)


def beside_others(m: Served) -> Tensor:
    """A chunk beside short prompts, then single tokens in a batch of 7, at another place of it each time."""
    c = m.pipeline()
    rows = [c.run((0, m.ids[:70]), m.other(c, 1, 40), m.other(c, 2, 3))[:70]]
    for i in range(70, N):
        parts = [m.other(c, s, 1) for s in range(1, 7)]
        parts.insert(i % 7, (0, [m.ids[i]]))
        rows.append(c.run(*parts)[i % 7].unsqueeze(0))
    return torch.cat(rows)


def verified(m: Served) -> Tensor:
    """Verify slices of four drafts, of which none to four are right."""
    c, at = m.pipeline(), 40
    rows = [c.run((0, m.ids[:40]))]
    while at < N:
        n_right = min(at % 5, N - at - 1)
        drafts = [*m.ids[at + 1 : at + 1 + n_right], *(7 for _ in range(4 - n_right))]
        rows.append(c.verify((0, [m.ids[at], *drafts], 4))[: 1 + n_right])
        c.accept(0, 4, n_right)
        at += 1 + n_right
    return torch.cat(rows)


def split_everywhere(m: Served) -> Tensor:
    """A stage for each layer, or as many as the model allows."""
    cuts = [b for b in range(1, m.spec.n_layers) if m.spec.legal_boundary(b)]
    return m.pipeline(load_stages(m.spec, cuts, m.how)).run((0, m.ids))


def by_one_thread(m: Served) -> Tensor:
    n = torch.get_num_threads()
    torch.set_num_threads(2 if n == 1 else 1)
    try:
        return m.pipeline().run((0, m.ids))
    finally:
        torch.set_num_threads(n)


WAYS = {
    "token by token": in_chunks(1),
    "chunks of 17": in_chunks(17),
    "chunks of 64": in_chunks(64),
    "beside others": beside_others,
    "verified": verified,
    "split": split_everywhere,
    "other threads": by_one_thread,
}
each_model = pytest.mark.parametrize(
    "name", ["demo", *(n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in FIXTURES)]
)


@each_model
def test_a_row_has_the_same_bits_however_it_is_computed(name: str) -> None:
    m = served(name)
    different = {way: rows_that_differ(work(m), m.logits) for way, work in WAYS.items()}
    assert different == dict.fromkeys(WAYS, 0)


def rows_that_differ(found: Tensor, wanted: Tensor) -> int:
    assert found.shape == wanted.shape
    return int((found != wanted).any(dim=-1).sum())


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [Dtype.Q8_0, Dtype.FLOAT32])
def test_pages_of_other_formats(kv_dtype: Dtype) -> None:
    m = served("demo", kv_dtype)
    ways = ("chunks of 17", "beside others", "verified")
    assert [rows_that_differ(WAYS[way](m), m.logits) for way in ways] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("name", MODELS)
def test_every_quantised_format(name: str, mix: str, tmp_path: Path) -> None:
    spec = open_spec(write_data(tmp_path / "model.gguf", MODELS[name], MIXES[mix]))
    m = Served(spec, how())
    assert {way: rows_that_differ(work(m), m.logits) for way, work in WAYS.items()} == dict.fromkeys(WAYS, 0)


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_any_schedule(data: st.DataObject) -> None:
    """Steps of any shape: of the text a few tokens, drafts or a chunk, beside up to three other sequences."""
    m, rows = served("demo"), list[Tensor]()
    c, at = m.pipeline(), 0
    while at < N:
        parts = [
            (*m.other(c, s, data.draw(st.integers(1, 70))), 0)
            for s in data.draw(st.sets(st.integers(1, OTHERS), max_size=OTHERS))
        ]
        place = data.draw(st.integers(0, len(parts)))
        if data.draw(st.booleans()):
            n = min(N - at, data.draw(st.integers(1, 80)))
            own, n_drafts = (0, m.ids[at : at + n], 0), 0
        else:
            n_drafts = data.draw(st.integers(1, 6))
            right = data.draw(st.integers(0, min(n_drafts, N - at - 1)))
            own = (0, [*m.ids[at : at + 1 + right], *(7 for _ in range(n_drafts - right))], n_drafts)
            n = 1 + right
        parts.insert(place, own)
        first = sum(len(tokens) for _, tokens, _ in parts[:place])
        rows.append(c.verify(*parts)[first : first + n])
        if n_drafts:
            c.accept(0, n_drafts, n - 1)
        at += n
    assert rows_that_differ(torch.cat(rows), m.logits) == 0


def test_without_it_they_differ() -> None:
    """Else these tests would show nothing."""
    m = Served(open_spec(DEMO), how(deterministic=False))
    assert rows_that_differ(in_chunks(1)(m), m.logits) > N // 2
