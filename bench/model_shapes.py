"""Shapes of published models, and tiny ones of the same families: what make_gguf.py can make files of.

A family's function returns metadata and tensors as llama.cpp's converter names and shapes them.  ``SHAPES`` has a
function for each name, so that only what is used is built.
"""

from dataclasses import dataclass

VOCABULARY_TENSORS = ("token_embd.weight", "selector_predecessor.weight")
"""Tensors with a row for each token; a drafter has no embedding of its own."""


@dataclass(frozen=True)
class Model:
    """``metadata`` without the architecture's prefix; ``tensors``: name -> row-major shape, in the file's order."""

    architecture: str
    name: str
    metadata: dict
    tensors: dict
    counting: bool = False

    @property
    def n_layers(self):
        return self.metadata["block_count"]

    @property
    def vocabulary(self):
        return next(shape[0] for name, shape in self.tensors.items() if name in VOCABULARY_TENSORS)


def qwen(
    name, *, n_layers, embedding, width, heads, delta_heads, vocabulary, experts=None, dim=256, delta_dim=128,
    mtp=False, tied=False,
):  # fmt: skip
    """Qwen3.5 and 3.6.  ``heads``: query and kv; ``delta_heads``: key and value; ``experts``: count, used (of
    ``width``, with a shared one as wide); ``mtp``: with an MTP head behind the last layer; ``tied``: the embedding is
    the output matrix, too.
    """
    e, f, (h, hk), (nk, nv), conv = embedding, width, heads, delta_heads, 4
    inner, channels = nv * delta_dim, (2 * nk + nv) * delta_dim
    pairs = dim // 8  # that turn; llama.cpp refuses a file that does not deal them out to the axes of pictures
    third = -(-pairs // 3)
    metadata = {
        "block_count": n_layers + mtp,
        "context_length": 262144,
        "embedding_length": e,
        "feed_forward_length": f,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": dim // 4,
        "rope.dimension_sections": [third, third, pairs - 2 * third, 0],
        "ssm.conv_kernel": conv,
        "ssm.state_size": delta_dim,
        "ssm.group_count": nk,
        "ssm.time_step_rank": nv,
        "ssm.inner_size": inner,
        "full_attention_interval": 4,
    }
    if mtp:
        metadata["nextn_predict_layers"] = 1
    if experts:
        metadata |= {"expert_count": experts[0], "expert_used_count": experts[1]}
        metadata |= {"expert_feed_forward_length": f, "expert_shared_feed_forward_length": f}
    t = {"token_embd.weight": (vocabulary, e), "output.weight": (vocabulary, e), "output_norm.weight": (e,)}
    if tied:
        del t["output.weight"]
    for i in range(n_layers + mtp):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "post_attention_norm.weight": (e,)}
        if i == n_layers:
            t |= {b + "nextn.eh_proj.weight": (e, 2 * e), b + "nextn.shared_head_norm.weight": (e,)}
            t |= {b + "nextn.enorm.weight": (e,), b + "nextn.hnorm.weight": (e,)}
        if (i + 1) % 4 == 0 or i == n_layers:
            t |= {b + "attn_q.weight": (2 * h * dim, e), b + "attn_k.weight": (hk * dim, e)}
            t |= {b + "attn_v.weight": (hk * dim, e), b + "attn_output.weight": (e, h * dim)}
            t |= {b + "attn_q_norm.weight": (dim,), b + "attn_k_norm.weight": (dim,)}
        else:
            t |= {b + "attn_qkv.weight": (channels, e), b + "attn_gate.weight": (inner, e)}
            t |= {b + "ssm_conv1d.weight": (channels, conv), b + "ssm_dt.bias": (nv,), b + "ssm_a": (nv,)}
            t |= {b + "ssm_beta.weight": (nv, e), b + "ssm_alpha.weight": (nv, e)}
            t |= {b + "ssm_norm.weight": (delta_dim,), b + "ssm_out.weight": (e, inner)}
        if experts:
            t |= routed(b, e, f, experts[0], merged=False) | dense(b, e, f, "_shexp")
            t[b + "ffn_gate_inp_shexp.weight"] = (e,)
        else:
            t |= dense(b, e, f)
    return Model("qwen35moe" if experts else "qwen35", name, metadata, t)


def decoder(
    architecture, name, *, n_layers, embedding, width, heads, vocabulary, dim=128, context=40960, freq_base=1e6,
    qk_norm=False, tied=False, experts=None,
):  # fmt: skip
    """Llama and its relatives: full attention, gated MLP.  ``heads``: query and kv; ``tied``: the embedding is the
    output matrix, too; ``experts``: count, used, width, in place of the MLP.
    """
    e, (h, hk) = embedding, heads
    metadata = {
        "block_count": n_layers,
        "context_length": context,
        "embedding_length": e,
        "feed_forward_length": width,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": freq_base,
        "rope.dimension_count": dim,
    }
    if experts:
        metadata |= {"expert_count": experts[0], "expert_used_count": experts[1]}
        metadata["expert_feed_forward_length"] = experts[2]
    t = {"token_embd.weight": (vocabulary, e), "output_norm.weight": (e,)}
    if not tied:
        t["output.weight"] = (vocabulary, e)
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,)} | grouped_heads(b, e, h, hk, dim)
        if qk_norm:
            t |= {b + "attn_q_norm.weight": (dim,), b + "attn_k_norm.weight": (dim,)}
        t |= routed(b, e, experts[2], experts[0], merged=False) if experts else dense(b, e, width)
    return Model(architecture, name, metadata, t)


def gemma3(name, *, n_layers, embedding, width, heads, vocabulary, window, dim=128, every=6):
    """Gemma 3.  ``heads``: query and kv; every ``every``-th layer sees the whole context."""
    e, (h, hk) = embedding, heads
    metadata = {
        "block_count": n_layers,
        "context_length": 131072,
        "embedding_length": e,
        "feed_forward_length": width,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": every,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    t = {"token_embd.weight": (vocabulary, e), "output_norm.weight": (e,)}
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {f"{b}{n}.weight": (e,) for n in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}
        t |= grouped_heads(b, e, h, hk, dim) | dense(b, e, width)
        t |= {b + "attn_q_norm.weight": (dim,), b + "attn_k_norm.weight": (dim,)}
    return Model("gemma3", name, metadata, t)


def gpt_oss(name, *, n_layers, embedding, heads, vocabulary, experts, window, dim=64):
    """gpt-oss.  ``heads``: query and kv; ``experts``: count, used, width; every second layer sees the whole context."""
    e, (h, hk), (n, used, f) = embedding, heads, experts
    metadata = {
        "block_count": n_layers,
        "context_length": 131072,
        "embedding_length": e,
        "feed_forward_length": f,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.sliding_window": window,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "expert_count": n,
        "expert_used_count": used,
        "expert_feed_forward_length": f,
    }
    t = {"token_embd.weight": (vocabulary, e), "output.weight": (vocabulary, e), "output_norm.weight": (e,)}
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "post_attention_norm.weight": (e,), b + "attn_sinks.weight": (h,)}
        matrices = grouped_heads(b, e, h, hk, dim) | routed(b, e, f, n, merged=False)
        t |= matrices | {name.replace(".weight", ".bias"): shape[:-1] for name, shape in matrices.items()}
    return Model("gpt-oss", name, metadata, t)


def gemma4(name, *, n_layers, embedding, width, n_heads, kv, experts, vocabulary, window, dims=(256, 512), every=6):
    """Gemma 4 with experts.  ``kv``, ``dims``: of sliding and of full layers; ``experts``: count, used, width."""
    e, h, sliding = embedding, n_heads, [(i + 1) % every != 0 for i in range(n_layers)]
    metadata = {
        "block_count": n_layers,
        "context_length": 262144,
        "embedding_length": e,
        "feed_forward_length": width,
        "attention.head_count": h,
        "attention.head_count_kv": [kv[0] if s else kv[1] for s in sliding],
        "attention.key_length": dims[1],
        "attention.value_length": dims[1],
        "attention.key_length_swa": dims[0],
        "attention.value_length_swa": dims[0],
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": 0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": dims[1],
        "rope.dimension_count_swa": dims[0],
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "expert_count": experts[0],
        "expert_used_count": experts[1],
        "expert_feed_forward_length": experts[2],
    }
    t = {"rope_freqs.weight": (dims[1] // 2,), "token_embd.weight": (vocabulary, e), "output_norm.weight": (e,)}
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    norms += ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    for i, slides in enumerate(sliding):
        b, d, hk = f"blk.{i}.", dims[not slides], kv[not slides]
        t |= {f"{b}{norm}.weight": (e,) for norm in norms}
        t |= {b + "attn_q.weight": (h * d, e), b + "attn_k.weight": (hk * d, e), b + "attn_output.weight": (e, h * d)}
        if slides:  # full layers take their keys for values
            t[b + "attn_v.weight"] = (hk * d, e)
        t |= {b + "attn_q_norm.weight": (d,), b + "attn_k_norm.weight": (d,), b + "layer_output_scale.weight": (1,)}
        t |= dense(b, e, width) | routed(b, e, experts[2], experts[0], merged=True)
        t |= {b + "ffn_gate_inp.scale": (e,), b + "ffn_down_exps.scale": (experts[0],)}
    return Model("gemma4", name, metadata, t)


def laguna(name, *, n_layers, embedding, width, heads, n_kv_heads, dim, experts, vocabulary, window):
    """Laguna XS.  ``heads``: of full layers, every fourth from the first on, and of sliding ones; ``experts``: count,
    used, width, shared width; the first layer is dense.
    """
    e, d, hk = embedding, dim, n_kv_heads
    counts = [heads[i % 4 != 0] for i in range(n_layers)]
    metadata = {
        "block_count": n_layers,
        "context_length": 131072,
        "embedding_length": e,
        "feed_forward_length": width,
        "attention.head_count": counts,
        "attention.head_count_kv": hk,
        "attention.key_length": d,
        "attention.value_length": d,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": d // 2,
        "rope.dimension_count_swa": d,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_beta_fast": 64.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": experts[0],
        "expert_used_count": experts[1],
        "expert_feed_forward_length": experts[2],
        "expert_shared_feed_forward_length": experts[3],
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    }
    t = {"token_embd.weight": (vocabulary, e), "output.weight": (vocabulary, e), "output_norm.weight": (e,)}
    for i, h in enumerate(counts):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,), b + "attn_gate.weight": (h, e)}
        t |= {b + "attn_q.weight": (h * d, e), b + "attn_k.weight": (hk * d, e), b + "attn_v.weight": (hk * d, e)}
        t |= {b + "attn_output.weight": (e, h * d), b + "attn_q_norm.weight": (d,), b + "attn_k_norm.weight": (d,)}
        if i == 0:
            t |= dense(b, e, width)
        else:
            t |= routed(b, e, experts[2], experts[0], merged=False) | dense(b, e, experts[3], "_shexp")
            t[b + "exp_probs_b.bias"] = (experts[0],)
    return Model("laguna", name, metadata, t)


def dflash2(name, *, n_layers, embedding, width, heads, dim, captures, vocabulary, window, group=16, rank=256, block=8):
    """A DFlash 2 drafter.  ``heads``: query and kv; ``captures``: layers of the target, counted by their inputs."""
    e, (h, hk), taps = embedding, heads, 2
    metadata = {
        "block_count": n_layers,
        "context_length": 262144,
        "embedding_length": e,
        "feed_forward_length": width,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.causal": False,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": [True] * n_layers,
        "rope.freq_base": 1e7,
        "block_size": block,
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": 16,
        "target_layers": list(captures),
    }
    t = {"fc.weight": (e, len(captures) * e), "enc.output_norm.weight": (e,), "output_norm.weight": (e,)}
    t |= {"selector_predecessor.weight": (vocabulary, rank), "selector_successor.weight": (vocabulary, rank)}
    t["selector_hidden.weight"] = (rank, e)
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,)} | dense(b, e, width)
        t |= {b + "attn_q.weight": (h * dim, e), b + "attn_k.weight": (hk * dim, e), b + "attn_v.weight": (hk * dim, e)}
        t |= {b + "attn_output.weight": (e, h * dim)}
        t |= {b + "attn_q_norm.weight": (dim,), b + "attn_k_norm.weight": (dim,)}
        for part in ("attn", "ffn"):
            t |= {f"{b}{part}_conv_base": (2, taps, e), f"{b}{part}_conv_proj.weight": (2 * taps * e // group, e)}
    return Model("dflash", name, metadata, t)


def dense(b, e, f, suffix=""):
    names = {"gate": (f, e), "up": (f, e), "down": (e, f)}
    return {f"{b}ffn_{name}{suffix}.weight": shape for name, shape in names.items()}


def grouped_heads(b, e, h, hk, dim):
    out = {b + "attn_q.weight": (h * dim, e), b + "attn_k.weight": (hk * dim, e), b + "attn_v.weight": (hk * dim, e)}
    return out | {b + "attn_output.weight": (e, h * dim)}


def routed(b, e, f, n, *, merged):
    out = {b + "ffn_gate_inp.weight": (n, e), b + "ffn_down_exps.weight": (n, e, f)}
    if merged:
        return out | {b + "ffn_gate_up_exps.weight": (n, 2 * f, e)}
    return out | {b + "ffn_gate_exps.weight": (n, f, e), b + "ffn_up_exps.weight": (n, f, e)}


SHAPES = {
    "qwen3.6-27b": lambda: qwen(
        "Qwen3.6 27B shape", n_layers=64, embedding=5120, width=17408, heads=(24, 4), delta_heads=(16, 48),
        vocabulary=248320,
    ),
    "qwen3.6-27b-mtp": lambda: qwen(
        "Qwen3.6 27B shape with an MTP head", n_layers=64, embedding=5120, width=17408, heads=(24, 4),
        delta_heads=(16, 48), vocabulary=248320, mtp=True,
    ),
    "qwen3.6-27b-dflash2": lambda: dflash2(
        "DFlash 2 shape for 27B", n_layers=5, embedding=5120, width=17408, heads=(32, 8), dim=128,
        captures=(6, 20, 34, 48, 62), vocabulary=248320, window=2048,
    ),
    "qwen3.6-35b-a3b": lambda: qwen(
        "Qwen3.6 35B A3B shape", n_layers=40, embedding=2048, width=512, heads=(16, 2), delta_heads=(16, 32),
        vocabulary=248320, experts=(256, 8),
    ),
    "qwen3.5-0.8b": lambda: qwen(
        "Qwen3.5 0.8B shape", n_layers=24, embedding=1024, width=3584, heads=(8, 2), delta_heads=(16, 16),
        vocabulary=248320, tied=True,
    ),
    "qwen3-0.6b": lambda: decoder(
        "qwen3", "Qwen3 0.6B shape", n_layers=28, embedding=1024, width=3072, heads=(16, 8), vocabulary=151936,
        qk_norm=True, tied=True,
    ),
    "llama-3.1-8b": lambda: decoder(
        "llama", "Llama 3.1 8B shape", n_layers=32, embedding=4096, width=14336, heads=(32, 8), vocabulary=128256,
        context=131072, freq_base=5e5,
    ),
    "qwen3-30b-a3b": lambda: decoder(
        "qwen3moe", "Qwen3 30B A3B shape", n_layers=48, embedding=2048, width=6144, heads=(32, 4), vocabulary=151936,
        qk_norm=True, experts=(128, 8, 768),
    ),
    "gemma-3-27b": lambda: gemma3(
        "Gemma 3 27B shape", n_layers=62, embedding=5376, width=21504, heads=(32, 16), vocabulary=262144, window=1024,
    ),
    "gpt-oss-20b": lambda: gpt_oss(
        "gpt-oss 20B shape", n_layers=24, embedding=2880, heads=(64, 8), vocabulary=201088, experts=(32, 4, 2880),
        window=128,
    ),
    "gemma4-26b-a4b": lambda: gemma4(
        "Gemma 4 26B A4B shape", n_layers=30, embedding=2816, width=2112, n_heads=16, kv=(8, 2),
        experts=(128, 8, 704), vocabulary=262144, window=1024,
    ),
    "laguna-xs.2": lambda: laguna(
        "Laguna XS.2 shape", n_layers=40, embedding=2048, width=8192, heads=(48, 64), n_kv_heads=8, dim=128,
        experts=(256, 8, 512, 512), vocabulary=100352, window=512,
    ),
    "tiny-qwen3.6-27b": lambda: qwen(
        "tiny dense", n_layers=4, embedding=256, width=512, heads=(4, 2), delta_heads=(2, 4), vocabulary=1024, dim=64,
        delta_dim=64,
    ),
    "tiny-qwen3.6-27b-mtp": lambda: qwen(
        "tiny dense with an MTP head", n_layers=4, embedding=256, width=512, heads=(4, 2), delta_heads=(2, 4),
        vocabulary=1024, dim=64, delta_dim=64, mtp=True,
    ),
    "tiny-qwen3.6-27b-dflash2": lambda: dflash2(
        "tiny DFlash 2", n_layers=2, embedding=256, width=512, heads=(4, 2), dim=64, captures=(1, 2, 3),
        vocabulary=1024, window=128, rank=256,
    ),
    "tiny-qwen3.6-35b-a3b": lambda: qwen(
        "tiny experts", n_layers=4, embedding=256, width=256, heads=(4, 2), delta_heads=(2, 4), vocabulary=1024,
        experts=(8, 2), dim=64, delta_dim=64,
    ),
    "tiny-qwen3-0.6b": lambda: decoder(
        "qwen3", "tiny scoring model", n_layers=2, embedding=256, width=512, heads=(4, 2), vocabulary=2048, dim=64,
        qk_norm=True, tied=True,
    ),
    "tiny-llama-3.1-8b": lambda: decoder(
        "llama", "tiny Llama", n_layers=2, embedding=256, width=512, heads=(4, 2), vocabulary=1024, dim=64,
    ),
    "tiny-qwen3-30b-a3b": lambda: decoder(
        "qwen3moe", "tiny Qwen3 with experts", n_layers=2, embedding=256, width=512, heads=(4, 2), vocabulary=1024,
        dim=64, qk_norm=True, experts=(8, 2, 256),
    ),
    "tiny-gemma-3-27b": lambda: gemma3(
        "tiny Gemma 3", n_layers=4, embedding=256, width=512, heads=(4, 2), vocabulary=1024, window=128, dim=64,
        every=2,
    ),
    "tiny-gpt-oss-20b": lambda: gpt_oss(
        "tiny gpt-oss", n_layers=4, embedding=288, heads=(4, 2), vocabulary=1024, experts=(8, 2, 288), window=128,
    ),
    "tiny-gemma4-26b-a4b": lambda: gemma4(
        "tiny Gemma 4", n_layers=4, embedding=256, width=288, n_heads=4, kv=(2, 1), experts=(8, 2, 96),
        vocabulary=1024, window=128, dims=(64, 128), every=2,
    ),
    "tiny-laguna-xs.2": lambda: laguna(
        "tiny Laguna", n_layers=4, embedding=256, width=512, heads=(4, 8), n_kv_heads=2, dim=64,
        experts=(8, 2, 256, 256), vocabulary=1024, window=128,
    ),
}  # fmt: skip
