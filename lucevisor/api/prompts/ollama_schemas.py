"""Schemas of Ollama's API: request bodies, its options, parameters without effect.

Knows names, types and ranges, not what a value means.  The bodies are open: an unknown field is accepted and named in a
response header, unless it looks like a misspelt one.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lucevisor.api.prompts.decoding import ParameterRules
from lucevisor.api.prompts.schemas import NOT_HERE, Flag

RULES: Final = ParameterRules(
    harmless={"keep_alive": str | int | float, "truncate": bool, "shift": bool},
    refused={
        "height": NOT_HERE,
        "steps": NOT_HERE,
        "width": NOT_HERE,
    },
    neutral={"images": ([],), "template": ("",)},
    aliases={},
    open=True,
)

OPTIONS: Final[dict[str, str]] = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "mirostat": "mirostat",
    "mirostat_eta": "mirostat_eta",
    "mirostat_tau": "mirostat_tau",
    "num_predict": "max_tokens",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "typical_p": "typical_p",
}
"""Ollama's options, and the chat parameters that they are."""

IDLE_OPTIONS: Final = frozenset(
    [
        *(
            "draft_num_predict",
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_ctx",
        ),
        *("num_gpu", "num_keep", "num_thread", "numa", "penalize_newline", "repeat_last_n", "tfs_z", "use_mlock"),
        *("use_mmap", "vocab_only"),
    ]
)
"""Options without effect: what they set is set for all requests, by the configuration."""


class OllamaBody(msgspec.Struct, kw_only=True):
    """Parameters common to both endpoints.  None: absent, the default applies."""

    model: str | None = None
    stream: Flag = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: Flag = None
    top_logprobs: int | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """POST /api/chat.  Without messages it only asks for the model."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """POST /api/generate.  Without a prompt it only asks for the model."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    context: list[int] | None = None
    raw: Flag = None


class ShowBody(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: Flag = None
