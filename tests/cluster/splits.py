"""Golden models of all families over two and three hosts."""

from __future__ import annotations

SPLITS = (
    ("gemma3", (1, 2), [3]),
    ("gpt_oss", (1, 0, 2), [1, 2]),
    ("qwen3next", (0, 1), [2]),
    ("gemma4_e2b", (1, 2), [3]),
    ("gemma4_moe", (0, 1, 2), [2, 4]),
    ("glm4moe", (1, 0, 2), [1, 2]),
    ("granite", (0, 1), [1]),
    ("granitemoe", (1, 2), [2]),
    ("laguna", (0, 1), [2]),
    ("laguna_mscale", (1, 0, 2), [1, 4]),
    ("mistral3", (0, 1, 2), [1, 3]),
    ("qwen2", (1, 0), [1]),
    ("qwen3", (0, 1, 2), [1, 3]),
    ("qwen35moe", (1, 2), [1]),
    ("qwen3moe", (0, 1), [2]),
)
"""Beside llama and qwen35: a family, the hosts of its stages (0: this one), where all stages but the first begin."""
