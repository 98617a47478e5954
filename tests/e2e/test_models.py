"""Several models in one service: in the same two daemons, and each in its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Service
from lucevisor.errors import ConfigErrors
from lucevisor.supervision.events import State
from tests.combinations import slow
from tests.e2e.process import Cli, post
from tests.e2e.service import MODELS, generate, running
from tests.waiting import until, wait_until

N_TOKENS = 24
PROMPTS = [[3 + i, 40, 7, 9 + i, 22, 5] * 12 for i in range(3)]

SHARED = f"""
[models.dense]
path = "{MODELS["qwen3"]}"
[models.hybrid]
path = "{MODELS["qwen35"]}"
[models.hybrid.placement]
target_devices = ["right:0", "left:0"]   # its first stage is where the other one has its last
[engine]
dtype = "float32"
max_sequences = 4
pages = 300
[groups.left]
backend = "cpu"
threads = 1
[groups.right]
backend = "cpu"
threads = 1
"""
APART = (
    SHARED.replace('["right:0", "left:0"]', '["right:0"]') + '[models.dense.placement]\ntarget_devices = ["left:0"]\n'
)
ALONE = """
[model]
path = "{path}"
[engine]
dtype = "float32"
max_sequences = 4
pages = 300
[groups.left]
backend = "cpu"
threads = 1
"""


def config_of(text: str, directory: Path) -> Path:
    file = directory / "config.toml"
    file.write_text(text)
    return file


async def answers_alone(path: Path, directory: Path) -> list[list[int]]:
    async with running(config_of(ALONE.format(path=path), directory), directory) as service:
        return [await generate(service, prompt, N_TOKENS) for prompt in PROMPTS]


async def answers_of(service: Service) -> dict[str, list[list[int]]]:
    """The answers of all models to all prompts, at the same time."""
    asked = {name: [generate(model, prompt, N_TOKENS) for prompt in PROMPTS] for name, model in service.models.items()}
    found = await asyncio.gather(*(asyncio.gather(*tasks) for tasks in asked.values()))
    return dict(zip(asked, found, strict=True))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    async def both() -> dict[str, list[list[int]]]:
        paths = {"dense": MODELS["qwen3"], "hybrid": MODELS["qwen35"]}
        return {name: await answers_alone(path, tmp_path_factory.mktemp(name)) for name, path in paths.items()}

    return asyncio.run(both())


@pytest.mark.parametrize("transport", ["shared_memory", slow("tcp")])
async def test_two_models_in_the_same_two_daemons_answer_as_each_does_alone(tmp_path, expected, transport):
    text = SHARED.replace("threads = 1\n", f'threads = 1\ntransport = "{transport}"\n')
    async with running(config_of(text, tmp_path), tmp_path) as service:
        assert [len(group.loads) for group in service.groups.values()] == [2, 2]
        dense, hybrid = service.models.values()
        assert [stage.group for stage in dense.placement.stages] == ["left", "right"]
        assert [stage.group for stage in hybrid.placement.stages] == ["right", "left"]
        assert await answers_of(service) == expected

        asked = asyncio.create_task(answers_of(service))
        engines = [model.engine for model in service.models.values()]
        before = [engine.statistics().generated_tokens for engine in engines]
        await until(
            lambda: all(engine.statistics().generated_tokens > n for engine, n in zip(engines, before, strict=True))
        )
        os.kill(service.groups["left"].pid, signal.SIGKILL)  # it holds half of each model
        assert await asked == expected

        assert await service.wait_ready(300.0)
        asked = asyncio.create_task(answers_of(service))
        await AdminOperations(service).restart_all(["right"], now=False)
        assert await asked == expected
        assert [group.restarts for group in service.groups.values()] == [1, 1]


async def test_neither_a_refused_reload_nor_a_lost_daemon_touches_a_model_elsewhere(tmp_path, expected):
    async with running(config_of(APART, tmp_path), tmp_path) as service:
        dense, hybrid = service.models.values()
        assert [[*model.groups] for model in (dense, hybrid)] == [["left"], ["right"]]
        left, right = service.groups.values()
        file = tmp_path / "config.toml"
        pids = [left.pid, right.pid]
        after = load(file, ["models.dense.placement.target_devices=left:0,right:0", "server.drain_s=7"])
        with pytest.raises(ConfigErrors, match=r"models\.dense\.placement\.target_devices = .* several models"):
            await AdminOperations(service).reload(after)
        assert service.config.server.drain_s != 7
        changed = await AdminOperations(service).reload(load(file, ["server.drain_s=7"]))
        assert changed == {"server.drain_s": 7.0}
        assert service.config.server.drain_s == 7
        assert [left.pid, right.pid] == pids

        os.kill(left.pid, signal.SIGSTOP)  # so that it does not come back before the others have answered
        os.kill(left.pid, signal.SIGKILL)
        await left.wait(State.STARTING, State.BACKOFF, timeout_s=100)
        assert [model.state for model in (dense, hybrid)] == ["degraded", "ready"]
        held = asyncio.create_task(generate(dense, PROMPTS[0], N_TOKENS))
        assert [await generate(hybrid, prompt, N_TOKENS) for prompt in PROMPTS] == expected["hybrid"]
        assert await held == expected["dense"][0]
        now = hybrid.engine.statistics()
        assert not any(pause.n for pause in now.recovery.pauses.values())
        assert (left.restarts, right.restarts) == (1, 0)


def test_a_supervisor_of_two_models_is_operated_like_one(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(SHARED + f'[cache]\nmin_tokens = 1\ncheckpoint_pages = 1\ndir = "{tmp_path / "slots"}"\n')
    status = cli.start(file)

    def ask(name: str) -> tuple[list[int], int]:
        body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        code, answer = post(f"{status['url']}/v1/completions", body)
        assert (code, answer["model"]) == (200, name)
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [model["name"] for model in status["models"]] == ["dense", "hybrid"]
    shards = [(device["model"], device["device"]) for group in status["groups"] for device in group["devices"]]
    assert sorted(shards) == [("dense", "left:0"), ("dense", "right:0"), ("hybrid", "left:0"), ("hybrid", "right:0")]
    first = {name: ask(name)[0] for name in ("dense", "hybrid")}
    code, answer = post(f"{status['url']}/v1/completions", {"model": "third", "prompt": [3], "max_tokens": 1})
    assert (code, answer["error"]["code"]) == (404, "model_not_found")
    cli.run("restart", "left")
    refused = cli.run("reload", "--set", "models.dense.placement.target_devices=right:0,left:0", check=False)
    assert refused.returncode == 2
    assert "several models" in refused.stderr
    assert "use --dir DIR" in cli.run("cache", "ls", check=False).stderr

    status = cli.start(file, take_over=True)
    wait_until(lambda: all(model["cache"]["snapshots"] for model in cli.status()["models"]), what="slots are saved")
    for name in ("dense", "hybrid"):
        answer, n_cached = ask(name)
        assert answer == first[name]
        assert n_cached > 0, "from the directory of its model"
    assert [folder.name for folder in sorted((tmp_path / "slots").iterdir())] == ["dense", "hybrid"]
    cli.stop()
