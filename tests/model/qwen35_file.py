"""Headers of ``qwen35`` and ``qwen35moe`` models of any size, written with the gguf package.

The data behind them is a hole in the file.  Types follow llama.cpp's Q4_K_M mix, or its IQ4_XS one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf

from bench.gguf_writing import finish_with_hole, new_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one model.  ``mix``: which types its matrices have."""

    n_layers: int = 8
    embedding: int = 256
    feed_forward: int = 512
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 4
    delta_dim: int = 64
    vocabulary: int = 1024
    tied: bool = False
    context: int = 4096
    mix: Literal["q4_k_m", "iq4_xs", "q8_0", "f32"] = "q4_k_m"
    mtp: bool = False  # an MTP head behind the last layer
    interval: int = 4  # of layers with attention
    n_experts: int = 0
    n_used: int = 0

    @property
    def architecture(self) -> str:
        return "qwen35moe" if self.n_experts else "qwen35"

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.delta_dim


QWEN36_27B = Shape(
    n_layers=64,
    embedding=5120,
    feed_forward=17408,
    n_heads=24,
    n_kv_heads=4,
    head_dim=256,
    key_heads=16,
    value_heads=48,
    delta_dim=128,
    vocabulary=248320,
    context=262144,
)
QWEN36_35B_A3B = Shape(
    n_layers=40,
    embedding=2048,
    feed_forward=512,  # of one expert, and of the shared one
    n_heads=16,
    n_kv_heads=2,
    head_dim=256,
    key_heads=16,
    value_heads=32,
    delta_dim=128,
    vocabulary=248320,
    context=262144,
    n_experts=256,
    n_used=8,
)


def tensors(s: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> row-major shape, in the order of the file."""
    e, inner = s.embedding, s.value_heads * s.delta_dim
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (s.vocabulary, e)}
    if not s.tied:
        out["output.weight"] = (s.vocabulary, e)
    out["output_norm.weight"] = (e,)
    for i in range(s.n_layers + s.mtp):
        b = f"blk.{i}."
        out |= {b + "attn_norm.weight": (e,), b + "post_attention_norm.weight": (e,)}
        if i == s.n_layers:
            out |= {f"{b}nextn.{norm}.weight": (e,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            out[b + "nextn.eh_proj.weight"] = (e, 2 * e)
        if (i + 1) % s.interval == 0 or i == s.n_layers:
            out |= {
                b + "attn_q.weight": (2 * s.n_heads * s.head_dim, e),
                b + "attn_k.weight": (s.n_kv_heads * s.head_dim, e),
                b + "attn_v.weight": (s.n_kv_heads * s.head_dim, e),
                b + "attn_output.weight": (e, s.n_heads * s.head_dim),
                b + "attn_q_norm.weight": (s.head_dim,),
                b + "attn_k_norm.weight": (s.head_dim,),
            }
        else:
            out |= {
                b + "attn_qkv.weight": (s.channels, e),
                b + "attn_gate.weight": (inner, e),
                b + "ssm_conv1d.weight": (s.channels, 4),
                b + "ssm_dt.bias": (s.value_heads,),
                b + "ssm_a": (s.value_heads,),
                b + "ssm_beta.weight": (s.value_heads, e),
                b + "ssm_alpha.weight": (s.value_heads, e),
                b + "ssm_norm.weight": (s.delta_dim,),
                b + "ssm_out.weight": (e, inner),
            }
        out |= feed_forward(b, s)
    return out


def feed_forward(b: str, s: Shape) -> dict[str, tuple[int, ...]]:
    """What follows the mixer of the layer with the prefix ``b``."""
    e, f, n = s.embedding, s.feed_forward, s.n_experts
    if not n:
        return {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
    return {
        b + "ffn_gate_inp.weight": (n, e),
        b + "ffn_gate_exps.weight": (n, f, e),
        b + "ffn_up_exps.weight": (n, f, e),
        b + "ffn_down_exps.weight": (n, e, f),
        b + "ffn_gate_inp_shexp.weight": (e,),
        b + "ffn_gate_shexp.weight": (f, e),
        b + "ffn_up_shexp.weight": (f, e),
        b + "ffn_down_shexp.weight": (e, f),
    }


def kind_of(name: str, shape: tuple[int, ...], s: Shape) -> gguf.GGMLQuantizationType:
    """The storage type that the mix gives a tensor."""
    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2 or "_norm." in name or "ssm_conv1d" in name or "ffn_gate_inp" in name or s.mix == "f32":
        return kinds.F32
    if s.mix == "q8_0":
        return kinds.Q8_0
    if name == "output.weight" or (name == "token_embd.weight" and s.tied):
        return kinds.Q6_K
    if name == "token_embd.weight":
        return kinds.Q4_K
    i, n = int(name.split(".")[1]), s.n_layers
    more_bits = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
    precious = any(part in name for part in ("attn_v.", "attn_qkv.", "ffn_down"))
    if precious and more_bits:
        return kinds.Q6_K
    return kinds.Q4_K if s.mix == "q4_k_m" else kinds.IQ4_XS


def metadata(s: Shape) -> dict[str, int | float]:
    """The keys under the architecture's prefix."""
    experts = {
        "expert_count": s.n_experts,
        "expert_used_count": s.n_used,
        "expert_feed_forward_length": s.feed_forward,
        "expert_shared_feed_forward_length": s.feed_forward,
    }
    return (
        (experts if s.n_experts else {})
        | ({"nextn_predict_layers": 1} if s.mtp else {})
        | {
            "block_count": s.n_layers + s.mtp,
            "context_length": s.context,
            "embedding_length": s.embedding,
            "feed_forward_length": s.feed_forward,
            "attention.head_count": s.n_heads,
            "attention.head_count_kv": s.n_kv_heads,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e7,
            "rope.dimension_count": s.head_dim // 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": s.delta_dim,
            "ssm.group_count": s.key_heads,
            "ssm.time_step_rank": s.value_heads,
            "ssm.inner_size": s.value_heads * s.delta_dim,
            "full_attention_interval": s.interval,
        }
    )


def write(path: Path, s: Shape, *, name: str = "synthetic", without: str = "", reshape: str = "") -> Path:
    """Write a header of shape ``s`` and a hole of the size of its data.

    ``without`` leaves a tensor out, ``reshape`` gives one a row too many.
    """
    writer = new_file(path, s.architecture, metadata(s))
    writer.add_name(name)
    infos = []
    for tensor, written in tensors(s).items():
        shape = (written[0] + 1, *written[1:]) if tensor == reshape else written
        if tensor != without:
            infos.append((tensor, shape, kind_of(tensor, shape, s)))
    finish_with_hole(path, writer, infos)
    return path
