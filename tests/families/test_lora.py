"""LoRA adapters: every family against models that they are merged into, and several in one step."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from daemons.errors import LoadError, StateError
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.lora_files import adapter_bytes, open_adapter, with_adapters
from lucevisor.model.values import Dtype
from tests.families.adapters import random_pairs, write_adapter, write_merged
from tests.families.golden import GOLDEN, OPTIONS, each_kind, opened
from tests.families.pipeline import How, Pipeline, load_stages


@pytest.fixture
def adapted(golden, tmp_path):
    """Return a spec with an adapter of all matrices, and the spec of the model that it is merged into."""
    pairs = random_pairs(golden.spec, 4, 1)
    file = write_adapter(tmp_path / "a.gguf", golden.spec.architecture, pairs, alpha=8.0)
    spec = with_adapters(golden.spec, [open_adapter("a", file, 0.5, golden.spec)])
    merged = write_merged(tmp_path / "merged.gguf", GOLDEN / golden.name / "model.gguf", pairs, 0.5 * 8.0 / 4)
    return spec, open_spec(merged, OPTIONS.get(golden.name))


def logits_of(spec, ids, split=(), adapter=""):
    pipeline = Pipeline(spec, load_stages(spec, split))
    pipeline.open(0, adapter=adapter)
    return torch.cat([pipeline.run((0, ids[:40])), *(pipeline.run((0, [token])) for token in ids[40:44])])


def assert_near(found, wanted):
    """Two orders of the same float32 sums; an adapter changes these logits by more than their deviation."""
    worst = (found - wanted).abs().max() / wanted.std()
    assert worst < 2e-4, f"{worst:.1e} of the logits' deviation"


@each_kind
def test_an_adapter_gives_the_logits_of_the_model_that_it_is_merged_into(golden, adapted):
    spec, merged = adapted
    ids, splits = golden.ids[:44], golden.layer_splits()
    wanted, plain = logits_of(merged, ids), logits_of(golden.spec, ids)
    assert (wanted - plain).std() > 0.015 * plain.std()
    for split in ([], splits[:1], splits[:: max(1, len(splits) - 1)]):
        assert_near(logits_of(spec, ids, split, "a"), wanted)
    assert torch.equal(logits_of(spec, ids), plain)


@each_kind
def test_a_shard_takes_the_bytes_that_are_planned(golden, adapted):
    spec, _ = adapted
    split = golden.layer_splits()[:1]
    for stage, plain in zip(load_stages(spec, split), load_stages(golden.spec, split), strict=True):
        [shard], [other] = stage.shards, plain.shards
        ends = {"embedding": stage.embedding, "output": stage.output}
        planned = adapter_bytes(spec, shard.plan.layers, **ends, dtype=Dtype.FLOAT32)
        assert shard.weight_bytes - other.weight_bytes == planned > 0


@pytest.mark.parametrize(("name", "n_stages"), [("llama", 2), ("gemma3", 3)])
def test_logits_are_those_of_peft(name, n_stages):
    golden, folder = opened(name), GOLDEN / "lora"
    spec = with_adapters(golden.spec, [open_adapter("a", folder / f"{name}.gguf", 1.0, golden.spec)])
    stages = load_stages(spec, golden.layer_splits()[: n_stages - 1])
    with np.load(folder / f"{name}.npz") as found:
        ids, wanted = found["input_ids"].tolist(), torch.from_numpy(found["logits"])
    assert ids == golden.ids
    pipeline = Pipeline(spec, stages)
    pipeline.open(0, adapter="a")
    assert_near(pipeline.run_in_chunks(0, ids, 32), wanted)
    assert (wanted - golden.logits).std() > 0.1 * wanted.std()


# ---- several in one step


def eight(spec, folder):
    """Eight adapters of different ranks and tensors, of float32, float16 and q8_0 numbers."""
    some = (["attn_q.weight"], ["ffn_gate.weight", "ffn_down.weight"], ["token_embd.weight", "attn_v.weight"], [])
    return with_adapters(
        spec,
        [
            open_adapter(
                f"a{i}",
                write_adapter(
                    folder / f"{i}.gguf",
                    spec.architecture,
                    random_pairs(spec, 1 + i, 10 + i, some[i % 4]),
                    alpha=float(2 * i),
                    dtype=np.float16 if i % 2 else np.float32,
                ),
                1.0 + i / 8,
                spec,
            )
            for i in range(8)
        ],
    )


def answers(pipeline, prompts, *, together):
    """Logits of the prompts, then of five more tokens of each, by sequence."""
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in prompts}
    for sequence in prompts:
        pipeline.open(sequence, adapter=f"a{sequence}" if sequence < 8 else "")
    for begin, end in ((0, 24), *((n, n + 1) for n in range(24, 29))):
        parts = [(sequence, ids[begin:end]) for sequence, ids in prompts.items()]
        for step in [parts] if together else [[part] for part in parts]:
            logits = pipeline.run(*step).split(end - begin)
            for (sequence, _), rows in zip(step, logits, strict=True):
                found[sequence].append(rows)
    for sequence in prompts:
        pipeline.close(sequence)
    return {sequence: torch.cat(rows) for sequence, rows in found.items()}


@pytest.mark.parametrize(("name", "n_stages"), [("llama", 1), ("qwen35", 2), ("gemma3", 3)])
def test_eight_adapters_in_one_step_answer_as_each_alone(name, n_stages, tmp_path):
    golden = opened(name)
    spec = eight(golden.spec, tmp_path)
    splits = golden.layer_splits()
    pipeline = Pipeline(spec, load_stages(spec, splits[: n_stages - 1]))
    prompts = {sequence: golden.ids[sequence : sequence + 29] for sequence in (3, 8, 0, 5, 1, 2, 9, 7, 4, 6)}
    alone = answers(pipeline, prompts, together=False)
    for sequence, logits in answers(pipeline, prompts, together=True).items():
        assert_near(logits, alone[sequence])
    plain = answers(golden.pipeline(), {8: prompts[8]}, together=False)[8]
    assert torch.equal(alone[8], plain)
    assert len({tuple(logits[0, :4].tolist()) for logits in alone.values()}) == len(prompts)


@pytest.mark.slow
def test_with_deterministic_neighbours_change_no_bit(tmp_path):
    golden, dtype = opened("qwen35"), Dtype.BFLOAT16
    spec = eight(golden.spec, tmp_path)
    pipeline = Pipeline(spec, load_stages(spec, how=How(dtype, dtype, deterministic=True)))
    prompts = {sequence: golden.ids[sequence : sequence + 29] for sequence in range(10)}
    alone = answers(pipeline, prompts, together=False)
    for sequence, logits in answers(pipeline, prompts, together=True).items():
        assert torch.equal(logits, alone[sequence]), sequence


def test_an_adapter_that_is_not_loaded_is_refused_and_nothing_is_opened():
    pipeline = opened("llama").pipeline()
    with pytest.raises(StateError, match="the adapter 'b' is not loaded"):
        pipeline.open(0, adapter="b")
    pipeline.stages[0].reset()


# ---- files


def refusal(path):
    spec = opened("llama").spec
    with pytest.raises(GgufError) as error:
        open_adapter("a", path, 1.0, spec)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.type", "model", "is 'model', expected 'adapter'"),
        ("adapter.type", "control_vector", "is 'control_vector', expected 'lora'"),
        ("adapter.alora.invocation_tokens", "x", "is that of an activated LoRA"),
    ],
)
def test_a_file_that_is_no_plain_adapter_is_refused(key, value, message, tmp_path):
    pairs = random_pairs(opened("llama").spec, 2, 0, ["attn_q.weight"])
    path = write_adapter(tmp_path / "a.gguf", "llama", pairs, more={key: value})
    assert message in refusal(path)


def test_an_adapter_of_another_architecture_is_refused(tmp_path):
    pairs = random_pairs(opened("llama").spec, 2, 0, ["attn_q.weight"])
    found = refusal(write_adapter(tmp_path / "a.gguf", "qwen3", pairs))
    assert found.startswith("metadata value general.architecture: is 'qwen3', expected 'llama'")


A, B = np.ones((2, 64), np.float32), np.ones((128, 2), np.float32)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"blk.9.attn_q.weight": (A, B)}, "tensor 'blk.9.attn_q.weight.lora_a': is of no tensor of"),
        ({"blk.0.attn_norm.weight": (A, B)}, "tensor 'blk.0.attn_norm.weight.lora_a': changes what adapters cannot"),
        ({"blk.0.attn_q.weight": (A[:, :60], B)}, "lora_a': has shape [2, 60], expected [2, 64]"),
        ({"blk.0.attn_q.weight": (A, B[:120])}, "lora_b': has shape [120, 2], expected [128, 2]"),
        ({"blk.0.attn_q.weight": (A[:1], B)}, "lora_a': has shape [1, 64], expected [2, 64]"),
        ({}, "file: has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(pairs, message, tmp_path):
    assert message in refusal(write_adapter(tmp_path / "a.gguf", "llama", pairs))


def test_experts_are_refused_by_name(tmp_path):
    spec = opened("qwen3moe").spec
    name = "blk.0.ffn_down_exps.weight"
    pairs = {name: (np.ones((6, 2, 48), np.float32), np.ones((6, 64, 2), np.float32))}
    path = write_adapter(tmp_path / "a.gguf", "qwen3moe", pairs)
    with pytest.raises(GgufError, match=re.escape(f"tensor '{name}.lora_a': changes what adapters cannot change here")):
        open_adapter("a", path, 1.0, spec)


def test_half_a_pair_is_refused(tmp_path):
    pairs = random_pairs(opened("llama").spec, 2, 0, ["attn_q.weight"])
    path = write_adapter(tmp_path / "a.gguf", "llama", pairs)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_k.weight.lora_a"))
    assert "tensor 'blk.0.attn_k.weight.lora_b': is missing" in refusal(path)


def test_numbers_that_are_not_finite_fail_the_load_with_the_tensors_name(tmp_path):
    golden = opened("llama")
    pairs = random_pairs(golden.spec, 2, 0, ["attn_q.weight"])
    pairs["blk.1.attn_q.weight"][1][3, 1] = np.nan
    path = write_adapter(tmp_path / "a.gguf", "llama", pairs)
    spec = with_adapters(golden.spec, [open_adapter("a", path, 1.0, golden.spec)])
    with pytest.raises(LoadError, match=r"tensor .blk\.1\.attn_q\.weight\.lora_b.*NaN or infinite"):
        load_stages(spec)
