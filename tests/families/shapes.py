"""Headers of full-size models of several families, written with the gguf package; the data behind them are a hole in
the file.

Names and shapes are those of published files (docs/families.md), written down here a second time so that they can
disagree with the specs under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf

from bench.gguf_writing import Value, finish_with_hole, new_file


@dataclass(frozen=True)
class Model:
    """A model of ``architecture``: its metadata (without the prefix) and its tensors, row-major."""

    architecture: str
    metadata: dict[str, Value]
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)


# Long: one statement per hyperparameter, and splitting it would hide which depend on which.
def gemma4(
    *,
    n_layers: int,
    embedding: int,
    widths: list[int],
    n_heads: int,
    kv: tuple[int, int],
    every: int,
    window: int,
    dims: tuple[int, int] = (256, 512),
    n_shared: int = 0,
    layer_input: int = 0,
    experts: tuple[int, int, int] = (0, 0, 0),
    key_values: bool = False,
    vocabulary: int = 262144,
) -> Model:
    """``kv`` and ``dims``: kv heads and head dims of sliding and of full layers; every ``every``-th layer is full;
    ``experts``: count, used, width."""
    sliding = [(i + 1) % every != 0 for i in range(n_layers)]
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": 131072,
        "embedding_length": embedding,
        "feed_forward_length": widths,
        "attention.head_count": n_heads,
        "attention.head_count_kv": [kv[0] if s else kv[1] for s in sliding],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": dims[1],
        "attention.value_length": dims[1],
        "attention.key_length_swa": dims[0],
        "attention.value_length_swa": dims[0],
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": n_shared,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": dims[1],
        "rope.dimension_count_swa": dims[0],
        "embedding_length_per_layer_input": layer_input,
        "final_logit_softcapping": 30.0,
    }
    e = embedding
    t: dict[str, tuple[int, ...]] = {
        "rope_freqs.weight": (dims[1] // 2,),
        "token_embd.weight": (vocabulary, e),
        "output_norm.weight": (e,),
    }
    if layer_input:
        t["per_layer_token_embd.weight"] = (vocabulary, n_layers * layer_input)
        t["per_layer_model_proj.weight"] = (n_layers * layer_input, e)
        t["per_layer_proj_norm.weight"] = (layer_input,)
    n_experts, used, width = experts
    if n_experts:
        metadata |= {"expert_count": n_experts, "expert_used_count": used, "expert_feed_forward_length": width}
    for i, slides in enumerate(sliding):
        b, d, hk, f = f"blk.{i}.", dims[0] if slides else dims[1], kv[0] if slides else kv[1], widths[i]
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            t[b + name + ".weight"] = (e,)
        t |= {b + "attn_q.weight": (n_heads * d, e), b + "attn_q_norm.weight": (d,)}
        if i < n_layers - n_shared:
            t |= {b + "attn_k.weight": (hk * d, e), b + "attn_k_norm.weight": (d,)}
            if slides or not key_values:
                t[b + "attn_v.weight"] = (hk * d, e)
        t |= {b + "attn_output.weight": (e, n_heads * d), b + "layer_output_scale.weight": (1,)}
        t |= {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
        if layer_input:
            t |= {
                b + "inp_gate.weight": (layer_input, e),
                b + "proj.weight": (e, layer_input),
                b + "post_norm.weight": (e,),
            }
        if n_experts:
            t |= {b + "ffn_gate_inp.weight": (n_experts, e), b + "ffn_gate_inp.scale": (e,)}
            t |= {
                b + "ffn_gate_up_exps.weight": (n_experts, 2 * width, e),
                b + "ffn_down_exps.weight": (n_experts, e, width),
            }
            t[b + "ffn_down_exps.scale"] = (n_experts,)
            t |= {b + n + ".weight": (e,) for n in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")}
    return Model("gemma4", metadata, t)


# Long: one statement per hyperparameter, and splitting it would hide which depend on which.
def laguna(
    *,
    n_layers: int,
    embedding: int,
    feed_forward: int,
    heads: tuple[int, int],
    n_kv_heads: int,
    head_dim: int,
    window: int,
    experts: tuple[int, int, int, int],
    vocabulary: int = 100352,
) -> Model:
    """``heads``: of full layers (every fourth, the first one included) and of sliding ones; ``experts``: count, used,
    width, shared width.
    """
    n_experts, used, width, shared = experts
    counts = [heads[0] if i % 4 == 0 else heads[1] for i in range(n_layers)]
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": 131072,
        "embedding_length": embedding,
        "feed_forward_length": feed_forward,
        "attention.head_count": counts,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": head_dim // 2,
        "rope.dimension_count_swa": head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_beta_fast": 64.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        "expert_count": n_experts,
        "expert_used_count": used,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": shared,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    }
    e, d = embedding, head_dim
    t: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, e),
        "output_norm.weight": (e,),
        "output.weight": (vocabulary, e),
    }
    for i, h in enumerate(counts):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,)}
        t |= {b + "attn_q_norm.weight": (d,), b + "attn_k_norm.weight": (d,), b + "attn_gate.weight": (h, e)}
        t |= {b + "attn_q.weight": (h * d, e), b + "attn_output.weight": (e, h * d)}
        t |= {b + "attn_k.weight": (n_kv_heads * d, e), b + "attn_v.weight": (n_kv_heads * d, e)}
        if i == 0:
            f = feed_forward
            t |= {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
            continue
        t |= {b + "ffn_gate_inp.weight": (n_experts, e), b + "exp_probs_b.bias": (n_experts,)}
        t |= {b + f"ffn_{n}_exps.weight": (n_experts, width, e) for n in ("gate", "up")}
        t |= {b + f"ffn_{n}_shexp.weight": (shared, e) for n in ("gate", "up")}
        t |= {b + "ffn_down_exps.weight": (n_experts, e, width), b + "ffn_down_shexp.weight": (e, shared)}
    return Model("laguna", metadata, t)


def llama(
    architecture: str,
    *,
    n_layers: int,
    embedding: int,
    feed_forward: int,
    heads: tuple[int, int],
    head_dim: int,
    vocabulary: int,
    tied: bool,
    more: dict[str, Value],
) -> Model:
    """``heads``: of queries and of keys; ``more``: what the family adds to Llama's metadata."""
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": 131072,
        "embedding_length": embedding,
        "feed_forward_length": feed_forward,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": head_dim,
    }
    e, f, q, kv = embedding, feed_forward, heads[0] * head_dim, heads[1] * head_dim
    t: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, e), "output_norm.weight": (e,)}
    if not tied:
        t["output.weight"] = (vocabulary, e)
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,)}
        t |= {b + "attn_q.weight": (q, e), b + "attn_k.weight": (kv, e), b + "attn_v.weight": (kv, e)}
        t |= {b + "attn_output.weight": (e, q)}
        t |= {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
    return Model(architecture, metadata | more, t)


def glm4moe() -> Model:
    """GLM-4.5-Air without its MTP block: one dense layer, then 128 experts."""
    e, n, width = 4096, 128, 1408
    more: dict[str, Value] = {
        "attention.key_length": 128,
        "attention.value_length": 128,
        "rope.freq_base": 1e6,
        "rope.dimension_count": 64,
        "expert_count": n,
        "expert_used_count": 8,
        "expert_feed_forward_length": width,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 0,
    }
    shape = {"n_layers": 46, "embedding": e, "feed_forward": 10944, "heads": (96, 8), "head_dim": 128}
    model = llama("glm4moe", **shape, vocabulary=151552, tied=False, more=more)
    t = {name.replace("ffn_norm", "post_attention_norm"): shape for name, shape in model.tensors.items()}
    for i in range(46):
        b = f"blk.{i}."
        t |= {b + "attn_q.bias": (96 * 128,), b + "attn_k.bias": (8 * 128,), b + "attn_v.bias": (8 * 128,)}
        if i == 0:
            continue
        make_experts(t, b, (n, width, e))
        t |= {b + "exp_probs_b.bias": (n,), b + "ffn_down_shexp.weight": (e, width)}
        t |= {b + f"ffn_{name}_shexp.weight": (width, e) for name in ("gate", "up")}
    return Model("glm4moe", model.metadata, t)


def gpt_oss() -> Model:
    """gpt-oss-20b."""
    e, n, heads, d = 2880, 32, (64, 8), 64
    more: dict[str, Value] = {
        "attention.key_length": d,
        "attention.value_length": d,
        "attention.sliding_window": 128,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "expert_count": n,
        "expert_used_count": 4,
        "expert_feed_forward_length": e,
    }
    shape = {"n_layers": 24, "embedding": e, "feed_forward": e, "heads": heads, "head_dim": d}
    model = llama("gpt-oss", **shape, vocabulary=201088, tied=False, more=more)
    t = {name.replace("ffn_norm", "post_attention_norm"): shape for name, shape in model.tensors.items()}
    for i in range(24):
        b = f"blk.{i}."
        make_experts(t, b, (n, e, e))
        t |= {f"{b}{name}.bias": t[f"{b}{name}.weight"][:1] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        t |= {f"{b}ffn_{name}_exps.bias": (n, e) for name in ("gate", "up", "down")}
        t |= {b + "ffn_gate_inp.bias": (n,), b + "attn_sinks.weight": (heads[0],)}
    return Model("gpt-oss", model.metadata, t)


def make_experts(t: dict[str, tuple[int, ...]], prefix: str, shape: tuple[int, int, int]) -> None:
    """Replace the MLP of a layer by experts of that shape: number, width, embedding."""
    n, width, e = shape
    for name in ("gate", "up", "down"):
        del t[f"{prefix}ffn_{name}.weight"]
        t[f"{prefix}ffn_{name}_exps.weight"] = (n, e, width) if name == "down" else shape
    t[prefix + "ffn_gate_inp.weight"] = (n, e)


def qwen3next() -> Model:
    """Qwen3-Next-80B-A3B without its MTP block."""
    e, n, width, n_layers, vocabulary = 2048, 512, 512, 48, 151936
    h, hk, dim, nk, nv, d = 16, 2, 256, 16, 32, 128
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": 262144,
        "embedding_length": e,
        "feed_forward_length": 5120,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": dim // 4,
        "expert_count": n,
        "expert_used_count": 10,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "ssm.conv_kernel": 4,
        "ssm.state_size": d,
        "ssm.group_count": nk,
        "ssm.time_step_rank": nv,
        "ssm.inner_size": nv * d,
        "full_attention_interval": 4,
    }
    t: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, e), "output.weight": (vocabulary, e)}
    t["output_norm.weight"] = (e,)
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "post_attention_norm.weight": (e,)}
        if i % 4 == 3:
            t |= {b + "attn_q.weight": (2 * h * dim, e), b + "attn_output.weight": (e, h * dim)}
            t |= {b + f"attn_{name}.weight": (hk * dim, e) for name in "kv"}
            t |= {b + f"attn_{name}_norm.weight": (dim,) for name in "qk"}
        else:
            channels = (2 * nk + nv) * d
            t |= {b + "attn_qkv.weight": (channels, e), b + "attn_gate.weight": (nv * d, e)}
            t |= {b + "ssm_ba.weight": (2 * nv, e), b + "ssm_conv1d.weight": (channels, 4), b + "ssm_norm.weight": (d,)}
            t |= {b + "ssm_a": (nv,), b + "ssm_dt.bias": (nv,), b + "ssm_out.weight": (e, nv * d)}
        t |= {b + "ffn_gate_inp.weight": (n, e), b + "ffn_gate_inp_shexp.weight": (e,)}
        t |= {b + f"ffn_{name}_exps.weight": (n, width, e) for name in ("gate", "up")}
        t |= {b + f"ffn_{name}_shexp.weight": (width, e) for name in ("gate", "up")}
        t |= {b + "ffn_down_exps.weight": (n, e, width), b + "ffn_down_shexp.weight": (e, width)}
    return Model("qwen3next", metadata, t)


E2B = gemma4(
    n_layers=35,
    embedding=1536,
    widths=[6144] * 15 + [12288] * 20,
    n_heads=8,
    kv=(1, 1),
    every=5,
    window=512,
    n_shared=20,
    layer_input=256,
)
E4B = gemma4(
    n_layers=42,
    embedding=2560,
    widths=[10240] * 42,
    n_heads=8,
    kv=(2, 2),
    every=6,
    window=512,
    n_shared=18,
    layer_input=256,
)
GEMMA4_26B_A4B = gemma4(
    n_layers=30,
    embedding=2816,
    widths=[2112] * 30,
    n_heads=16,
    kv=(8, 2),
    every=6,
    window=1024,
    experts=(128, 8, 704),
    key_values=True,
)
GEMMA4_31B = gemma4(
    n_layers=60,
    embedding=5376,
    widths=[21504] * 60,
    n_heads=32,
    kv=(16, 4),
    every=6,
    window=1024,
    key_values=True,
)
LAGUNA_XS2 = laguna(
    n_layers=40,
    embedding=2048,
    feed_forward=8192,
    heads=(48, 64),
    n_kv_heads=8,
    head_dim=128,
    window=512,
    experts=(256, 8, 512, 512),
)

GRANITE_8B = llama(
    "granite",
    n_layers=40,
    embedding=4096,
    feed_forward=12800,
    heads=(32, 8),
    head_dim=128,
    vocabulary=49159,
    tied=True,
    more={
        "rope.freq_base": 1e7,
        "attention.scale": 0.0078125,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 16.0,
    },
)
"""Granite 3.3 8B."""

MINISTRAL_8B = llama(
    "mistral3",
    n_layers=34,
    embedding=4096,
    feed_forward=14336,
    heads=(32, 8),
    head_dim=128,
    vocabulary=131072,
    tied=False,
    more={
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.temperature_scale": 0.1,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 16384,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 1.0,
    },
)
"""Ministral 3 8B."""

GLM_45_AIR = glm4moe()

QWEN3_NEXT_80B = qwen3next()
GPT_OSS_20B = gpt_oss()
GRANITE_3B_MOE = llama(
    "granitemoe",
    n_layers=32,
    embedding=1536,
    feed_forward=512,
    heads=(24, 8),
    head_dim=64,
    vocabulary=49155,
    tied=True,
    more={
        "attention.scale": 0.015625,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 6.0,
        "expert_count": 40,
        "expert_used_count": 8,
    },
)
"""Granite 3.1 3B A800M."""
for layer in range(32):
    make_experts(GRANITE_3B_MOE.tensors, f"blk.{layer}.", (40, 512, 1536))

# Rows of whole blocks of every quant type, 320 tokens in the vocabulary.
SMALL_GEMMA4_INPUTS = gemma4(
    n_layers=6,
    embedding=256,
    widths=[256, 256, 256, 256, 512, 512],
    n_heads=4,
    kv=(2, 1),
    every=2,
    window=20,
    dims=(64, 128),
    n_shared=2,
    layer_input=256,
    vocabulary=320,
)
SMALL_GEMMA4_EXPERTS = gemma4(
    n_layers=4,
    embedding=256,
    widths=[256] * 4,
    n_heads=4,
    kv=(2, 1),
    every=2,
    window=20,
    dims=(64, 128),
    experts=(5, 2, 256),
    key_values=True,
    vocabulary=320,
)
SMALL_LAGUNA = laguna(
    n_layers=5,
    embedding=256,
    feed_forward=256,
    heads=(4, 8),
    n_kv_heads=2,
    head_dim=64,
    window=20,
    experts=(5, 2, 256, 256),
    vocabulary=320,
)


def kind_of(name: str, shape: tuple[int, ...], kind: str) -> gguf.GGMLQuantizationType:
    """What a tensor gets in a file of ``kind``: vectors and routers stay F32, rows that are no whole blocks get Q8_0
    or F16.
    """
    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2 or not name.endswith(".weight") or "ffn_gate_inp" in name:
        return kinds.F32
    if name == "per_layer_model_proj.weight":
        return kinds.BF16
    for candidate in (kinds[kind], kinds.Q8_0):
        if shape[-1] % gguf.GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return kinds.F16


def write(
    path: Path, model: Model, kind: str = "Q4_K", *, without: str = "", changed: dict[str, Value] | None = None
) -> Path:
    """Write the header of ``model`` and a hole of the size of its data; ``without`` leaves a tensor out."""
    writer = new_file(path, model.architecture, model.metadata | (changed or {}))
    infos = [(name, shape, kind_of(name, shape, kind)) for name, shape in model.tensors.items() if name != without]
    finish_with_hole(path, writer, infos)
    return path
