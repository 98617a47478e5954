"""Makes golden LoRA adapters: ``python -m tests.families.generate.lora NAME FOLDER``, with peft installed.

NAME is a golden file of ``generate.golden``; the contents are those of tests/data/golden/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from torch import Tensor

from tests.families.adapters import write_adapter
from tests.families.generate.golden import MODELS, N_TOKENS, VOCABULARY, hidden_and_logits
from tests.families.generate.llama import adjacent
from tests.families.generate.made import Draw

RANK, ALPHA = 4, 6
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "embed_tokens": "token_embd", "lm_head": "output",
}  # fmt: skip
TARGETS = {"llama": [name for name in NAMES if name != "embed_tokens"], "gemma3": [*NAMES][:-1]}


def pairs_of(model: Any, config: Any, *, side_by_side: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The pairs of an adapter as llama.cpp's converter writes them; ``side_by_side``: rows of rotary pairs."""
    pairs = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        if not isinstance(module, peft.tuners.lora.LoraLayer):
            continue
        a: Tensor
        b: Tensor
        if isinstance(module, peft.tuners.lora.Embedding):
            a, b = module.lora_embedding_A["default"].t(), module.lora_embedding_B["default"]
        else:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        if side_by_side and parts[-1] in ("q_proj", "k_proj"):
            b = adjacent(b, config.num_attention_heads if parts[-1] == "q_proj" else config.num_key_value_heads)
        layer = f"blk.{parts[parts.index('layers') + 1]}." if "layers" in parts else ""
        pairs[f"{layer}{NAMES[parts[-1]]}.weight"] = a.detach().numpy(), b.detach().numpy()
    return pairs


def write(name: str, folder: Path) -> None:
    draw = Draw([*MODELS].index(name))
    made = MODELS[name](draw)
    ids = draw.ids(N_TOKENS, VOCABULARY)
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[name], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(made.model, settings)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:  # numbers that float16 holds
            parameter.data = (0.1 * torch.randn_like(parameter)).half().float()
    base: Any = adapted.get_base_model()
    logits = hidden_and_logits(base, ids)[1]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", input_ids=np.array(ids), logits=logits.numpy())
    pairs = pairs_of(adapted, base.config, side_by_side=name == "llama")
    write_adapter(folder / f"{name}.gguf", made.architecture, pairs, alpha=ALPHA, dtype=np.float16)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
