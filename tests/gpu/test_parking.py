"""Models that are parked: their memory on a GPU is free, and comes back at the same addresses with the same bytes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from daemons.parking import CHUNK_BYTES, MappedMemory, ParkableMemory, empty, unsupported_reason, use_memory, zeros
from lucevisor.deployment.service import Service
from tests.e2e.service import MODELS, generate, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
PROMPTS = [[3 + i, 40, 7, 9 + i, 22, 5] * 12 for i in range(3)]
N_TOKENS = 16
CONFIG = f"""
[models.dense]
path = "{MODELS["qwen3"]}"
preload = false
memory_share = 1.0
[models.hybrid]
path = "{MODELS["qwen35"]}"
preload = false
memory_share = 1.0
[engine]
dtype = "float32"
max_sequences = 4
pages = 2000
[cache]
min_tokens = 1
checkpoint_pages = 1
[groups.gpu]
backend = "cuda"
"""


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(DEVICE)[0])


def test_it_works_on_this_device() -> None:
    assert unsupported_reason(DEVICE) == ""


def test_bytes_and_addresses_are_the_same_after_a_park_and_a_graph_reads_them() -> None:
    memory = ParkableMemory()
    with use_memory(memory):
        weights = empty((3 * CHUNK_BYTES // 4,), torch.float32, DEVICE)
        small = empty((5, 7), torch.bfloat16, DEVICE)
        state = zeros((1000,), torch.float32, DEVICE)
    weights.copy_(torch.arange(len(weights)) % 1000)
    small.fill_(3.0)
    state.fill_(5.0)
    out = torch.zeros(1, device=DEVICE)
    (weights[:1000].sum() + state.sum()).clone()  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(weights[:1000].sum() + state.sum())
    graph.replay()
    assert out.item() == 499_500 + 5000
    addresses = weights.data_ptr(), small.data_ptr(), state.data_ptr()
    for _ in range(2):  # the second time without a copy
        before = free_bytes()
        assert memory.park() > 3 * CHUNK_BYTES
        assert free_bytes() - before >= 4 * CHUNK_BYTES
        memory.unpark()
        assert (weights.data_ptr(), small.data_ptr(), state.data_ptr()) == addresses
        assert bool((small == 3).all())
        assert float(weights[-1]) == (len(weights) - 1) % 1000
        graph.replay()
        assert out.item() == 499_500  # state is zeros again
        state.fill_(5.0)


def test_memory_of_a_mapping_that_is_dropped_is_free() -> None:
    torch.empty(1, device=DEVICE)
    before = free_bytes()
    mapped = MappedMemory(DEVICE)
    tensor = mapped.take((4 * CHUNK_BYTES,), torch.uint8)
    del mapped
    gc.collect()
    tensor.fill_(1)  # it keeps the mapped memory
    assert before - free_bytes() >= 4 * CHUNK_BYTES
    del tensor
    gc.collect()
    assert before - free_bytes() < CHUNK_BYTES


def test_more_than_the_device_has_is_refused() -> None:
    mapped = MappedMemory(DEVICE)
    with pytest.raises(RuntimeError, match="cannot allocate memory"):
        mapped.take((torch.cuda.mem_get_info(DEVICE)[1] * 2,), torch.uint8)


async def answers(service: Service) -> dict[str, list[list[int]]]:
    found = {}
    for name, model in service.models.items():
        found[name] = [await generate(model, prompt, N_TOKENS) for prompt in PROMPTS]
    return found


async def test_parked_models_come_back_and_answer_as_before(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    async with running(tmp_path / "config.toml", tmp_path) as service:
        first = await answers(service)
        assert [model.model_state.value for model in service.models.values()] == ["parked", "loaded"]
        for _ in range(3):
            assert await answers(service) == first
        assert service.groups["gpu"].restarts == 0
        await service.models["dense"].control.unload()
        assert service.models["dense"].model_state.value == "unloaded"
        assert await answers(service) == first
