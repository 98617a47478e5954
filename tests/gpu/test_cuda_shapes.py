"""CUDA C++ GEMV equals its Triton form to the rounding of the result, on every shape that the five families have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bench.make_gguf import SHAPES, kind_of
from daemons.ops.handovers import Handovers
from daemons.ops.selection import KernelSelector
from daemons.weights.packed import PackedWeights, repack
from lucevisor.model.quant_types import BY_NAME
from tests.daemons.tiny_models import random_blocks
from tests.kernels.limits import UNITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(torch.version.hip) or torch.cuda.get_device_capability() < (8, 0),
        reason="needs an NVIDIA GPU from sm_80 on",
    ),
]

MODELS = ("qwen3.6-27b", "qwen3.6-35b-a3b", "gemma4-26b-a4b", "laguna-xs.2", "qwen3-0.6b")
STACKED = (("ffn_gate.", "ffn_up."), ("ffn_gate_shexp.", "ffn_up_shexp."), ("attn_qkv.", "attn_gate."))
"""Parts of names of tensors that are one matrix where their types are the same."""
MORE = {
    "gemma4-e2b": [(2048, 1536), (1536, 2048), (12288, 1536), (1536, 6144), (1536, 12288), (256, 1536), (1536, 256)],
    "qwen3-1.7b": [(2048, 2048), (12288, 2048), (2048, 6144)],
    "qwen3-4b": [(4096, 2560), (2560, 4096), (19456, 2560), (2560, 9728)],
    "qwen3-8b": [(6144, 4096), (24576, 4096), (4096, 12288)],
    "qwen3-32b": [(8192, 5120), (51200, 5120), (5120, 25600)],
}
"""Rows and columns of published models that bench/make_gguf.py does not make."""
ROWS_AT_MOST = 32768
"""More rows of a vocabulary are more of the same: blocks take tiles in turn."""


def shapes(name: str) -> set[tuple[str, int, int]]:
    """Types in the Q4_K_M mix, rows and columns of a model's matrices; of an expert's for routed ones."""
    if name in MORE:
        return {(kind, n, k) for n, k in MORE[name] for kind in ("Q4_K", "Q6_K")}
    model, found = SHAPES[name](), {}
    for tensor, shape in model.tensors.items():
        kind = kind_of(model, tensor, shape).name
        if kind != "F32":
            found[tensor] = (kind, *shape[-2:])
    out = set(found.values())
    for first, second in STACKED:
        for tensor, (kind, n, k) in found.items():
            other = found.get(tensor.replace(first, second)) if first in tensor else None
            if other is not None and (other[0], other[2]) == (kind, k):
                out.add((kind, n + other[1], k))
    return {(kind, min(n, ROWS_AT_MOST), k) for kind, n, k in out}


def matrices(name: str) -> Iterator[tuple[str, PackedWeights, int]]:
    for kind, n, k in sorted(shapes(name)):
        blocks = random_blocks(np.random.default_rng(n + k), kind, min(n, 512), k)
        raw = torch.from_numpy(blocks).cuda()
        yield f"{kind} {n} x {k}", repack(BY_NAME[kind], raw.repeat(-(-n // len(raw)), 1)[:n].contiguous()), k


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_a_product_is_that_of_triton(name):
    from daemons.ops.triton.gemv import packed_gemv

    selector, wrong = KernelSelector(torch.device("cuda", 0), torch.bfloat16, limits=Handovers()), []
    for shape, packed, k in matrices(name):
        product = selector.packed_linear(packed, k)
        assert product.row_gemv is not None, shape
        for n_rows in (n for n in (1, 2, 8, 9, 16, 24, 32) if n <= product.max_rows):
            x = torch.randn(n_rows, k, device="cuda", generator=torch.Generator("cuda").manual_seed(n_rows)).bfloat16()
            ours, wanted = product(x).double(), packed_gemv(packed, x).double()
            # each is rounded once; the order of float32 sums counts far less than that, unless they cancel
            allowed = 2 * UNITS[torch.bfloat16] * wanted.abs() + 2.0**-12 * wanted.square().mean().sqrt()
            if not bool(((ours - wanted).abs() <= allowed).all()):
                wrong.append(
                    f"{shape}, {n_rows} rows: {float(((ours - wanted).abs() / allowed).max()):.2f} of the bound"
                )
    assert not wrong
