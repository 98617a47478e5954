"""Model families: architecture name to the class that builds its blocks."""

from __future__ import annotations

from daemons.models.bert import BertFamily
from daemons.models.blocks import Family
from daemons.models.gemma3 import Gemma3Family
from daemons.models.gemma4 import Gemma4Family
from daemons.models.gpt_oss import GptOssFamily
from daemons.models.laguna import LagunaFamily
from daemons.models.llama import LlamaFamily
from daemons.models.qwen3next import Qwen3NextFamily
from daemons.models.qwen35 import Qwen35Family
from daemons.models.qwen35moe import Qwen35MoeFamily

FAMILIES: dict[str, type[Family]] = {
    "bert": BertFamily,
    "gemma-embedding": Gemma3Family,
    "gemma3": Gemma3Family,
    "gemma4": Gemma4Family,
    "glm4moe": LlamaFamily,
    "gpt-oss": GptOssFamily,
    "granite": LlamaFamily,
    "granitemoe": LlamaFamily,
    "laguna": LagunaFamily,
    "llama": LlamaFamily,
    "mistral3": LlamaFamily,
    "qwen2": LlamaFamily,
    "qwen3": LlamaFamily,
    "qwen35": Qwen35Family,
    "qwen35moe": Qwen35MoeFamily,
    "qwen3moe": LlamaFamily,
    "qwen3next": Qwen3NextFamily,
}
