"""Draft vocabularies: which tokens have rows, that the rows are exact, and what is drafted from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from daemons.device import CPU
from daemons.draft.dflash import Dflash
from daemons.draft.stage import DraftJob, DraftStage
from daemons.draft.vocabulary import FEW_TOKENS, DraftVocabulary, copy_rows
from daemons.ops.selection import KernelSelector
from daemons.weights.packed import PackedWeights, repack, unpack
from lucevisor.model.quant_types import BY_NAME, REPACKED
from lucevisor.model.values import Backend, Dtype, KvGroup
from lucevisor.protocol.steps import Drafted, OpenSequence, SamplingParams, SetPages, Slice, Step
from tests.drafters.drafted import FEW, KINDS, MANY, Packed, draft_batch

IDS = [(i * 37 + 5) % 288 for i in range(40)]
NEWEST = 192
N_AHEAD = 4


# ---- rows


def random_packed(kind: str, rows: int, columns: int) -> PackedWeights:
    """Any bytes, also of numbers that are none."""
    type_ = BY_NAME[kind]
    n_bytes = columns // type_.block_elements * type_.block_bytes
    raw = np.random.default_rng(rows).integers(0, 256, (rows, n_bytes), dtype=np.uint8)
    return repack(type_, torch.from_numpy(raw))


@pytest.mark.parametrize("kind", sorted(REPACKED))
def test_copied_rows_have_the_same_bytes(kind: str) -> None:
    columns = 512 + (32 if BY_NAME[kind].block_elements == 32 else 256)
    source, target = random_packed(kind, 53, columns), random_packed(kind, 37, columns)
    wanted, whole = unpack(target, columns), unpack(source, columns)
    from_rows, to_rows = torch.tensor([52, 0, 17, 16, 31]), torch.tensor([3, 36, 20, 0, 15])
    copy_rows(source, from_rows, target, to_rows)
    wanted[to_rows] = whole[from_rows]
    assert torch.equal(unpack(target, columns), wanted)
    assert torch.equal(unpack(source, columns), whole)


def vocabulary_of(n_tokens: int, n_rows: int) -> DraftVocabulary:
    whole = random_packed("Q8_0", n_tokens, 32)
    return DraftVocabulary(whole, 32, n_rows, KernelSelector(CPU, torch.float32, kernels=True))


@settings(max_examples=100, deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.lists(st.integers(-2, 70), max_size=3 * FEW_TOKENS), st.booleans()), min_size=1, max_size=8
    )
)
def test_it_has_the_tokens_that_were_used_last(batches: list[tuple[list[int], bool]]) -> None:
    """Against a plain list of tokens in the order of use.  Tokens that stay keep their rows, rows their places."""
    v = vocabulary_of(n_tokens=64, n_rows=16)
    used, places = list(reversed(range(16))), (v.packed.tiles.data_ptr(), v.ids.data_ptr())
    before = v.ids.tolist()
    for tokens, renewed in batches:
        v.mark_used(tokens)
        for token in tokens:
            if 0 <= token < 64:
                used = [t for t in used if t != token] + [token]
        if not renewed:
            continue
        v.renew()
        used = used[-16:]
        ids = v.ids.tolist()
        assert sorted(ids) == sorted(used)
        assert all(a == b for a, b in zip(before, ids, strict=True) if a in used)
        assert torch.equal(unpack(v.packed, 32), unpack(v.whole, 32)[v.ids])
        before = ids
    assert (v.packed.tiles.data_ptr(), v.ids.data_ptr()) == places


# ---- sizes


@pytest.fixture(params=KINDS)
def packed(request, tmp_path) -> Packed:
    return Packed(tmp_path, request.param)


def test_a_drafter_takes_what_is_planned(packed: Packed) -> None:
    whole, part = packed.draft(), packed.draft(FEW)
    assert (whole.draft_vocabulary, whole.drafter.vocabulary.ids) == (None, None)
    assert part.draft_vocabulary is not None
    planned = part.spec.draft_vocabulary_bytes(Backend.CUDA, Dtype.FLOAT32, FEW)
    assert planned == part.draft_vocabulary.n_bytes == 16 * (256 // 32 * 34 + 8)
    assert part.weight_bytes - whole.weight_bytes == planned
    [use] = part.usage()
    assert use.weight_bytes == part.weight_bytes
    assert part.kernels["cpu draft vocabulary"] == "16 of 288 tokens"
    assert part.spec.draft_vocabulary_bytes(Backend.CPU, Dtype.BFLOAT16, FEW) == 0


# ---- drafts


def drafted(stage: DraftStage, n: int = N_AHEAD, between: Sequence[int] = ()) -> Drafted:
    """Drafts behind a prompt whose captures are random numbers; ``between``: tokens seen before its last one."""
    captures = torch.randn(len(IDS), width_of(stage), generator=torch.Generator().manual_seed(3))
    stage.reset()
    stage.apply([OpenSequence(0, 0, SamplingParams()), SetPages(0, KvGroup.FULL, 0, [5, 3])])
    assert stage.run(Step(1, 0, [], [Slice(0, 0, IDS[:-1], True)]), [captures[:-1]], [[]]) == []
    if stage.draft_vocabulary is not None:
        stage.draft_vocabulary.mark_used(between)
    last = Slice(0, len(IDS) - 1, IDS[-1:], True, num_draft_tokens=n)
    drafts = stage.run(Step(2, 0, [], [last]), [captures[-1:]], [[NEWEST]])
    assert isinstance(drafts, list)
    return drafts[0]


def width_of(stage: DraftStage) -> int:
    return sum(len(source.layers) for source in stage.plan.sources) * stage.spec.model.hidden_size


@torch.inference_mode()
def needed(stage: DraftStage, found: Drafted) -> list[int]:
    """The tokens that a draft chooses from: in version 2, the best of each position."""
    drafter = stage.drafter
    if not isinstance(drafter, Dflash) or drafter.selector is None:
        return found.tokens
    job = DraftJob(Slice(0, 0, [], True, num_draft_tokens=len(found.tokens)), 0, NEWEST, len(IDS), len(IDS) - 1)
    hidden = drafter.hidden(draft_batch(stage, job))
    newest = torch.tensor([NEWEST])
    candidates = drafter.selector.candidates(hidden, drafter.logits(hidden), newest)
    tokens: list[int] = candidates.tokens.unique().tolist()
    return tokens


@torch.inference_mode()
def see(stage: DraftStage, tokens: Sequence[int]) -> list[int]:
    """Let a stage see tokens; those that it has rows of."""
    assert stage.draft_vocabulary is not None
    stage.draft_vocabulary.mark_used(tokens)
    stage.draft_vocabulary.renew()
    return stage.draft_vocabulary.ids.tolist()


def test_with_the_tokens_that_matter_the_drafts_are_those_of_all(packed: Packed) -> None:
    whole, part = packed.draft(), packed.draft(MANY)
    wanted = drafted(whole)
    matter = needed(whole, wanted)
    assert set(matter) <= set(see(part, matter))
    found = drafted(part)
    assert found.tokens == wanted.tokens
    if len(matter) > N_AHEAD:  # probabilities among the candidates
        assert found.probabilities == pytest.approx(wanted.probabilities, rel=4e-4)
    else:  # among fewer tokens
        assert all(0 < a <= b * 1.001 for a, b in zip(wanted.probabilities, found.probabilities, strict=True))


def test_a_token_is_drafted_once_it_was_seen(packed: Packed) -> None:
    whole, part = packed.draft(), packed.draft(FEW)
    wanted = drafted(whole, 1)
    matter = needed(whole, wanted)
    before = drafted(part, 1)
    assert part.draft_vocabulary is not None
    assert set(part.draft_vocabulary.ids.tolist()) == {*IDS[-15:], NEWEST}
    assert not set(wanted.tokens) <= {*IDS[-15:], NEWEST}
    assert set(before.tokens) <= {*IDS[-15:], NEWEST}
    assert drafted(part, 1, between=matter).tokens == wanted.tokens
    assert {*matter, IDS[-1], NEWEST} <= set(part.draft_vocabulary.ids.tolist())
