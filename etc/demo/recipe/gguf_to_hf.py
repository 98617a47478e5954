"""A model's GGUF file as the Hugging Face folder that make_gguf.py reads: its inverse, for a stage that goes on from a shipped file.

    python gguf_to_hf.py MODEL.gguf TOKENIZER_DIR OUT_DIR

TOKENIZER_DIR's files are copied; config.json is made from the file's metadata.  Weights are dequantised to float32.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from make_gguf import ATTENTION, LINEAR, MLP

sys.path.append(str(Path(__file__).parent / "drafters"))

from target import read_gguf  # noqa: E402


def grouped(t: Tensor, n_key: int, n_per_key: int, rows: int, dim: int = 0) -> Tensor:
    """make_gguf.tiled's inverse."""
    t = t.movedim(dim, 0)
    out = t.reshape(n_per_key, n_key, rows, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
    return out.movedim(0, dim).contiguous()


def state_dict(meta: dict[str, object], w: dict[str, Tensor]) -> dict[str, Tensor]:
    m = {k.removeprefix("qwen35."): v for k, v in meta.items() if k.startswith("qwen35.")}
    n_key, n_value, d = m["ssm.group_count"], m["ssm.time_step_rank"], m["ssm.state_size"]
    r, n_qk = n_value // n_key, 2 * n_key * d
    sd = {"model.embed_tokens.weight": w["token_embd.weight"], "model.norm.weight": w["output_norm.weight"] - 1}
    for i, recurrent in enumerate(m["attention.recurrent_layers"]):
        src, dst = f"blk.{i}.", f"model.layers.{i}."
        sd[dst + "input_layernorm.weight"] = w[src + "attn_norm.weight"] - 1
        sd[dst + "post_attention_layernorm.weight"] = w[src + "post_attention_norm.weight"] - 1
        for a, b in MLP.items():
            sd[f"{dst}mlp.{a}.weight"] = w[f"{src}{b}.weight"]
        if not recurrent:
            for a, b in ATTENTION.items():
                sd[f"{dst}self_attn.{a}.weight"] = w[f"{src}{b}.weight"]
            for n in ("q_norm", "k_norm"):
                sd[f"{dst}self_attn.{n}.weight"] = w[f"{src}attn_{n}.weight"] - 1
            continue
        la = dst + "linear_attn."
        qkv, conv = w[src + "attn_qkv.weight"], w[src + "ssm_conv1d.weight"]
        sd[la + "in_proj_qkv.weight"] = torch.cat([qkv[:n_qk], grouped(qkv[n_qk:], n_key, r, d)])
        for a, b in LINEAR.items():
            sd[f"{la}{a}.weight"] = grouped(w[f"{src}{b}.weight"], n_key, r, d if a == "in_proj_z" else 1)
        sd[la + "A_log"] = grouped((-w[src + "ssm_a"]).log(), n_key, r, 1)
        sd[la + "dt_bias"] = grouped(w[src + "ssm_dt.bias"], n_key, r, 1)
        sd[la + "conv1d.weight"] = torch.cat([conv[:n_qk], grouped(conv[n_qk:], n_key, r, d)])[:, None]
        sd[la + "norm.weight"] = w[src + "ssm_norm.weight"]
        sd[la + "out_proj.weight"] = grouped(w[src + "ssm_out.weight"], n_key, r, d, dim=1)
    return {k: v.contiguous() for k, v in sd.items()}


def main(model: Path, tokenizer: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    meta, tensors = read_gguf(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copy(tokenizer / name, out / name)
    from train import make_config

    sizes = (meta[f"qwen35.{k}"] for k in ("embedding_length", "feed_forward_length", "block_count"))
    shape = Namespace(**dict(zip(("hidden", "intermediate", "layers"), sizes, strict=True)))
    config = make_config(PreTrainedTokenizerFast.from_pretrained(tokenizer), shape)
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(out)
    save_file(state_dict(meta, tensors), out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
