"""KV Flash, policy ``exact``, in every family: with pages in host memory the logits are those of whole tables."""

from __future__ import annotations

from lucevisor.kv.residency import Residency
from tests.combinations import combinations
from tests.families.golden import FIXTURES, Golden
from tests.families.paged_texts import Texts, run, tokens_at
from tests.families.pipeline import How, load_stages

POOL = Residency(9, "exact")
EXACT = How(host_pages=80)
CHUNKS = {
    "whole chunks": [256, 256, 256, 132],
    "chunks across pages": [100, 37, 190, 256, 1, 1, 130, 185],
    "decodes": [256, 256, 62, 1, 1, 1, 1, 60, 1, 1, 1, 1],
}


@combinations(indirect=["golden"], golden=FIXTURES, how=CHUNKS)
def test_logits_are_those_without_kv_flash(golden: Golden, how: str) -> None:
    splits = golden.layer_splits()[: list(CHUNKS).index(how)]  # one to three stages
    found = run(golden.spec, load_stages(golden.spec, splits, EXACT), CHUNKS[how], POOL)
    wanted = run(golden.spec, golden.whole, CHUNKS[how], None)
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


def test_a_pool_of_a_quarter_of_the_context(golden: Golden) -> None:
    chunks = [*[64] * 23, 63, 1]
    found = run(golden.spec, load_stages(golden.spec, (), EXACT), chunks, Residency(6, "exact"))
    wanted = run(golden.spec, golden.whole, chunks, None)
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


def test_sequences_with_and_without_host_pages_share_a_step(golden: Golden) -> None:
    n_tokens, v = {"a": 700, "b": 100, "c": 640}, golden.spec.vocabulary
    steps = [{"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 3, "c": 60}, {"a": 1, "b": 1, "c": 1}]
    stages = load_stages(golden.spec, golden.layer_splits()[:1], EXACT)
    found, wanted = [], []
    for texts, rows in ((Texts(golden.spec, stages, POOL), found), (Texts(golden.spec, golden.whole, None), wanted)):
        for name, n in n_tokens.items():
            for start in range(0, n, 256):
                texts.run(**{name: tokens_at(start, min(256, n - start), v)})
        for i, part in enumerate(steps):
            rows.append(texts.run(**{name: tokens_at(i, n, v) for name, n in part.items()}))
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())
