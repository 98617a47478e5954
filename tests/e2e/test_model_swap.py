"""Models that are loaded on demand, in memory that holds one of them: in the same daemons, which are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from itertools import cycle
from pathlib import Path

import pytest

from lucevisor.app.model_files import open_models, without_unusable
from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.model_swap import ModelState
from lucevisor.deployment.service import Observer, Service
from lucevisor.errors import AdminError, LucevisorError
from lucevisor.supervision.events import State
from tests.combinations import slow
from tests.e2e.process import Cli, post
from tests.e2e.service import MODELS, generate, generate_all, running
from tests.waiting import until, wait_until

N_TOKENS = 6
NAMES = {"dense": "qwen3", "hybrid": "qwen35", "window": "gemma4_e2b"}
PROMPTS = [[3 + i, 40, 7, 9 + i, 22, 5] * 12 for i in range(3)]
GROUP = """
[engine]
dtype = "float32"
max_sequences = 4
pages = 300
[groups.left]
backend = "cpu"
threads = 1
"""
TWO_GROUPS = """
[groups.right]
backend = "cpu"
threads = 1
"""


def write(directory: Path, *models: str, more: str = "", keys: str = "preload = false\nmemory_share = 1.0") -> Path:
    text = "".join(f'[models.{name}]\npath = "{MODELS[NAMES[name]]}"\n{keys}\n' for name in models)
    file = directory / "config.toml"
    file.write_text(text + GROUP + more)
    return file


def states(service: Service) -> dict[str, str]:
    return {name: model.model_state.value for name, model in service.models.items()}


def resident_bytes(service: Service) -> int:
    """The memory of all daemons, without pages of files, of which the kernel takes some away when memory is short."""
    texts = [Path(f"/proc/{group.pid}/status").read_text() for group in service.groups.values()]
    return sum(int(line.split()[1]) << 10 for text in texts for line in text.splitlines() if line.startswith("RssAnon"))


async def answers(service: Service) -> dict[tuple[str, int], list[int]]:
    return {
        (name, at): await generate(model, prompt, N_TOKENS)
        for name, model in service.models.items()
        for at, prompt in enumerate(PROMPTS)
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[int]]:
    """What each model answers beside the others, all loaded at the start."""

    async def all_beside() -> dict[tuple[str, int], list[int]]:
        folder = tmp_path_factory.mktemp("beside")
        async with running(write(folder, *NAMES, keys=""), folder) as service:
            return await answers(service)

    return asyncio.run(all_beside())


CASES = [(30, "shared_memory"), slow(200, "shared_memory"), slow(30, "tcp")]


@pytest.mark.parametrize(("n_requests", "transport"), CASES)
async def test_alternating_requests_are_answered_while_models_swap_and_daemons_are_killed(
    tmp_path, expected, n_requests: int, transport: str
):
    file = write(tmp_path, *NAMES, more=TWO_GROUPS)
    file.write_text(file.read_text().replace("threads = 1\n", f'threads = 1\ntransport = "{transport}"\n'))
    async with running(file, tmp_path) as service:
        assert states(service) == dict.fromkeys(NAMES, "unloaded")
        choices, n_answered = random.Random(7), 0

        async def client(asked: list[tuple[str, int]]) -> None:
            nonlocal n_answered
            for name, at in asked:
                assert await generate(service.models[name], PROMPTS[at], N_TOKENS) == expected[name, at]
                n_answered += 1
                loaded = [state for state in states(service).values() if state in ("loading", "loaded", "leaving")]
                assert len(loaded) <= 1

        order = [*zip(cycle(NAMES), (choices.randrange(3) for _ in range(n_requests)), strict=False)]
        clients = asyncio.gather(client(order[::2]), client(order[1::2]))
        n_kills = 0
        while not clients.done():
            await asyncio.wait({clients}, timeout=0.05)
            group = service.groups[choices.choice([*service.groups])]
            is_due = n_answered >= 12 * (n_kills + 1)
            if not clients.done() and is_due and group.state in (State.READY, State.LOADING):
                os.kill(group.pid, signal.SIGKILL)
                n_kills += 1
        await clients
        assert n_kills > 0
        assert not any(model.engine.busy for model in service.models.values())


async def test_memory_is_back_at_the_same_level_after_each_round(tmp_path, expected):
    async with running(write(tmp_path, *NAMES), tmp_path) as service:
        levels = []
        for _ in range(3):
            assert await answers(service) == expected
            await service.models["window"].control.unload()
            assert states(service) == dict.fromkeys(NAMES, "unloaded")
            levels.append(resident_bytes(service))
        assert levels[-1] - levels[1] < 8 << 20
        pids = [group.pid for group in service.groups.values()]
        await service.models["dense"].control.load()
        assert states(service)["dense"] == "loaded"
        assert [group.pid for group in service.groups.values()] == pids


async def test_an_idle_service_has_no_daemons_and_a_request_starts_them(tmp_path, expected):
    keys = "preload = false\nmemory_share = 1.0\nttl = 0.5"
    async with running(write(tmp_path, "dense", "hybrid", keys=keys, more=TWO_GROUPS), tmp_path) as service:
        assert await generate(service.models["dense"], PROMPTS[0], N_TOKENS) == expected["dense", 0]
        await until(lambda: all(group.state is State.STOPPED for group in service.groups.values()))
        assert (service.state, states(service)) == ("ready", {"dense": "unloaded", "hybrid": "unloaded"})
        assert service.models["dense"].control.unloads_in_s is None
        assert await generate(service.models["hybrid"], PROMPTS[1], N_TOKENS) == expected["hybrid", 1]


async def test_a_lone_model_ends_with_its_ttl_too(tmp_path, expected):
    file = tmp_path / "config.toml"
    file.write_text(f'[model]\npath = "{MODELS["qwen3"]}"\nttl = 0.5\n{GROUP}')
    async with running(file, tmp_path) as service:
        await until(lambda: all(group.state is State.STOPPED for group in service.groups.values()))
        assert await generate(service, PROMPTS[2], N_TOKENS) == expected["dense", 2]


async def test_a_reload_moves_the_layers_of_a_model_that_is_not_loaded(tmp_path, expected):
    file = tmp_path / "config.toml"
    placement = '[placement]\ntarget_devices = ["left:0", "left:1"]\ntarget_layer_split = ["0-2", "2-4"]\n'
    file.write_text(f'[model]\npath = "{MODELS["qwen3"]}"\nttl = 30.0\n{GROUP}{placement}')
    async with running(file, tmp_path) as service:
        [name] = service.models
        await service.models[name].control.unload()
        changed = await AdminOperations(service).reload(load(file, ["placement.target_layer_split=0-1,1-4"]))
        assert [*changed] == ["placement.target_layer_split"]
        assert await generate(service, PROMPTS[0], N_TOKENS) == expected["dense", 0]
        await service.models[name].control.unload()
        assert await generate(service, PROMPTS[1], N_TOKENS) == expected["dense", 1]


async def test_prefixes_are_in_host_memory_while_a_model_is_away(tmp_path, expected):
    more = '[cache]\nmin_tokens = 1\ncheckpoint_pages = 1\nhost = "64MiB"\n'
    async with running(write(tmp_path, *NAMES, more=more), tmp_path) as service:
        for name, model in service.models.items():
            cached = []
            for other in ("", next(other for other in NAMES if other != name)):
                if other:
                    await generate(service.models[other], PROMPTS[1], 1)
                    assert model.model_state is not ModelState.LOADED
                tokens, finished = await generate_all(model, PROMPTS[0], N_TOKENS)
                assert tokens == expected[name, 0]
                cached.append(finished.usage.cached_tokens)
            assert cached[0] == 0
            assert cached[1] >= 64, cached


async def test_a_model_that_cannot_be_loaded_says_why_and_the_others_serve(tmp_path, expected):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(MODELS["qwen35"].read_bytes())
    file = write(tmp_path, "dense", "hybrid")
    file.write_text(file.read_text().replace(str(MODELS["qwen35"]), str(copy)))
    async with running(file, tmp_path) as service:
        copy.unlink()
        _, finished = await generate_all(service.models["hybrid"], PROMPTS[0], N_TOKENS)
        assert finished.error is not None
        assert "model hybrid could not be loaded" in finished.error.message
        assert str(copy) in finished.error.message
        with pytest.raises(LucevisorError, match=r"model hybrid is not loaded: .*model.gguf"):
            await service.models["hybrid"].control.load()
        assert await generate(service.models["dense"], PROMPTS[0], N_TOKENS) == expected["dense", 0]
        assert {group.restarts for group in service.groups.values()} == {0}


async def test_weights_that_cannot_be_loaded_fail_the_requests_of_their_model_alone(tmp_path, expected):
    """The daemon refuses them, frees what it had of them, and goes on."""
    copy, content = tmp_path / "model.gguf", bytearray(MODELS["qwen35"].read_bytes())
    content[-4096:] = b"\xff" * 4096  # not numbers
    copy.write_bytes(content)
    file = write(tmp_path, "dense", "hybrid")
    file.write_text(file.read_text().replace(str(MODELS["qwen35"]), str(copy)))
    async with running(file, tmp_path) as service:
        assert await generate(service.models["dense"], PROMPTS[0], N_TOKENS) == expected["dense", 0]
        pid = service.groups["left"].pid
        for _ in range(2):
            _, finished = await generate_all(service.models["hybrid"], PROMPTS[0], N_TOKENS)
            assert finished.error is not None
            assert "model hybrid could not be loaded: group left: " in finished.error.message
            assert "tensor" in finished.error.message
            assert states(service)["hybrid"] == "unloaded"
        assert await generate(service.models["dense"], PROMPTS[1], N_TOKENS) == expected["dense", 1]
        assert service.groups["left"].pid == pid


def folder_with_a_broken_file(tmp_path: Path) -> Path:
    """A configuration of ``models``, a folder with a model and a file that is none."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "dense.gguf").write_bytes(MODELS["qwen3"].read_bytes())
    (folder / "broken.gguf").write_bytes(b"GGUF")
    file = tmp_path / "config.toml"
    file.write_text(f'[server]\nmodels_dir = "models"\n{GROUP}')
    return file


async def test_a_folder_of_files_is_served_without_those_that_cannot_be(tmp_path, expected):
    file = folder_with_a_broken_file(tmp_path)
    loaded = without_unusable(load(file))
    service = Service(loaded, open_models(loaded), tmp_path, Observer())
    try:
        await service.start()
        assert await service.wait_ready(120.0)
        assert states(service) == {"dense": "unloaded"}
        assert await generate(service, PROMPTS[0], N_TOKENS) == expected["dense", 0]
    finally:
        await service.stop(0.0)


def test_a_reload_beside_a_folder_with_other_files_than_at_the_start(cli: Cli, tmp_path: Path) -> None:
    file = folder_with_a_broken_file(tmp_path)
    status = cli.start(file)
    assert cli.run("reload").stdout == "nothing has changed\n"
    assert cli.run("reload", "--set", "server.drain_s=3").stdout.startswith("server.drain_s = 3")
    (tmp_path / "models" / "new.gguf").write_bytes(MODELS["qwen35"].read_bytes())
    refused = cli.run("reload", check=False)
    assert refused.returncode == 2, refused.stderr
    said = (
        f"lucevisor: {file}: models.new: cannot change while the supervisor serves several models; leave it as it was"
    )
    assert refused.stderr == f"{said}, or `lucevisor stop`, then `start`\n"
    os.kill(status["pid"], signal.SIGHUP)
    wait_until(lambda: cli.log().read_text().count("configuration reloaded, with API keys") == 3)
    assert "models.new" not in cli.log().read_text()
    cli.stop()
    assert "Traceback" not in cli.log().read_text()


def test_an_idle_supervisor_wakes_up_once_a_second_and_answers_over_http(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[model]\npath = "{MODELS["qwen3"]}"\nname = "m"\nttl = 0.3\naliases = ["claude-*"]\n{GROUP}')
    status = cli.start(file)
    url, pid = status["url"], status["pid"]

    def now() -> dict:
        return json.loads(cli.run("status", "--json").stdout)

    wait_until(lambda: now()["groups"][0]["state"] == "stopped")
    assert now()["models"][0]["residency"]["state"] == "unloaded"

    def sleeps() -> bool:
        """At most once in a while it waits for a lock or the disk, too, as others use both."""
        before, began = n_wakeups(pid), time.monotonic()
        time.sleep(3.0)
        return n_wakeups(pid) - before <= 1.2 * (time.monotonic() - began) + 1

    time.sleep(1.0)
    assert any(sleeps() for _ in range(5))
    body = {"model": "claude-x", "prompt": PROMPTS[0], "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    assert post(url + "/v1/completions", body)[1]["model"] == "m"
    wait_until(lambda: now()["models"][0]["residency"]["state"] == "unloaded")
    assert post(url + "/models/load", {"model": "m"}) == (200, {"success": True})
    assert now()["models"][0]["residency"]["loads"] == 3
    assert post(url + "/api/generate", {"model": "m", "keep_alive": -1})[1]["done_reason"] == "load"
    residency = now()["models"][0]["residency"]
    assert (residency["state"], residency["unloads_in_s"], residency["loads"]) == ("loaded", None, residency["loads"])
    assert post(url + "/api/generate", {"model": "m", "keep_alive": 0})[1]["done_reason"] == "unload"
    assert now()["models"][0]["residency"]["state"] == "unloaded"


def n_wakeups(pid: int) -> int:
    """Voluntary context switches of all threads of a process."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary"))


async def test_a_pinned_model_is_not_unloaded(tmp_path):
    file = write(tmp_path, "dense", keys="pin = true")
    async with running(file, tmp_path) as service:
        with pytest.raises(AdminError, match="model dense is pinned"):
            await service.models["dense"].control.unload()


async def test_orders_that_another_one_revokes_are_answered(tmp_path):
    async with running(write(tmp_path, "dense"), tmp_path) as service:
        control = service.models["dense"].control
        loading = asyncio.ensure_future(control.load())
        while states(service)["dense"] != "loading":  # noqa: ASYNC110 - which does not last
            await asyncio.sleep(0)
        await control.unload()
        with pytest.raises(LucevisorError, match="model dense is not loaded: it was unloaded meanwhile; load it again"):
            await asyncio.wait_for(loading, 100.0)
        await control.load()
        answer = asyncio.ensure_future(generate(service.models["dense"], PROMPTS[0], 200))
        await until(lambda: service.models["dense"].engine.busy)
        unloading = asyncio.ensure_future(control.unload())
        await asyncio.sleep(0)
        await control.load()
        with pytest.raises(AdminError, match="model dense is not unloaded: it was loaded again meanwhile"):
            await asyncio.wait_for(unloading, 100.0)
        await answer
        assert states(service)["dense"] == "loaded"
