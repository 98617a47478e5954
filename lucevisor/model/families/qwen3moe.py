"""Family ``qwen3moe``: the layers of ``qwen3`` with routed experts (Qwen3-30B-A3B, Qwen3-Coder)."""

from __future__ import annotations

from collections.abc import Mapping

from lucevisor.model.families import llama
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen3moe`` file."""
    return llama.read(files, options, "qwen3moe", qk_norm=True, experts=True)
