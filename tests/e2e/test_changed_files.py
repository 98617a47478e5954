"""A model file that is cut or changed behind the supervisor's back: no group runs other bytes than the rest, no
snapshot of other weights is used, the reason says what to do, no signal kills anybody.
"""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lucevisor.app.model_files import open_model
from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Observer, Service
from lucevisor.model.families import open_spec
from lucevisor.supervision.events import State
from tests.e2e.process import Cli, post
from tests.e2e.service import GOLDEN, generate, running, write_config

PROMPT = [7 * i % 250 + 5 for i in range(150)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(GOLDEN / "qwen35" / "model.gguf", tmp_path / "model.gguf"))


def change(model: Path, how: str) -> None:
    """Cut the file in the middle, zero its second half, or change one byte
    of a tensor; with the old times as far as a user can set them.
    """
    before, data = model.stat(), model.read_bytes()
    other = model.with_name("other.gguf")
    other.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    if how == "cut":
        os.truncate(model, len(data) // 2)
    elif how == "overwritten":
        shutil.copyfile(other, model)
    elif how == "same bytes":
        os.replace(shutil.copy(model, other), model)
    else:
        files = open_spec(model).files
        assert how == "one byte"
        assert files is not None
        tensor = files.tensors["blk.5.ffn_down.weight"]
        with model.open("r+b") as file:
            file.seek(tensor.offset + 3)  # sign and exponent of its first number
            byte = file.read(1)[0]
            file.seek(tensor.offset + 3)
            file.write(bytes([byte ^ 0x80]))
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))


def two_groups(tmp_path: Path, model: Path, extra: str = "") -> Path:
    return write_config(tmp_path, model, {"left": 1, "right": 1}, ["0-4", "4-8"], extra)


async def test_cut_before_the_daemons_load(model: Path, tmp_path: Path) -> None:
    config = load(write_config(tmp_path, model, {"left": 1}, ["0-8"]))
    service = Service(config, [open_model(config)], tmp_path, Observer())
    change(model, "cut")
    try:
        await service.start()
        assert not await service.wait_ready(100.0)
        assert service.groups["left"].state is State.FAILED
        assert "model.gguf was changed while the supervisor started" in service.reason()
    finally:
        await service.stop(0.0)


CACHE = """
[engine]
dtype = "float32"
[cache]
min_tokens = 8
prefix_slots = 100
dir = "{}"
"""


@pytest.mark.timeout(300)
async def test_changed_and_the_daemon_dies(model: Path, tmp_path: Path) -> None:
    """The same bytes in another file are loaded; other bytes are refused in a restart that nobody asked for too; with
    the old ones back an operator's works.
    """
    async with running(two_groups(tmp_path, model, CACHE.format(tmp_path / "snapshots")), tmp_path) as service:
        before = await generate(service, PROMPT, 8)
        change(model, "same bytes")
        await AdminOperations(service).restart_all(["right"], now=True)
        assert await generate(service, PROMPT, 8) == before
        change(model, "one byte")
        right = service.groups["right"]
        assert right.pid is not None
        os.kill(right.pid, 9)
        assert await right.wait(State.FAILED, timeout_s=100.0) is State.FAILED
        assert "changed since the supervisor started" in service.reason()
        assert "tensor 'blk.5.ffn_down.weight' holds other bytes" in service.reason()
        change(model, "one byte")  # and back
        await AdminOperations(service).restart_all(["right"], now=True)
        assert await generate(service, PROMPT, 8) == before


@pytest.mark.timeout(300)
def test_an_operator_sees_why_and_what_to_do(cli: Cli, model: Path, tmp_path: Path) -> None:
    extra = f'[server]\nport = 0\n[cache]\ndir = "{tmp_path / "snapshots"}"\n'
    config = two_groups(tmp_path, model, extra)
    url = cli.start(config)["url"]
    change(model, "overwritten")
    done = cli.run("restart", "left", "--name", "t", check=False)
    assert done.returncode == 1
    assert "model.gguf changed since the supervisor started" in done.stdout + done.stderr
    assert "then `lucevisor start`" in done.stdout + done.stderr
    assert cli.status()["state"] == "failed"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/ready", timeout=100)
    assert caught.value.code == 503
    assert "changed since the supervisor started" in caught.value.read().decode()
    code, refused = post(f"{url}/v1/completions", {"prompt": [5, 6], "max_tokens": 1})
    assert code == 503
    assert "changed since the supervisor started" in str(refused)
    cli.run("stop", "--name", "t")
    assert cli.start(config)["state"] == "ready"
    cli.run("stop", "--name", "t")
