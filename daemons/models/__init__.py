"""Model families: architecture name to the class that builds its blocks.  One file per family."""

from __future__ import annotations

from daemons.models.blocks import Family
from daemons.models.gemma4 import Gemma4Family
from daemons.models.laguna import LagunaFamily
from daemons.models.qwen3 import Qwen3Family
from daemons.models.qwen35 import Qwen35Family
from daemons.models.qwen35moe import Qwen35MoeFamily

FAMILIES: dict[str, type[Family]] = {
    "gemma4": Gemma4Family,
    "laguna": LagunaFamily,
    "qwen3": Qwen3Family,
    "qwen35": Qwen35Family,
    "qwen35moe": Qwen35MoeFamily,
}
