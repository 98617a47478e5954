"""KV Flash in every family: attention over resident pages equals attention over all pages with the others masked."""

from __future__ import annotations

import pytest
from torch import Tensor

from daemons.kv.batch import Group
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import HEAD_PAGES
from lucevisor.model.values import PAGE_TOKENS
from tests.combinations import combinations
from tests.families.golden import KINDS, Golden, each_kind
from tests.families.paged_texts import Texts, masked, run, tokens_at
from tests.families.pipeline import How, load_stages

POOL = Residency(9)
CHUNKS = {
    "whole chunks": [256, 256, 256, 132],
    "chunks across pages": [100, 37, 190, 256, 1, 1, 130, 185],
    "decodes": [256, 256, 62, 1, 1, 1, 1, 60, 1, 1, 1, 1],
}


def out_at(chunks: list[int]) -> dict[int, range]:
    """By the start of each slice, the pages behind the head that are out."""
    found, start = {}, 0
    for n in chunks:
        n_out = max(0, -(-(start + n) // PAGE_TOKENS) - POOL.pool_pages)
        found[start] = range(HEAD_PAGES, HEAD_PAGES + n_out)
        start += n
    return found


@combinations(indirect=["golden"], golden=KINDS, how=CHUNKS)
def test_resident_pages_are_what_is_attended_to(golden: Golden, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = CHUNKS[how]
    splits = golden.layer_splits()[: list(CHUNKS).index(how)]  # one to three stages
    found = run(golden.spec, load_stages(golden.spec, splits), chunks, POOL)
    full = run(golden.spec, golden.whole, chunks, None)
    monkeypatch.setattr(Group, "keys", masked(out_at(chunks)))
    expected = run(golden.spec, golden.whole, chunks, None)
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 2e-5 * scale
    assert float((full - expected).abs().max()) > 1e-3 * scale  # what is out would have mattered


@each_kind
def test_sequences_with_unequal_gaps_share_a_step(golden: Golden) -> None:
    n_tokens, v = {"a": 700, "b": 100, "c": 640}, golden.spec.vocabulary
    steps = [{"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 3, "c": 60}, {"a": 1, "b": 1, "c": 1}]

    def prompts(texts: Texts, names: str) -> None:
        for name in names:
            for start in range(0, n_tokens[name], 256):
                texts.run(**{name: tokens_at(start, min(256, n_tokens[name] - start), v)})

    expected: dict[str, list[Tensor]] = {}
    for name in n_tokens:
        alone = Texts(golden.spec, golden.whole, POOL)
        prompts(alone, name)
        expected[name] = [alone.run(**{name: tokens_at(i, part[name], v)}) for i, part in enumerate(steps)]
    together = Texts(golden.spec, golden.whole, POOL)
    prompts(together, "abc")
    for i, part in enumerate(steps):
        rows = together.run(**{name: tokens_at(i, n, v) for name, n in part.items()}).split(list(part.values()))
        for name, found in zip(part, rows, strict=True):
            wanted = expected[name][i]
            assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


# ---- pages in host memory (policy ``exact``)


HOST_POOL = Residency(9, "exact")
EXACT = How(host_pages=80)


@combinations(indirect=["golden"], golden=KINDS, how=CHUNKS)
def test_logits_are_those_without_kv_flash(golden: Golden, how: str) -> None:
    splits = golden.layer_splits()[: list(CHUNKS).index(how)]  # one to three stages
    found = run(golden.spec, load_stages(golden.spec, splits, EXACT), CHUNKS[how], HOST_POOL)
    wanted = run(golden.spec, golden.whole, CHUNKS[how], None)
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


@each_kind
def test_sequences_with_and_without_host_pages_share_a_step(golden: Golden) -> None:
    n_tokens, v = {"a": 700, "b": 100, "c": 640}, golden.spec.vocabulary
    steps = [{"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 3, "c": 60}, {"a": 1, "b": 1, "c": 1}]
    stages = load_stages(golden.spec, golden.layer_splits()[:1], EXACT)
    found, wanted = [], []
    for texts, rows in (
        (Texts(golden.spec, stages, HOST_POOL), found),
        (Texts(golden.spec, golden.whole, None), wanted),
    ):
        for name, n in n_tokens.items():
            for start in range(0, n, 256):
                texts.run(**{name: tokens_at(start, min(256, n - start), v)})
        for i, part in enumerate(steps):
            rows.append(texts.run(**{name: tokens_at(i, n, v) for name, n in part.items()}))
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())
