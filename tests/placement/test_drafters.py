"""Where a drafter and the scoring model of PFlash go, what they take, and how many drafts and states there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from daemons.ops.operations import MAX_DECODE_TOKENS
from daemons.relevance.stage import ScoreStage
from lucevisor.config import Config, load
from lucevisor.model.drafters import DraftSpec, draft_paths, open_draft, read_draft_spec
from lucevisor.model.drafters.spec import MAX_RECURRENT_DRAFTS
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.placement import sizing
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_json, plan_rows, plan_text
from lucevisor.placement.result import Infeasible, Placement, PlacementError
from lucevisor.placement.sizing import DRAFT_SHARE
from lucevisor.placement.stages import LoadFiles, load_message
from lucevisor.protocol.loading import DraftKind, token_region_bytes
from tests.model.drafter_files import TARGET, UPSTREAM
from tests.model.qwen35_file import QWEN36_27B, write
from tests.placement.made import CPUS, box, configure, cpu, gpu, placed

DRAFT_27B = (3 * QWEN36_27B.channels + 16 * 128 + 48 * 128 + 48) * 4 * 48
"""Windows and updates of a draft in all layers."""
AUTO = {"kind": "auto"}
DFLASH = {"kind": "dflash", "path": "d.gguf"}


@pytest.fixture(scope="module")
def dflash(small) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(UPSTREAM)), small, "dflash")


@pytest.fixture(scope="module")
def head_27b(tmp_path_factory) -> tuple[ModelSpec, DraftSpec]:
    """The 27B shape in Q4_K_M with an MTP head."""
    path = tmp_path_factory.mktemp("gguf") / "27b-mtp.gguf"
    spec = open_spec(write(path, dataclasses.replace(QWEN36_27B, mtp=True)))
    assert spec.files is not None
    return spec, read_draft_spec(spec.files, spec, "mtp")


# ---- where it is and what it takes


def test_by_default_it_is_where_the_last_layers_are(small, dflash, tmp_path):
    p = placed(small, configure(tmp_path, CPUS, [1, 1], DFLASH, dtype="float32"), None, drafter=dflash)
    assert p.draft is not None
    assert p.draft_device is not None
    assert (str(p.draft.device), p.draft.index, p.draft.kind) == ("right:0", 2, DraftKind.DFLASH)
    assert p.draft.captures == dflash.captures
    assert p.groups == ("left", "right")
    own = dflash.layouts(Backend.CPU, Dtype.FLOAT32, with_output=True, with_embedding=False)
    assert p.draft_device.weight_bytes == sum(layout.n_bytes for layout in own)
    per_page = dflash.model.unit_bytes(KvGroup.FULL, dflash.layers, Dtype.FLOAT32)
    assert p.draft_device.state_bytes == p.pools.full_pages * per_page
    assert p.drafting.max_drafts > 1
    assert p.arenas[-1].region_bytes == token_region_bytes(p.max_sequences, p.drafting.max_drafts)
    assert [(a.boundary, a.capture, a.tokens) for a in p.arenas] == [
        (0, False, False), (0, True, False), (1, False, True),
    ]  # fmt: skip
    assert {a.n_regions for a in p.arenas} == {6}


def test_elsewhere_it_has_copies_of_embedding_and_output_matrix(small, dflash, tmp_path):
    here, there, one = (
        placed(small, configure(tmp_path, devices, split, DFLASH | where, dtype="float32"), None, drafter=dflash)
        for devices, split, where in (
            (CPUS, [1, 1], {}),
            (CPUS, [1, 1], {"device": "draft:0"}),
            (["left:0"], [1], {}),
        )
    )
    table = small.vocabulary * small.hidden_size * 4
    assert here.draft_device is not None
    assert there.draft_device is not None
    assert one.draft_device is not None
    assert there.draft_device.weight_bytes - here.draft_device.weight_bytes == table  # the output matrix
    assert here.draft_device.weight_bytes - one.draft_device.weight_bytes == table  # the embedding
    assert there.groups == ("left", "right", "draft")
    assert len([a for a in there.arenas if a.capture]) == 2
    assert any("draft:0 holds copies of the model's embedding and output matrix" in reason for reason in there.reasons)
    assert not any("holds copies of the model's embedding" in reason for reason in here.reasons)


def test_an_index_that_does_not_exist_is_refused_with_the_nearest(small, dflash, tmp_path):
    config = configure(tmp_path, ["left:0"], [1], DFLASH | {"device": "hip:7"}, dtype="float32")
    with pytest.raises(PlacementError) as caught:
        plan(small, config, {"left": [cpu()], "hip": [gpu(0), gpu(1)]}, drafter=dflash)
    assert (caught.value.key, caught.value.value) == ("draft.device", "hip:7")
    assert caught.value.hint == "nearest: hip:1"


def test_a_draft_vocabulary_has_room_beside_the_drafter(head_27b, dflash, small, tmp_path):
    """61,952 rows of 5,120 columns in Q6_K with a token id each, on a GPU, also beside a copy of the whole matrix."""
    spec, head = head_27b
    n_bytes = 61952 * (5120 // 256 * 210 + 8)
    assert n_bytes == 260_694_016
    for devices, where in ((["cuda:0"], {}), (["cuda:0"], {"device": "hip:0"})):
        config = configure(tmp_path, devices, [1], {"kind": "mtp"} | where, max_sequences=1, pages=1000)
        p = placed(spec, config, {"cuda": [gpu(0, 80)], "hip": [gpu(0, 80)]}, drafter=head)
        assert p.draft_device is not None
        layouts = head.layouts(Backend.CUDA, p.dtype, with_output=not where, with_embedding=not where)
        assert p.draft_device.weight_bytes == sum(layout.n_bytes for layout in layouts) + n_bytes
    assert head.draft_vocabulary_bytes(Backend.CPU, Dtype.BFLOAT16) == 0
    assert dflash.draft_vocabulary_bytes(Backend.CUDA, Dtype.BFLOAT16) == 0  # few tokens, none of them packed


# ---- when it does not fit


def test_an_automatic_drafter_that_does_not_fit_is_left_out(head_27b, tmp_path):
    spec, head = head_27b
    config = configure(tmp_path, ["cuda:0"], [1], AUTO, max_sequences=1)
    for gib in range(17, 26):
        result = plan(spec, config, {"cuda": [gpu(0, gib)]}, drafter=head)
        if isinstance(result, Infeasible) or result.draft is None:
            continue
        break
    assert isinstance(result, Placement)
    assert result.draft is not None
    without = plan(spec, config, {"cuda": [gpu(0, gib - 1)]}, drafter=head)
    assert isinstance(without, Placement), "the model alone fits into less"
    assert (without.draft, without.draft_device) == (None, None)
    assert without.draft_left_out
    (notice,) = without.notices
    assert "the drafter synthetic on cuda:0 is left out" in notice
    assert "draft.kind = mtp insists on it" in notice
    assert without.drafting.lookup
    assert not any(a.capture for a in without.arenas)


def test_a_configured_drafter_that_does_not_fit_is_refused_with_the_numbers(head_27b, tmp_path):
    spec, head = head_27b
    config = configure(tmp_path, ["cuda:0"], [1], {"kind": "mtp", "device": "hip:0"}, max_sequences=1, pages=600)
    result = plan(spec, config, {"cuda": [gpu(0, 40)], "hip": [gpu(0, 1)]}, drafter=head)
    assert isinstance(result, Infeasible)
    (shortage,) = result.shortages
    assert [str(device) for device in shortage.devices] == ["hip:0"]
    assert result.placement.draft_device is not None
    assert shortage.needed_bytes == result.placement.draft_device.needed_bytes
    assert "it fits with draft.kind = off" in result.advice
    assert "hip:0 is" in result.message


# ---- how many drafts, and what verifying them takes


@pytest.mark.parametrize(
    ("draft", "with_head", "expected"),
    [
        ({"kind": "off"}, False, (False, 0, False)),
        ({"kind": "auto"}, False, (True, 8, False)),
        ({"kind": "lookup"}, False, (True, 8, False)),
        ({"kind": "lookup", "width": 3}, False, (True, 3, True)),
        ({"kind": "auto"}, True, (True, 6, False)),
        ({"kind": "mtp"}, True, (False, 6, False)),
        ({"kind": "mtp", "width": 2}, True, (False, 2, True)),
    ],
)
def test_what_drafts(head_27b, tmp_path, draft, with_head, expected):
    spec, head = head_27b
    p = placed(spec, configure(tmp_path, ["cuda:0"], [1], draft), None, drafter=head if with_head else None)
    assert (p.drafting.lookup, p.drafting.max_drafts, p.drafting.fixed) == expected
    assert p.max_step_tokens == 512 + 8 * (1 + expected[1])


def test_a_width_beyond_the_drafters_is_refused(small, dflash, tmp_path):
    config = configure(tmp_path, CPUS, [1, 1], DFLASH | {"width": 40})
    with pytest.raises(PlacementError, match="more than the 7 tokens that the drafter") as caught:
        plan(small, config, None, drafter=dflash)
    assert (caught.value.key, caught.value.value, caught.value.hint) == ("draft.width", 40, "nearest: 7")


def test_a_width_beyond_what_recurrent_kernels_keep_is_refused(small, tmp_path):
    config = configure(tmp_path, CPUS, [1, 1], {"kind": "lookup", "width": 16})
    with pytest.raises(PlacementError, match="more than the 15 drafts that a model with recurrent states verifies"):
        plan(small, config, None)
    assert MAX_DECODE_TOKENS == 1 + MAX_RECURRENT_DRAFTS


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ({"kind": "lookup"}, (15, 31)),
        ({"kind": "lookup", "width": 3}, (0, 0)),
        ({"kind": "off"}, (0, 0)),
    ],
)
def test_a_sequence_alone_looks_up_what_a_slice_takes_in_the_memory_of_several(small, tmp_path, draft, expected):
    """With recurrent states, and without."""
    full = open_spec(TARGET.parents[1] / "qwen2" / "model.gguf")
    for spec, n in zip((small, full), expected, strict=True):
        p = placed(spec, configure(tmp_path, CPUS, [1, 1], draft))
        assert p.drafting.max_lookup == n
        drafts = max(p.max_sequences * p.drafting.max_drafts, n)
        assert p.max_step_tokens == p.prefill_chunk + p.max_sequences + drafts == 512 + 8 * (1 + p.drafting.max_drafts)


def test_a_width_that_no_chunk_holds_is_cut_and_told_of(small, tmp_path):
    p = placed(small, configure(tmp_path, CPUS, [1, 1], {"kind": "lookup", "width": 12}, prefill_chunk=8))
    assert p.drafting.max_drafts == p.pools.draft_states == 7  # of one sequence, as no memory is known
    assert any("draft.width = 12 is cut to 7" in notice for notice in p.notices)


def test_verifying_takes_updates_and_windows_beside_the_states(head_27b, tmp_path):
    spec, _ = head_27b
    usual = {"max_sequences": 4, "pages": 1000, "max_context": 64000}
    draft = {"kind": "lookup", "width": 3}
    p, without = (
        placed(spec, configure(tmp_path, ["cuda:0"], [1], one, **usual), {"cuda": [gpu(0, 80)]})
        for one in (draft, {"kind": "off"})
    )
    assert (p.pools.states, p.pools.draft_states) == (4 + 1, 3 * 4)
    assert (without.pools.states, without.pools.draft_states) == (4 + 1, 0)
    more = p.devices[0].state_bytes - without.devices[0].state_bytes
    assert more == 12 * DRAFT_27B
    assert 0.05 * spec.unit_bytes(KvGroup.RECURRENT, LayerRange(0, 64), Dtype.BFLOAT16) > DRAFT_27B
    reason = "updates for verifying 12 drafts, 7.13 MiB each: all of 4 sequences"
    assert reason in p.reasons
    assert "updates for 12 drafts" in plan_text(p)
    assert plan_json(p)["pages"]["draft_states"] == 12


CASES = [(19, 1), (20, 8), (24, 8), (32, 64)]


@pytest.mark.parametrize(("gib", "max_sequences"), CASES)
def test_verifying_takes_its_share_and_never_the_pages_of_others(head_27b, tmp_path, monkeypatch, gib, max_sequences):
    spec, _ = head_27b
    draft = {"kind": "lookup", "width": 7}
    config, inventory = (
        configure(tmp_path, ["cuda:0"], [1], draft, max_sequences=max_sequences, prefill_chunk=512),
        {"cuda": [gpu(0, gib)]},
    )
    drafting = placed(spec, config, inventory)
    with monkeypatch.context() as patch:
        patch.setattr(sizing, "DRAFT_SHARE", 0.0)
        without = placed(spec, config, inventory)
    n_drafts = drafting.pools.draft_states
    assert without.pools.states == drafting.pools.states == max_sequences + 1
    assert 0 <= n_drafts <= 7 * max_sequences
    assert drafting.pools.full_pages >= (1 - DRAFT_SHARE) * without.pools.full_pages
    assert drafting.max_context >= (1 - DRAFT_SHARE) * without.max_context
    device = drafting.devices[0]
    usable = (device.free_bytes or 0) - device.reserve_bytes
    assert device.needed_bytes <= usable
    if n_drafts < 7 * max_sequences:
        assert any(f"verifying {n_drafts} drafts, 7.13 MiB each: as many" in reason for reason in drafting.reasons)


# ---- what is shown


def test_the_plan_shows_the_drafter(head_27b, tmp_path):
    spec, head = head_27b
    p = placed(spec, configure(tmp_path, ["cuda:0", "hip:0", "hip:1"], [1, 1, 1], AUTO), box(), drafter=head)
    *_, last = plan_rows(p)
    assert (last.group, last.layers, last.verdict) == ("hip", "drafter", "fits")
    shown = plan_text(p)
    assert "drafts: made by synthetic (mtp) on hip:1 or looked up in the text, at most 6 of a sequence" in shown
    assert "drafter: on hip:1, where the last layers are; it reads what comes out of layers 63" in shown
    found = plan_json(p)["draft"]
    assert isinstance(found, dict)
    assert (found["kind"], found["stage"], found["captures"], found["left_out"]) == ("mtp", 2, [63], None)
    assert found["device"]["device"] == "hip:1"
    without = plan_json(placed(spec, configure(tmp_path, ["cuda:0"], [1]), {"cuda": [gpu(0, 80)]}))["draft"]
    assert without == {
        "kind": None, "lookup": False, "max_drafts": 0, "fixed": False, "left_out": None, "stage": None,
        "captures": [], "device": None,
    }  # fmt: skip


# ---- the scoring model of PFlash


SCORER = Path(__file__).parents[2] / "etc" / "demo" / "demo-scorer-q8_0.gguf"


@pytest.fixture(scope="module")
def scorer() -> ModelSpec:
    return open_spec(SCORER)


def configured(tmp_path: Path, *pflash: str, devices: list[str] = CPUS, **engine) -> Config:
    config = configure(tmp_path, devices, [1] * len(devices), **engine)
    return load(config.file, ["pflash.mode=always", "pflash.path=s.gguf", *(f"pflash.{each}" for each in pflash)])


def test_the_scoring_model_is_where_it_is_configured_else_beside_the_last_layers(small, scorer, tmp_path):
    p = placed(small, configured(tmp_path, dtype="float32"), None, scorer=scorer)
    assert p.scorer is not None
    assert (str(p.scorer.device), p.scorer.window_tokens, p.scorer.step_tokens) == ("right:0", 8192, 512)
    p = placed(small, configured(tmp_path, "device=left:0", "window=600", dtype="float32"), None, scorer=scorer)
    assert p.scorer is not None
    assert (p.scorer.group, p.scorer.window_tokens) == ("left", 600)
    assert [row.layers for row in plan_rows(p)][-1] == "scoring"
    assert "scoring model: lucevisor-demo-scorer on left:0, as configured" in plan_text(p)
    assert plan_json(p)["pflash"]["name"] == "lucevisor-demo-scorer"
    assert plan_json(placed(small, configured(tmp_path, dtype="float32")))["pflash"] is None


def test_the_daemon_takes_the_bytes_that_were_planned(small, scorer, tmp_path):
    p = placed(small, configured(tmp_path, "window=1000", dtype="float32"), None, scorer=scorer)
    assert p.scorer_device is not None
    assert load_message(p, "left", LoadFiles([str(TARGET)])).score is None
    message = load_message(p, "right", LoadFiles([str(TARGET)]), score_files=[str(SCORER)])
    use = ScoreStage.load(message, Backend.CPU, lambda _: None).usage()
    assert (use.weight_bytes, use.state_bytes) == (p.scorer_device.weight_bytes, p.scorer_device.state_bytes)


def test_memory_of_the_scoring_model_is_not_the_models(small, scorer, tmp_path):
    inventory = {"left": [cpu(8)], "right": [cpu(8)]}
    config = configured(tmp_path, dtype="float32", max_sequences=64)
    without, beside = placed(small, config, inventory), placed(small, config, inventory, scorer=scorer)
    assert beside.pools.full_pages <= without.pools.full_pages
    tight = {"left": [cpu(1 / 64)], "right": [cpu(1 / 64)]}
    found = plan(small, config, tight, scorer=scorer)
    assert isinstance(found, Infeasible)
    needed = found.shortages[0].needed_bytes
    alone = plan(small, config, tight)
    assert isinstance(alone, Infeasible)
    assert found.placement.scorer_device is not None
    assert needed == alone.shortages[0].needed_bytes + found.placement.scorer_device.needed_bytes


def test_a_device_that_does_not_exist_is_refused_by_name(small, scorer, tmp_path):
    config = configured(tmp_path, "device=cuda:7", devices=["cuda:0"])
    with pytest.raises(PlacementError) as caught:
        placed(small, config, {"cuda": [gpu()]}, scorer=scorer)
    assert caught.value.key == "pflash.device"
    assert "nearest: cuda:0" in caught.value.hint
