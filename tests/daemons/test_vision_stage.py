"""The vision stage of a daemon: what it refuses, what it reports, and formats of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daemons.errors import LoadError, StateError
from lucevisor.model.values import Dtype
from lucevisor.protocol.messages import EncodeImage
from tests.e2e.vision_files import CELL, write_mmproj
from tests.families.test_vision import load_encoder


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mmproj(tmp_path_factory.mktemp("vision") / "mmproj.gguf")


def pixels(width: int, height: int) -> memoryview:
    return memoryview(bytearray(i * 7 % 256 for i in range(3 * width * height)))


def test_its_weights_are_those_that_were_planned(mmproj: Path) -> None:
    for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16):
        stage = load_encoder(mmproj, dtype)
        assert stage.usage().weight_bytes == stage.weight_bytes == stage.spec.weight_bytes(dtype)


def test_half_precision_is_near(mmproj: Path) -> None:
    exact, near = (
        load_encoder(mmproj, dtype).encode(EncodeImage(1, 4 * CELL, 3 * CELL), pixels(4 * CELL, 3 * CELL))
        for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16)
    )
    assert exact.shape == near.shape == (12, 64)
    assert near.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, near).min() > 0.99


@pytest.mark.parametrize(
    ("width", "height", "n_bytes", "words"),
    [
        (CELL + 1, CELL, 3 * CELL * (CELL + 1), f"whole squares of {CELL} x {CELL}"),
        (0, CELL, 0, "whole squares"),
        (CELL, CELL, 3 * CELL * CELL - 1, "bytes of pixels"),
        (4 * CELL, 3 * CELL, 36 * CELL * CELL, "up to 11 tokens"),
    ],
)
def test_other_images_are_refused(mmproj: Path, width: int, height: int, n_bytes: int, words: str) -> None:
    stage = load_encoder(mmproj, max_tokens=11)
    with pytest.raises(StateError, match=words):
        stage.encode(EncodeImage(1, width, height), memoryview(bytearray(n_bytes)))


def test_weights_that_are_not_numbers_are_refused(mmproj: Path, tmp_path: Path) -> None:
    data = bytearray(mmproj.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"
    (tmp_path / "mmproj.gguf").write_bytes(data)
    with pytest.raises(LoadError, match="NaN or infinite"):
        load_encoder(tmp_path / "mmproj.gguf")
