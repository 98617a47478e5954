"""Weights with NaN or infinite numbers are found when they are read, by the name of their tensor."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.errors import LoadError
from daemons.weights.finite import HALVES, any_invalid, checks_blocks
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import BY_NAME, NATIVE
from lucevisor.model.values import Backend
from tests.daemons.test_dequant import OTHERS, oracle
from tests.daemons.test_loading import make_shard
from tests.daemons.tiny_models import Tiny, random_blocks, write

INVALID = {"F32": (0x7F800000, 0x7FC00000), "BF16": (0x7F80, 0xFFC0)}  # infinity and NaN; float16 by default


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["F32", "F16", "BF16", *sorted(NATIVE - {"MXFP4"})]),
    seed=st.integers(0, 1 << 32),
    blocks=st.integers(1, 4),
)
def test_blocks_are_invalid_where_the_reference_gives_numbers_that_are_not_finite(kind, seed, blocks):
    raw = np.random.default_rng(seed).integers(0, 256, (2, blocks * BY_NAME[kind].block_bytes), dtype=np.uint8)
    assert bool(any_invalid(BY_NAME[kind], torch.from_numpy(raw))) == (not np.isfinite(oracle(kind, raw)).all())


def test_an_exponent_of_mxfp4_that_means_nan_is_invalid():
    raw = torch.zeros(2, 34, dtype=torch.uint8)
    assert not any_invalid(BY_NAME["MXFP4"], raw)
    raw[1, 17] = 255
    assert any_invalid(BY_NAME["MXFP4"], raw)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(kinds):
        if kinds not in made:
            made[kinds] = write(folder / f"{'-'.join(kinds)}.gguf", Tiny(tied=False), list(kinds))
        return made[kinds]

    return get


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA])
@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        (("Q4_K", "Q6_K"), "blk.1.ffn_gate.weight"),
        (("Q4_K", "Q6_K"), "token_embd.weight"),
        (("Q8_0", "Q5_K"), "output.weight"),
        (("Q4_0", "BF16"), "blk.2.ffn_down.weight"),
        (("F16",), "blk.0.ffn_up.weight"),
        (("F32",), "blk.3.ffn_up.weight"),
        (("F32",), "blk.0.attn_norm.weight"),
        (("F32",), "output_norm.weight"),
        (("IQ3_S", "IQ2_XXS"), "blk.0.ffn_gate.weight"),
    ],
)
def test_a_load_refuses_a_tensor_with_one_invalid_number_by_name(files, tmp_path, kinds, name, backend):
    path = shutil.copy(files(kinds), tmp_path / "damaged.gguf")
    tensor = open_spec(path).files.tensors[name]
    kind = tensor.kind
    n_bytes, at = (4 if kind.name == "F32" else 2), HALVES.get(kind.name, (0,))[-1]
    block = tensor.n_bytes // kind.block_bytes // 2
    for number in INVALID.get(kind.name, (0x7C00, 0xFE00)):
        with open(path, "r+b") as file:
            file.seek(tensor.offset + block * kind.block_bytes + at)
            file.write(number.to_bytes(n_bytes, "little"))
        with pytest.raises(LoadError, match="NaN or infinite") as caught:
            make_shard(open_spec(path), backend)
        assert name in caught.value.where
        assert "damaged.gguf" in caught.value.where
        assert caught.value.configuration


@pytest.mark.parametrize("kind", sorted(NATIVE) + OTHERS)
def test_usual_blocks_are_valid_or_checked_when_they_are_dequantised(kind):
    if kind in NATIVE:
        raw = random_blocks(np.random.default_rng(2), kind, 4, 1024)
        assert not any_invalid(BY_NAME[kind], torch.from_numpy(raw))
    assert checks_blocks(BY_NAME[kind]) == (kind in NATIVE)
