"""``engine.deterministic`` on a GPU: rows keep their bits, in steps of any shape and in a service.

Kernels of full size: tests/kernels/test_batch_invariant.py.  A large model: bench/deterministic.py --device cuda.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from daemons.device import prepare
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype
from tests.e2e.service import running
from tests.e2e.test_deterministic import at_once, config_of, killed, one_by_one
from tests.families.golden import FIXTURES, GOLDEN, OPTIONS
from tests.families.pipeline import How
from tests.families.test_captured_steps import DEMO
from tests.families.test_deterministic import WAYS, Served, rows_that_differ
from tests.families.test_weight_formats import MIXES, MODELS, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
__all__ = ["spec_of"]  # a fixture
BACKEND = "cuda" if torch.version.hip is None else "hip"


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare(Backend(BACKEND), 0)


def assert_same_bits(m: Served) -> None:
    ways = {name: way for name, way in WAYS.items() if name != "other threads"}
    assert {name: rows_that_differ(way(m), m.logits) for name, way in ways.items()} == dict.fromkeys(ways, 0)


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("name", ["demo", *FIXTURES])
def test_a_row_has_the_same_bits_however_it_is_computed(name: str, dtype: Dtype) -> None:
    spec = open_spec(DEMO) if name == "demo" else open_spec(GOLDEN / name / "model.gguf", OPTIONS.get(name))
    assert_same_bits(Served(spec, How(dtype, dtype, Backend(BACKEND), deterministic=True)))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_every_quantised_format(name: str, mix: str, spec_of) -> None:
    how = How(Dtype.BFLOAT16, Dtype.Q8_0 if mix == "k" else Dtype.BFLOAT16, Backend(BACKEND), deterministic=True)
    assert_same_bits(Served(spec_of(name, mix), how))


async def test_answers_keep_their_bits(tmp_path: Path) -> None:
    """One after the other in one group; at once over two groups, with drafts and kills."""
    on_gpu = [f"groups.a.backend={BACKEND}"]
    (tmp_path / "plain").mkdir()
    async with running(config_of(tmp_path, 1), tmp_path / "plain", on_gpu) as service:
        right = await one_by_one(service)
        assert await at_once(service) == right
    overrides = [*on_gpu, f"groups.b.backend={BACKEND}", "engine.prefill_chunk=64", "draft.kind=lookup"]
    async with running(config_of(tmp_path, 2), tmp_path, [*overrides, "recovery.restart_limit=99/60s"]) as service:
        async with asyncio.timeout(300):
            assert await killed(service) == right
