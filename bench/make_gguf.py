"""GGUF files of full-size shapes with random weights, for measuring speed and memory where no real file can be had.

    python bench/make_gguf.py --shape qwen3.6-27b --out 27b.gguf [--counting] [--stats]

Shapes are those of published models, types the Q4_K_M mix as llama.cpp deals it out.  Blocks are random bits
with small scales, so that activations stay finite; the texts that come out mean nothing.  A name with "tiny-" in front
is the same family with few layers and a small vocabulary; "-mtp" has the model's MTP head, "-dflash2" is its drafter.
With --counting the model's next token is the last one plus 1, so drafts can be made that are right: the embedding
outweighs what the layers add to it, and row i + 1 of the output matrix is row i of the embedding.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

KINDS = gguf.GGMLQuantizationType
POOL_BYTES = 48 << 20
PIECE_BYTES = 16 << 20
ALIGNMENT = 32
VOCABULARY_TENSORS = ("token_embd.weight", "selector_predecessor.weight")  # a drafter has no embedding of its own
ENDS = ("token_embd.weight", "output.weight")
COUNTING_SCALE = 3000
"""Factor of the embedding of a counting model: what 64 layers add to the residual stream is a few per cent of it."""


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
    name, *, n_layers, embedding, width, heads, delta_heads, vocabulary, experts=None, dim=256, delta_dim=128, mtp=False
):
    """Qwen3.5 and 3.6.  ``heads``: query and kv; ``delta_heads``: key and value; ``experts``: count, used (of
    ``width``, with a shared one as wide); ``mtp``: with an MTP head behind the last layer.
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


def qwen3(name, *, n_layers, embedding, width, heads, vocabulary, dim=128):
    """Qwen3, dense, the embedding as output matrix.  ``heads``: query and kv."""
    e, (h, hk) = embedding, heads
    metadata = {
        "block_count": n_layers,
        "context_length": 40960,
        "embedding_length": e,
        "feed_forward_length": width,
        "attention.head_count": h,
        "attention.head_count_kv": hk,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    t = {"token_embd.weight": (vocabulary, e), "output_norm.weight": (e,)}
    for i in range(n_layers):
        b = f"blk.{i}."
        t |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,)} | dense(b, e, width)
        t |= {b + "attn_q.weight": (h * dim, e), b + "attn_k.weight": (hk * dim, e), b + "attn_v.weight": (hk * dim, e)}
        t |= {b + "attn_output.weight": (e, h * dim)}
        t |= {b + "attn_q_norm.weight": (dim,), b + "attn_k_norm.weight": (dim,)}
    return Model("qwen3", name, metadata, t)


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
    "qwen3-0.6b": lambda: qwen3(
        "Qwen3 0.6B shape", n_layers=28, embedding=1024, width=3072, heads=(16, 8), vocabulary=151936,
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
    "tiny-qwen3-0.6b": lambda: qwen3(
        "tiny scoring model", n_layers=2, embedding=256, width=512, heads=(4, 2), vocabulary=2048, dim=64,
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


def kind_of(model, name, shape):
    """Type of a tensor in the Q4_K_M mix.  Rows that are no whole blocks of 256 take Q5_0 for Q4_K, Q8_0 for Q6_K."""
    if len(shape) < 2 or "conv1d" in name or "ffn_gate_inp" in name or name.endswith("_conv_base"):
        return KINDS.F32
    embedding = name == "token_embd.weight" and (model.counting or "output.weight" not in model.tensors)
    wide = name == "output.weight" or embedding
    if name.startswith("blk."):
        i, n = int(name.split(".")[1]), model.n_layers
        more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        wide = more and any(part in name for part in ("attn_v.", "attn_qkv.", "ffn_down"))
    if shape[-1] % 256:
        return KINDS.Q8_0 if wide else KINDS.Q5_0
    return KINDS.Q6_K if wide else KINDS.Q4_K


def layout(model):
    """(name, shape, kind, offset behind the header, bytes) of every tensor, and the bytes of all."""
    rows, at = [], 0
    for name, shape in model.tensors.items():
        kind = kind_of(model, name, shape)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        rows.append((name, shape, kind, at, n_bytes))
        at += -(-n_bytes // ALIGNMENT) * ALIGNMENT
    return rows, at


def stats(model):
    """Parameters, bytes, and bytes by type."""
    rows, total = layout(model)
    by = {}
    for _, _, kind, _, n_bytes in rows:
        by[kind.name] = by.get(kind.name, 0) + n_bytes
    n = sum(int(np.prod(shape, dtype=np.int64)) for _, shape, *_ in rows)
    return {"parameters": n, "weight_bytes": sum(by.values()), "data_bytes": total, "bytes_by_type": by}


def write(path, model, seed=1):
    """Write the file; returns its bytes."""
    rows, total = layout(model)
    header = write_header(path, model, rows)
    rng = np.random.default_rng(seed)
    pools = {kind: pool(kind, rng, total) for kind in {row[2] for row in rows} - {KINDS.F32}}
    fd = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, header + total)
        jobs = []
        for name, shape, kind, at, n_bytes in rows:
            if kind == KINDS.F32:
                put(fd, vector(name, shape, rng).tobytes(), header + at)
                continue
            if model.counting and name == "output.weight":
                continue
            block_bytes, data, done = gguf.GGML_QUANT_SIZES[kind][1], pools[kind], 0
            if model.counting and name == "token_embd.weight":
                data = pool(kind, rng, total, COUNTING_SCALE)
            most = min(PIECE_BYTES, len(data)) // block_bytes * block_bytes
            while done < n_bytes:
                n = min(most, n_bytes - done)
                start = int(rng.integers(0, (len(data) - n) // block_bytes + 1)) * block_bytes
                jobs.append((data[start : start + n], header + at + done))
                done += n
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda job: put(fd, *job), jobs))
        if model.counting:
            follow(fd, *({name: (header + at, n, shape) for name, shape, _, at, n in rows}[x] for x in ENDS))
        os.fsync(fd)
    finally:
        os.close(fd)
    return header + total


def follow(fd, embedding, output):
    """Make row i + 1 of the output matrix row i of the embedding; each is (offset, bytes, shape), of one type."""
    (source, n_bytes, shape), (target, *same) = embedding, output
    assert same == [n_bytes, shape]
    row = n_bytes // shape[0]
    put(fd, os.pread(fd, row, source + n_bytes - row), target)
    for at in range(0, n_bytes - row, PIECE_BYTES):
        put(fd, os.pread(fd, min(PIECE_BYTES, n_bytes - row - at), source + at), target + row + at)


def write_header(path, model, rows):
    """Write all but the data, aligned; returns where the data begin."""
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_name(model.name)
    writer.add_quantization_version(2)
    for key, value in model.metadata.items():
        add(writer, f"{model.architecture}.{key}", value)
    tokens = [*byte_characters(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    n_special, n_bytes = 3, len(tokens) - 3
    tokens += [f"[{i}]" for i in range(len(tokens), model.vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * n_bytes + [3] * n_special + [1] * (len(tokens) - n_bytes - n_special))
    writer.add_token_merges(["Ġ t", "Ġ a"])
    writer.add_eos_token_id(n_bytes + 2)
    if model.architecture == "dflash":
        writer.add_mask_token_id(model.vocabulary - 1)
    for name, shape, kind, _, n_bytes in rows:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    size = -(-Path(path).stat().st_size // ALIGNMENT) * ALIGNMENT
    os.truncate(path, size)
    return size


def add(writer, key, value):
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def byte_characters():
    """The 256 characters by which byte-level tokenizers write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def pool(kind, rng, total, factor=1):
    """Random blocks of a type, with scales that keep the weights at a standard deviation of about 0.015 x factor."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    n = max(64, min(POOL_BYTES, total) // block_bytes)
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    scales = {  # byte offset -> half-precision number
        KINDS.Q4_K: {0: 1.0e-4, 2: 7.5e-4},
        KINDS.Q6_K: {208: 1.1e-5},
        KINDS.Q8_0: {0: 2.0e-4},
        KINDS.Q5_0: {0: 1.6e-3},
    }
    for offset, value in scales[kind].items():
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(factor * value).tobytes(), np.uint8)
    return memoryview(blocks.reshape(-1))


def vector(name, shape, rng):
    """A float32 tensor with values as such tensors have."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if name == "rope_freqs.weight":
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30).astype(np.float32)
    if "norm" in name or "scale" in name:
        return 1 + 0.05 * x
    if name.endswith("_conv_base"):  # tap 0, the current token, is near 1
        return 0.05 * x + (np.arange(shape[1]) == 0).astype(np.float32)[:, None]
    if name.endswith("ssm_a"):
        return -np.exp(x) - np.float32(0.05)
    return (0.3 if "conv1d" in name else 0.03) * x


def put(fd, data, at):
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--counting", action="store_true", help="the next token is the last one plus 1")
    parser.add_argument("--stats", action="store_true", help="print what it holds")
    options = parser.parse_args()
    model = replace(SHAPES[options.shape](), counting=options.counting)
    if options.stats:
        print(stats(model))
    if options.out:
        started = time.perf_counter()
        n = write(options.out, model)
        print(f"{options.out}: {n / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
