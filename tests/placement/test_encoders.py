"""Where the encoder of images goes, and how many tokens an image has there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lucevisor.config import Config, load
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.vision import VisionSpec, open_vision
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_text
from lucevisor.placement.result import PlacementError
from tests.e2e.vision_files import write_gemma_mmproj, write_mmproj, write_model
from tests.placement.made import CPUS, configure, placed


@pytest.fixture
def qwen(tmp_path: Path) -> tuple[ModelSpec, VisionSpec]:
    return open_spec(write_model(tmp_path / "model.gguf")), open_vision(write_mmproj(tmp_path / "mmproj.gguf"))


@pytest.fixture
def gemma(tmp_path: Path) -> tuple[ModelSpec, VisionSpec]:
    model = open_spec(write_model(tmp_path / "model.gguf", "gemma4_moe"))
    return model, open_vision(write_gemma_mmproj(tmp_path / "mmproj.gguf"), model)


def configured(folder: Path, *vision: str, **engine: object) -> Config:
    config = configure(folder, CPUS, [1, 1], dtype="float32", **engine)
    return load(config.file, ["vision.path=mmproj.gguf", *(f"vision.{each}" for each in vision)])


def test_by_default_it_is_where_the_first_layers_are(qwen: tuple[ModelSpec, VisionSpec], tmp_path: Path) -> None:
    model, encoder = qwen
    found = placed(model, configured(tmp_path), encoder=encoder).encoder
    assert found is not None
    assert (str(found.device), found.min_tokens, found.max_tokens) == ("left:0", 8, 100)
    found = placed(model, configured(tmp_path, "device=right:0", "max_tokens=9000"), encoder=encoder).encoder
    assert found is not None
    assert (str(found.device), found.min_tokens, found.max_tokens) == ("right:0", 8, 9000), "more than a chunk"


def test_images_that_no_message_takes_are_refused(qwen: tuple[ModelSpec, VisionSpec], tmp_path: Path) -> None:
    model, encoder = qwen
    wide = dataclasses.replace(encoder, output_size=1 << 16)
    with pytest.raises(PlacementError, match="more than a message takes") as caught:
        plan(model, configured(tmp_path, "max_tokens=16384"), None, encoder=wide)
    assert caught.value.key == "vision.max_tokens"


def test_images_that_are_read_at_once_fit_a_chunk(gemma: tuple[ModelSpec, VisionSpec], tmp_path: Path) -> None:
    model, encoder = gemma
    assert encoder.max_tokens == 128, "as many as the encoder has positions in a row"
    p = placed(model, configured(tmp_path, "max_tokens=100", prefill_chunk=64), encoder=encoder)
    assert p.encoder is not None
    assert p.encoder.max_tokens == p.prefill_chunk == 64
    assert "vision.max_tokens = 100 is cut to 64: the model reads an image in one step" in plan_text(p)
    flash = load(configured(tmp_path).file, ["kvflash.pool_tokens=1"])
    with pytest.raises(PlacementError, match="the pool of KV Flash allows steps of 192 tokens") as caught:
        plan(model, flash, None, encoder=dataclasses.replace(encoder, max_tokens=280, side=1024))
    assert caught.value.key == "vision.max_tokens"
    with pytest.raises(PlacementError, match="has 256 positions for patches of a row") as caught:
        plan(model, configured(tmp_path, "max_tokens=129"), None, encoder=encoder)
    assert caught.value.hint == "nearest: 128"
