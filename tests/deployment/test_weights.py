"""Which files a group may load beside the running ones: those with the same bytes, whatever their times say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lucevisor.deployment.weights import ModelWeights, WeightsChangedError
from lucevisor.errors import LucevisorError
from lucevisor.model.gguf_files import open_model, part_paths
from tests.deployment.test_weight_digests import flip, settled
from tests.model.test_fingerprint import write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return settled(write(tmp_path / "m.gguf", unused="blk.1.nextn.eh_proj.weight"))


def change(path: Path, how: str) -> None:
    """The file, or its times, as others may leave them."""
    if how == "touched":
        path.touch()
    elif how == "linked":
        os.link(path, path.with_name("link"))
    elif how == "copied over":
        os.replace(shutil.copy(path, path.with_name("copy")), path)
    elif how == "written alike":
        path.write_bytes(path.read_bytes())
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    else:
        assert how == "last byte"
        flip(path, path.stat().st_size - 1, 0)


def opened(path: Path) -> ModelWeights:
    return ModelWeights(open_model(part_paths(path)), path.parent / "cache")


@pytest.mark.parametrize("how", ["touched", "linked", "copied over", "written alike"])
async def test_other_times_of_the_same_bytes_need_the_digests(model: Path, how: str) -> None:
    weights = opened(model)
    await weights.wait_until_stable()
    change(model, how)
    with pytest.raises(WeightsChangedError, match="before all its bytes were hashed"):
        await weights.admit()
    weights = opened(model)
    await weights.digests()
    change(model, "touched")
    assert weights.admitted(await weights.admit())


async def test_another_header_is_refused(model: Path) -> None:
    weights = opened(model)
    await weights.digests()
    write(model.with_name("other.gguf"), metadata=[("general.name", "another")])
    os.replace(model.with_name("other.gguf"), model)
    with pytest.raises(WeightsChangedError, match="its header is another one"):
        await weights.admit()
    change(model, "removed")
    with pytest.raises(LucevisorError, match="the model cannot be read any more"):
        await weights.admit()


async def test_digests_are_free_the_second_time_and_not_of_another_state(model: Path) -> None:
    first = opened(model)
    await first.wait_until_stable()
    found = await first.digests()
    assert first.progress().startswith("100 %")
    second = opened(model)
    assert await second.digests() == found
    assert second.progress().startswith("0 %")  # nothing was read
    change(model, "last byte")  # puts the old mtime back
    third = opened(model)
    await third.wait_until_stable()
    assert await third.digests() != found
    assert third.progress().startswith("100 %")
