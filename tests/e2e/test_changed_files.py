"""A model file that is cut or changed behind the supervisor's back: the group says which file, no signal kills it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lucevisor.app.run import open_model
from lucevisor.app.service import Service
from lucevisor.cli.progress import SilentDisplay
from lucevisor.config import load
from lucevisor.supervision.states import State
from tests.e2e.service import GOLDEN, running, write_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(GOLDEN / "qwen35" / "model.gguf", tmp_path / "model.gguf"))


def change(model: Path, how: str) -> None:
    """Cut the file in the middle, or zero its second half, in place or by a new file of the same name."""
    data = model.read_bytes()
    other = model.with_name("other.gguf")
    other.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    if how == "cut":
        os.truncate(model, len(data) // 2)
    elif how == "overwritten":
        shutil.copyfile(other, model)
    else:
        os.replace(other, model)


async def test_cut_before_the_daemons_load(model: Path, tmp_path: Path) -> None:
    config = load(write_config(tmp_path, model, {"left": 1}, ["0-8"]))
    service = Service(config, open_model(config), tmp_path, SilentDisplay())
    change(model, "cut")
    try:
        await service.start()
        assert not await service.wait_ready(60.0)
        assert service.groups["left"].state is State.FAILED
        assert "model.gguf: tensor '" in service.reason()
        assert "it was cut after it was opened" in service.reason()
    finally:
        await service.stop(0.0)


@pytest.mark.parametrize("how", ["cut", "overwritten", "replaced"])
async def test_changed_before_a_daemon_loads_again(model: Path, tmp_path: Path, how: str) -> None:
    async with running(write_config(tmp_path, model, {"left": 1, "right": 1}, ["0-4", "4-8"]), tmp_path) as service:
        change(model, how)
        with pytest.raises(Exception, match=r"model\.gguf") as caught:
            await service.restart("right", now=True)
        wanted = "the file is truncated" if how == "cut" else "the file is not the one that the plan was made for"
        assert wanted in str(caught.value)
        if how == "cut":
            assert "tensor '" in str(caught.value)
        assert service.groups["right"].state is State.FAILED
        assert service.groups["left"].state is State.READY
