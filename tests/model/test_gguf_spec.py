"""Specs read from headers: published sizes, the table that planner and pools read, and hostile metadata."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import pytest

from lucevisor.model.families import open_spec, read_spec
from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import Keys
from tests.model.qwen35_file import Shape, write

DEMO = Path(__file__).parents[2] / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"
TINY = Shape()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> GgufFiles:
    return open_model([write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TINY)])


def patched_demo(path: Path, after: bytes, skip: int, value: int) -> Path:
    """The demo's file with another uint32 some bytes behind a name."""
    data = bytearray(DEMO.read_bytes())
    at = data.index(after) + len(after) + skip
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    return path


def test_layers_beyond_the_block_count_are_refused(tmp_path):
    path = patched_demo(tmp_path / "m.gguf", b"qwen35.block_count", 4, 3)
    with pytest.raises(GgufError, match=r"tensor 'blk\.3\..*': is of no layer: qwen35\.block_count is 3"):
        open_spec(path)


def test_a_type_too_small_for_the_data_is_refused(tmp_path):
    iq2_xxs = 16
    path = patched_demo(tmp_path / "m.gguf", b"blk.1.ffn_down.weight", 4 + 2 * 8, iq2_xxs)
    with pytest.raises(
        GgufError, match=r"tensor 'blk\.1\.ffn_down\.weight': IQ2_XXS \[512, 768\] leaves \d+ bytes unused"
    ):
        open_spec(path)


def test_an_unknown_architecture_lists_the_known_ones(tiny):
    other = dataclasses.replace(tiny, metadata={**tiny.metadata, "general.architecture": "mamba"})
    with pytest.raises(GgufError, match=r"'mamba' is not a family this version runs: .*qwen35"):
        read_spec(other)


OTHERS = [
    ({"general.type": "adapter"}, r"'general.type': is 'adapter', not a model: name it in lora\.NAME\.path"),
    ({"general.architecture": "clip"}, r"'clip' is an image encoder, not a model: name it in vision\.path"),
]


@pytest.mark.parametrize(("metadata", "message"), OTHERS)
def test_other_files_in_the_place_of_a_model_are_called_what_they_are(tiny, metadata, message):
    with pytest.raises(GgufError, match=message):
        read_spec(dataclasses.replace(tiny, metadata={**tiny.metadata, **metadata}))


@pytest.mark.parametrize("n_layers", [1025, 1 << 24, (1 << 32) - 1])
def test_a_claim_of_many_layers_costs_nothing(tiny, n_layers):
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match=r"block_count: is \d+, expected 1 to 1024"):
            read_spec(dataclasses.replace(tiny, metadata={**tiny.metadata, "qwen35.block_count": n_layers}))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_keys_name_the_expected_type():
    keys = Keys({"a.n": 5, "a.list": [1, 2], "a.text": "x", "a.nan": float("nan"), "a.same": [3, 3]}, "a", "f.gguf")
    assert keys.integer("n") == 5
    assert keys.integer("same") == 3
    assert keys.integer("absent", 7) == 7
    assert keys.integers("n", 3) == [5, 5, 5]
    assert keys.flags("absent", 3) is None
    for call, reason in [
        (lambda: keys.integer("absent"), r"f\.gguf: metadata value a\.absent: is missing"),
        (lambda: keys.integer("text"), "is 'x', expected an integer"),
        (lambda: keys.integer("n", high=4), "is 5, expected 1 to 4"),
        (lambda: keys.integers("list", 3), "an array of 2, expected 3"),
        (lambda: keys.flags("list", 3), "at least 3 flags"),
        (lambda: keys.number("nan"), "expected a finite number"),
        (lambda: keys.number("n", above=5.0), "expected more than 5"),
        (lambda: keys.text("n", ""), "expected a string"),
    ]:
        with pytest.raises(GgufError, match=reason):
            call()
