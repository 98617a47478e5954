"""Family ``qwen3``: the layers of ``llama`` with RMSNorm on queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from lucevisor.model.families import llama
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen3`` file."""
    return llama.read(files, options, "qwen3", qk_norm=True)
