"""``engine.kv_dtype = "q8_0"`` from the configuration to the tokens, over two processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.e2e.service import GOLDEN, generate, running, write_config


async def test_greedy_tokens_with_q8_0_keys_and_values(tmp_path: Path) -> None:
    model = GOLDEN / "qwen35" / "model.gguf"
    config = write_config(tmp_path, model, {"left": 1, "right": 1}, ["0-4", "4-8"])
    with np.load(GOLDEN / "qwen35" / "golden.npz") as golden:
        prompt = golden["input_ids"][: int(golden["prompt_len"])].tolist()
        wanted = golden["greedy"].tolist()
    async with running(config, tmp_path, ["engine.dtype=float32", "engine.kv_dtype=q8_0"]) as service:
        assert service.placement is not None
        assert service.placement.kv_dtype == "q8_0"
        assert await generate(service, prompt, len(wanted)) == wanted
