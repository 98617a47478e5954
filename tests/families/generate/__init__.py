"""Random tiny models of each family: shapes drawn by seed, computed by transformers, written as GGUF.

``FAMILIES[name](draw)`` gives a :class:`~tests.families.generate.made.Made`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.families.generate import gemma3, gemma4, gpt_oss, laguna, llama, qwen
from tests.families.generate.made import Draw, Made

FAMILIES: dict[str, Callable[[Draw], Made]] = {
    "llama": llama.llama,
    "mistral3": llama.mistral3,
    "qwen2": llama.qwen2,
    "qwen3": qwen.qwen3,
    "qwen3moe": llama.qwen3moe,
    "qwen35": qwen.qwen35,
    "qwen35moe": qwen.qwen35moe,
    "qwen3next": qwen.qwen3next,
    "gemma3": gemma3.gemma3,
    "gemma4": gemma4.gemma4,
    "glm4moe": llama.glm4moe,
    "gpt-oss": gpt_oss.gpt_oss,
    "granite": llama.granite,
    "granitemoe": llama.granitemoe,
    "laguna": laguna.laguna,
}
