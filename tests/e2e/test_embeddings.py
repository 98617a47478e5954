"""Embeddings through real daemons in one to three groups, of a model that sees whole texts and of a chat model."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest
from lucevisor.model.families import open_spec
from lucevisor.protocol.steps import SamplingParams
from tests.e2e.service import generate, running, write_config
from tests.e2e.test_recovery import kill
from tests.families.generate.bert import bert, pooled
from tests.families.generate.made import Draw
from tests.families.golden import opened
from tests.families.test_pooling import distance, last_hidden_states
from tests.waiting import until

ENGINE = '[engine]\ndtype = "float32"\nmax_context = 128\n'


async def embed(service: Service, texts: list[list[int]]) -> torch.Tensor:
    engine = service.only.engine if service.replicated is None else service.replicated
    assert engine is not None

    async def one(index: int, ids: list[int]) -> list[float]:
        request = GenerationRequest(
            request_id=f"text-{index}", prompt=ids, max_tokens=1, sampling=SamplingParams(), pooled=True
        )
        with engine.submit(request) as handle:
            [end] = [event async for event in handle]
        assert isinstance(end, FinishedEvent)
        assert end.pooled is not None, end
        return end.pooled.tolist()

    return torch.tensor(await asyncio.gather(*(one(index, ids) for index, ids in enumerate(texts))))


@pytest.mark.parametrize(("n_groups", "transport"), [(1, "shared_memory"), (2, "shared_memory"), (3, "tcp")])
async def test_an_encoder(n_groups, transport, tmp_path):
    draw = Draw(2)
    made = bert(draw, "mean")
    path = made.write(tmp_path / "model.gguf")
    texts = [draw.ids(draw.between(1, 128), made.vocabulary) for _ in range(60)]
    expected = torch.stack([pooled(made, text) for text in texts])
    groups, ends = dict.fromkeys("abc"[:n_groups], 1), [*range(n_groups), made.n_layers]
    config = write_config(tmp_path, path, groups, [f"{a}-{b}" for a, b in pairwise(ends)], ENGINE, transport)
    async with running(config, tmp_path) as service:
        assert distance(await embed(service, texts), expected) < 1e-6
        totals = service.only.engine.statistics().steps
        assert totals.n_steps < len(texts)  # several texts a step
        assert totals.n_tokens == sum(map(len, texts))


async def test_daemons_are_killed_meanwhile(tmp_path):
    """Each group once: all texts are answered, and right."""
    draw = Draw(2)
    made = bert(draw, "mean")
    texts = [draw.ids(draw.between(1, 128), made.vocabulary) for _ in range(300)]
    expected = torch.stack([pooled(made, text) for text in texts])
    path = made.write(tmp_path / "model.gguf")
    config = write_config(tmp_path, path, {"a": 1, "b": 1}, ["0-2", f"2-{made.n_layers}"], ENGINE)
    async with running(config, tmp_path, ["recovery.restart_limit=99/60s", "server.max_queue=1000"]) as service:
        for group in service.groups:
            asked = asyncio.create_task(embed(service, texts))
            await asyncio.sleep(0.05)
            await kill(service, group)
            assert distance(await asked, expected) < 1e-6


async def test_replicas_share_texts_of_which_one_is_killed(tmp_path):
    draw = Draw(2)
    made = bert(draw, "mean")
    texts = [draw.ids(draw.between(1, 128), made.vocabulary) for _ in range(300)]
    expected = torch.stack([pooled(made, text) for text in texts])
    path, both = made.write(tmp_path / "model.gguf"), [f"0-{made.n_layers}"]
    replicas = '[replicas.x]\ngroups = ["a"]\n[replicas.y]\ngroups = ["b"]\n[recovery]\nrestart_limit = "99/60s"\n'
    config = write_config(tmp_path, path, {"a": 1, "b": 1}, both, ENGINE + replicas)
    async with running(config, tmp_path, ["server.max_queue=1000"]) as service:
        assert service.replicated is not None
        await until(lambda: all(model.state == "ready" for model in service.models.values()))
        for group in service.groups:
            asked = asyncio.create_task(embed(service, texts))
            await asyncio.sleep(0.05)
            await kill(service, group)
            assert distance(await asked, expected) < 1e-6
        steps = [engine.statistics().steps.n_steps for engine in service.replicated.replicas.values()]
        assert min(steps) > 0


async def test_a_chat_model_that_answers_meanwhile(tmp_path):
    golden = opened("qwen35")
    path, n_layers = golden.spec.files.paths[0], open_spec(golden.spec.files.paths[0]).n_layers
    ends = [1, 17, 40, 72, 64, 33]
    config = write_config(tmp_path, path, {"a": 1, "b": 1}, ["0-3", f"3-{n_layers}"], ENGINE)
    async with running(config, tmp_path) as service:
        answer = asyncio.create_task(generate(service, golden.prompt, len(golden.greedy)))
        found = await embed(service, [golden.ids[:end] for end in ends] * 3)
        assert await answer == golden.greedy
    assert distance(found, last_hidden_states(golden, ends * 3)) < 1e-6
