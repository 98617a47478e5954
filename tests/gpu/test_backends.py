"""The same model on CUDA devices and processors, in any mixture of groups: numbers agree with the float32 cpu
reference.

Run on a machine with a GPU: `pytest -m gpu`.  Tolerances are stated beside each comparison.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lucevisor.model.families import open_spec
from lucevisor.model.values import Dtype
from tests.e2e.process import DEMO, Cli
from tests.e2e.service import GOLDEN, generate, running
from tests.families.golden import opened
from tests.families.rounding import (
    MIDDLE_SAFETY,
    Bounds,
    Formats,
    assert_same_tokens,
    bounds,
    middle_error,
    narrowed,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # kernels compile at the first load of a machine

DEMO_MODEL = DEMO.parent / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
DEMO_IDS = list(b"def join(path, *paths):\n    return path\n" * 3)


def gpu_count() -> int:
    """GPUs that the driver shows; torch is not asked, since the supervisor's environment need not have it."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return done.stdout.count("GPU ")


def mixed_config(directory: Path, model: Path, devices: list[str], ranges: list[str], extra: str) -> Path:
    """``devices`` like "cuda:0", "cpu:0", "cuda1:1": the group's backend is its name without digits."""
    text = f'[model]\npath = "{model}"\n'
    for name in dict.fromkeys(d.split(":")[0] for d in devices):
        text += f'[groups.{name}]\nbackend = "{name.rstrip("0123456789")}"\n'
    lists = f"target_devices = {devices}\ntarget_layer_split = {ranges}\n".replace("'", '"')
    path = directory / "gpu.toml"
    path.write_text(text + "[placement]\n" + lists + extra)
    return path


PLACEMENTS = {
    "one gpu": (1, ["cuda:0"], ["0-8"]),
    "gpu then cpu": (1, ["cuda:0", "cpu:0"], ["0-3", "3-8"]),
    "cpu then gpu": (1, ["cpu:0", "cuda:0"], ["0-5", "5-8"]),
    "gpu, cpu, gpu": (1, ["cuda:0", "cpu:0", "cudab:0"], ["0-2", "2-5", "5-8"]),
    "two gpus, two groups": (2, ["cuda0:0", "cuda1:1"], ["0-4", "4-8"]),
    "two gpus, one group": (2, ["cuda:0", "cuda:1"], ["0-4", "4-8"]),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_float32_on_any_mixture_is_golden(placement: str, tmp_path: Path) -> None:
    """As near as two float32 runs must be: logits, hidden states after every layer, greedy tokens."""
    n, devices, ranges = PLACEMENTS[placement]
    if gpu_count() < n:
        pytest.skip(f"needs {n} GPUs, {gpu_count()} are here")
    golden = opened("qwen35")
    devices = [d.replace("cudab:", "cuda2:") for d in devices]
    config = mixed_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", devices, ranges, '[engine]\ndtype = "float32"\n')
    async with running(config, tmp_path) as service:
        assert service.only.engine is not None
        rows = await service.only.engine.run_ids(golden.ids, want_hidden=True, rows_per_step=64)
        assert rows.hidden is not None
        golden.bounds.assert_layers(torch.from_numpy(rows.hidden), golden.hidden)
        golden.assert_logits(torch.from_numpy(rows.logits))
        golden.assert_tokens(await generate(service, golden.prompt, 32))


@pytest.mark.parametrize("placement", ["one gpu", "gpu then cpu", "two gpus, two groups"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_quantised_demo_model_agrees_with_the_cpu(placement: str, dtype: str, tmp_path: Path) -> None:
    """Logits of real text and greedy tokens against float32 on the cpu: as near as roundings explain."""
    n, devices, ranges = PLACEMENTS[placement]
    if gpu_count() < n:
        pytest.skip(f"needs {n} GPUs, {gpu_count()} are here")
    model, ids = DEMO_MODEL, DEMO_IDS
    (tmp_path / "ref").mkdir()
    reference = mixed_config(tmp_path / "ref", model, ["cpu:0"], ["0-8"], '[engine]\ndtype = "float32"\n')
    async with running(reference, tmp_path / "ref") as service:
        assert service.only.engine is not None
        expected = (await service.only.engine.run_ids(ids, want_hidden=False, rows_per_step=64)).logits
        tokens = await generate(service, ids, 48)
    config = mixed_config(tmp_path, model, devices, ranges, f'[engine]\ndtype = "{dtype}"\n')
    async with running(config, tmp_path) as service:
        assert service.only.engine is not None
        got = (await service.only.engine.run_ids(ids, want_hidden=False, rows_per_step=64)).logits
        found = await generate(service, ids, 48)
    if dtype == "float32":
        assert_float32(torch.from_numpy(got), torch.from_numpy(expected))
        assert_same_tokens(open_spec(model), ids, found, tokens)
    else:
        assert_bfloat16(torch.from_numpy(got), torch.from_numpy(expected), packed="cpu:0" in devices)


@cache
def demo_bounds() -> Bounds:
    return bounds(open_spec(DEMO_MODEL), DEMO_IDS)


@cache
def demo_in_bfloat16(packed: bool) -> Tensor:
    """``packed``: a cpu multiplies in 8 bits, or keeps matrices as int8 or int4."""
    return narrowed(open_spec(DEMO_MODEL), DEMO_IDS, Formats(Dtype.BFLOAT16, Dtype.BFLOAT16, packed))


def assert_float32(found: Tensor, wanted: Tensor) -> None:
    """Every row as near as two float32 runs must be."""
    exact = demo_bounds()
    print(f"float32: {exact.logits.worst(found, wanted):.2f} of what rounding explains")
    exact.assert_logits(found, wanted)


def assert_bfloat16(found: Tensor, wanted: Tensor, packed: bool) -> None:
    """The middle row as near as its roundings explain, and no more other next tokens than these make."""
    runs = demo_in_bfloat16(packed)
    error, allowed = middle_error(found, wanted), MIDDLE_SAFETY * max(middle_error(run, wanted) for run in runs)
    others = int((found.argmax(dim=-1) != wanted.argmax(dim=-1)).sum())
    most = MIDDLE_SAFETY * int((runs.argmax(dim=-1) != wanted.argmax(dim=-1)).sum(dim=-1).max())
    print(f"bfloat16: {error:.1e} of {allowed:.1e} that rounding explains, {others} of {most} other next tokens")
    assert error <= allowed
    assert others <= most


def test_doctor_on_a_gpu(tmp_path: Path) -> None:
    """One layer's numbers on the GPU against the cpu, in float32 and bfloat16."""
    if not gpu_count():
        pytest.skip("needs a GPU")
    config = mixed_config(tmp_path, DEMO_MODEL, ["cuda:0", "cpu:0"], ["0-4", "4-8"], "")
    cli = Cli()
    try:
        for dtype in ("float32", "bfloat16"):
            for layer in ("2", "3"):
                done = cli.run("doctor", str(config), "--layer", layer, "--set", f"engine.dtype={dtype}", timeout_s=120)
                print(done.stdout)
                assert "all groups can run" in done.stdout
    finally:
        cli.close()
