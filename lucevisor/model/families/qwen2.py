"""Family ``qwen2``: the layers of ``llama`` with biases on queries, keys and values (Qwen2, Qwen2.5)."""

from __future__ import annotations

from collections.abc import Mapping

from lucevisor.model.families import llama
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen2`` file."""
    return llama.read(files, options, "qwen2")
