"""Specs of mmproj files: which are refused, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gguf_writing import finish, new_file
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.vision import open_vision
from tests.e2e.service import GOLDEN
from tests.e2e.vision_files import write_mmproj, write_model


def test_an_encoder_fits_the_model_that_it_was_made_for(tmp_path: Path) -> None:
    mmproj = write_mmproj(tmp_path / "mmproj.gguf")
    spec = open_vision(mmproj, open_spec(write_model(tmp_path / "model.gguf")))
    assert (spec.cell_pixels, spec.min_tokens, spec.max_tokens) == (16, 8, 100)
    assert spec.of_projector.placeholder == "<|image_pad|>"
    with pytest.raises(GgufError, match=r"has no token <\|image_pad\|>"):
        open_vision(mmproj, open_spec(GOLDEN / "qwen35" / "model.gguf"))
    with pytest.raises(GgufError, match="qwen35 and qwen35moe read, not llama"):
        open_vision(mmproj, open_spec(GOLDEN / "llama" / "model.gguf"))
    wide = write_mmproj(tmp_path / "wide.gguf", output=65)
    with pytest.raises(GgufError, match="is 65, and rows of tiny-qwen35 have 64 numbers"):
        open_vision(wide, open_spec(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"projector_type": "gemma3"}, "'gemma3'; this version runs"),
        ({}, "projector_type"),
        ({"projector_type": "qwen3vl_merger"}, "block_count: is missing"),
    ],
)
def test_other_files_are_refused(metadata: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    finish(new_file(path, "clip", metadata))  # type: ignore[arg-type]
    with pytest.raises(GgufError, match=words):
        open_vision(path)


def test_a_model_is_no_encoder() -> None:
    with pytest.raises(GgufError, match="is 'llama', and that of an mmproj file is 'clip'"):
        open_vision(GOLDEN / "llama" / "model.gguf")
