"""Registry of model families: architecture name -> the function that reads its spec.

One file per family, but for those whose layers differ from llama's only in a switch: qwen2 in biases, which the file
has, qwen3 in RMSNorm on queries and keys, qwen3moe in routed experts beside it, granite in scales,
mistral3 in the temperature of its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lucevisor.model.families import bert, gemma3, gemma4, glm4moe, gpt_oss, laguna, llama, qwen3next, qwen35, qwen35moe
from lucevisor.model.gguf_files import GgufFiles, open_model, part_paths
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[GgufFiles, Mapping[str, str]], ModelSpec]] = {
    "bert": bert.spec,
    "gemma-embedding": gemma3.embedding_spec,
    "gemma3": gemma3.spec,
    "gemma4": gemma4.spec,
    "glm4moe": glm4moe.spec,
    "gpt-oss": gpt_oss.spec,
    "granite": partial(llama.read, architecture="granite", adjacent_pairs=True, scaled=True),
    "granitemoe": partial(llama.read, architecture="granitemoe", adjacent_pairs=True, experts=True, scaled=True),
    "laguna": laguna.spec,
    "llama": llama.spec,
    "mistral3": partial(llama.read, architecture="mistral3", adjacent_pairs=True),
    "qwen2": partial(llama.read, architecture="qwen2"),
    "qwen3": partial(llama.read, architecture="qwen3", qk_norm=True),
    "qwen35": qwen35.spec,
    "qwen35moe": qwen35moe.spec,
    "qwen3moe": partial(llama.read, architecture="qwen3moe", qk_norm=True, experts=True),
    "qwen3next": qwen3next.spec,
}

REFUSED = (
    ("qwen4exp", "(Qwen3.8-Flash-Next) is another architecture than Qwen3.8-27B's, which this version does not run"),
    ("dflash", "is a drafter, not a model: name it in draft.path, and the model it drafts for in model.path"),
    ("dflash-draft", "is a drafter, not a model: name it in draft.path, and the model it drafts for in model.path"),
    ("clip", "is an image encoder, not a model: name it in vision.path, and the model that it is of in model.path"),
    ("gemma4-assistant", "is a drafter, not a model: name it in draft.path, and the model it drafts for in model.path"),
)
"""Unsupported architectures that users may try, and the message for each."""


def read_spec(files: GgufFiles, options: Mapping[str, str] | None = None) -> ModelSpec:
    """Read the spec of an open model.  ``options``: as in ``Load.options``.  Raises GgufError."""
    architecture = files.metadata.get("general.architecture")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        reason = f"{architecture!r} is not a family this version runs: {', '.join(sorted(FAMILIES))}"
        if isinstance(architecture, str):
            reason = next((f"{architecture!r} {text}" for end, text in REFUSED if architecture.endswith(end)), reason)
        raise GgufError(str(files.paths[0]), "metadata value 'general.architecture'", reason)
    if files.metadata.get("general.type") == "adapter":
        reason = "is 'adapter', not a model: name it in lora.NAME.path, and the model that it is of in model.path"
        raise GgufError(str(files.paths[0]), "metadata value 'general.type'", reason)
    return family(files, options or {})


def open_spec(path: Path, options: Mapping[str, str] | None = None) -> ModelSpec:
    return read_spec(open_model(part_paths(path)), options)
