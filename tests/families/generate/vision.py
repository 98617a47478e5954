"""Random vision models: a language model as others, and the encoder of its images in an mmproj file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from bench.gguf_writing import Value, finish, new_file
from tests.families.generate import gemma4 as gemma4_text
from tests.families.generate.made import PLAIN, Draw, Made, build, ends
from tests.families.generate.qwen import DENSE, hybrid, hybrid_metadata, hybrid_tensors


@dataclass(frozen=True)
class MadeVision:
    """A whole model of transformers, the contents of the language model's file, and those of the encoder's."""

    model: nn.Module
    text: Made
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    image_id: int

    def write_mmproj(self, path: Path) -> Path:
        """All tensors in F32; keys as llama.cpp's converter writes them."""
        writer = new_file(path, "clip", self.metadata)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(tensor.detach().to(torch.float32).numpy()))
        finish(writer)
        return path


BLOCK = {
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
}  # fmt: skip
ENDS = {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"}


def qwen35(draw: Draw) -> MadeVision:
    """The dense hybrid, whose rotary pairs turn by three axes, with an encoder of few layers."""
    common, tied = hybrid(draw)
    heads, patch, merge, side = draw.between(1, 4), 4 * draw.between(1, 4), draw.between(1, 3), draw.between(3, 9)
    config: Any = transformers.Qwen3_5Config(
        text_config=common | {"intermediate_size": draw.between(20, 90)},
        vision_config={
            "depth": draw.between(1, 3),
            "hidden_size": heads * 4 * draw.between(2, 6),
            "intermediate_size": draw.between(20, 90),
            "num_heads": heads,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "out_hidden_size": common["hidden_size"],
            "num_position_embeddings": side * side,
        },
        image_token_id=1,
        video_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
        tie_word_embeddings=tied,
        **PLAIN,
    )
    model = build(transformers.Qwen3_5ForConditionalGeneration, config, draw, centred_norms=True)
    settle_encoder(model, draw)
    state = {name.replace("model.language_model.", "model."): x for name, x in model.state_dict().items()}
    metadata = hybrid_metadata(config.text_config, draw) | {
        "feed_forward_length": config.text_config.intermediate_size,
        "rope.dimension_sections": [*config.text_config.rope_parameters["mrope_section"], 0],
    }
    tensors = hybrid_tensors(state, config.text_config, DENSE) | ends(state, tied=tied, norm_shift=1.0)
    vision = config.vision_config
    return MadeVision(
        model,
        Made(model, "qwen35", metadata, tensors),
        {
            "has_vision_encoder": True,
            "projector_type": "qwen3vl_merger",
            "use_gelu": True,
            "vision.projection_dim": vision.out_hidden_size,
            "vision.image_size": side * patch,
            "vision.patch_size": patch,
            "vision.embedding_length": vision.hidden_size,
            "vision.feed_forward_length": vision.intermediate_size,
            "vision.block_count": vision.depth,
            "vision.attention.head_count": heads,
            "vision.attention.layer_norm_epsilon": 1e-6,
            "vision.spatial_merge_size": merge,
            "vision.image_mean": [0.5, 0.5, 0.5],
            "vision.image_std": [0.5, 0.5, 0.5],
            "vision.is_deepstack_layers": [False] * vision.depth,
        },
        qwen_tensors(state, vision.depth),
        config.image_token_id,
    )


def settle_encoder(model: nn.Module, draw: Draw) -> None:
    """Layer norms multiply by their weight itself, near 1, and not by one plus it; patches come out near 1."""
    with torch.no_grad():
        frames = model.model.visual.patch_embed.proj.weight
        frames.mul_(frames[0].numel() ** -0.5)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.copy_(torch.from_numpy(draw.rng.normal(1.0, 0.15, module.weight.shape)))


def qwen_tensors(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    v = "model.visual."
    names = ENDS | {f"v.blk.{i}.{ours}": f"blocks.{i}.{theirs}" for i in range(depth) for ours, theirs in BLOCK.items()}
    out = {f"{ours}.{x}": state[f"{v}{theirs}.{x}"] for ours, theirs in names.items() for x in ("weight", "bias")}
    frames = state[v + "patch_embed.proj.weight"]
    return out | {
        "v.patch_embd.weight": frames[:, :, 0],
        "v.patch_embd.weight.1": frames[:, :, 1],
        "v.patch_embd.bias": state[v + "patch_embed.proj.bias"],
        "v.position_embd.weight": state[v + "pos_embed.weight"],
    }


GEMMA_BLOCK = {
    "ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
GEMMA_PRODUCTS = {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"} | {"attn_out": "self_attn.o_proj"}
GEMMA_PRODUCTS |= {f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}


def gemma4(draw: Draw) -> MadeVision:
    """All variations of the text model; its encoder with and without bounds and a standard."""
    text = gemma4_text.text_config(draw)
    text.use_bidirectional_attention = None if text.hidden_size_per_layer_input else "vision"
    heads, d, patch, merge = draw.between(1, 4), 4 * draw.between(1, 5), 2 * draw.between(1, 6), draw.between(2, 3)
    text.pad_token_id = 0
    config: Any = transformers.Gemma4Config(
        text_config=text,
        vision_config={
            "num_hidden_layers": draw.between(1, 3),
            "hidden_size": draw.between(17, 60),
            "intermediate_size": draw.between(20, 90),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": d,
            "patch_size": patch,
            "pooling_kernel_size": merge,
            "position_embedding_size": 40,
            "use_clipped_linears": draw.flag(),
            "standardize": draw.flag(),
        },
        audio_config=None,
        image_token_id=1,
        video_token_id=2,
        audio_token_id=3,
        boi_token_id=4,
        eoi_token_id=4,
        **PLAIN,
    )
    model = build(transformers.Gemma4ForConditionalGeneration, config, draw)
    settle_gemma(model, draw)
    state = {name.replace("model.language_model.", "model."): x for name, x in model.state_dict().items()}
    vision = config.vision_config
    return MadeVision(
        model,
        gemma4_text.of_config(config.text_config, model, state, draw),
        {
            "has_vision_encoder": True,
            "vision.projector_type": "gemma4v",
            "vision.projection_dim": config.text_config.hidden_size,
            "vision.image_size": 224,
            "vision.patch_size": patch,
            "vision.embedding_length": vision.hidden_size,
            "vision.feed_forward_length": vision.intermediate_size,
            "vision.block_count": vision.num_hidden_layers,
            "vision.attention.head_count": heads,
            "vision.attention.layer_norm_epsilon": vision.rms_norm_eps,
            "vision.projector.scale_factor": merge,
        },
        gemma_tensors(state, vision),
        config.image_token_id,
    )


def settle_gemma(model: nn.Module, draw: Draw) -> None:
    """Patches come out near 1, and bounds cut some numbers off."""
    with torch.no_grad():
        patch = model.model.vision_tower.patch_embedder.input_proj.weight
        patch.mul_(patch.shape[1] ** -0.5)
        for name, buffer in model.model.vision_tower.named_buffers():
            if name.endswith(("_min", "_max")):
                buffer.copy_(torch.tensor(draw.rng.uniform(1.0, 2.0) * (1 if name.endswith("max") else -1)))
            elif name.endswith("std_scale"):
                buffer.copy_(torch.from_numpy(draw.rng.uniform(0.5, 1.5, buffer.shape)))


def gemma_tensors(state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    v = "model.vision_tower."
    patch = state[v + "patch_embedder.input_proj.weight"].unflatten(1, (config.patch_size, config.patch_size, 3))
    out = {
        "v.patch_embd.weight": patch.permute(0, 3, 1, 2),
        "v.position_embd.weight": state[v + "patch_embedder.position_embedding_table"],
        "mm.input_projection.weight": state["model.embed_vision.embedding_projection.weight"],
    }
    for name in ("std_bias", "std_scale"):
        if v + name in state:
            out[f"v.{name}"] = state[v + name]
    for i in range(config.num_hidden_layers):
        layer = f"{v}encoder.layers.{i}."
        out |= {f"v.blk.{i}.{ours}.weight": state[f"{layer}{theirs}.weight"] for ours, theirs in GEMMA_BLOCK.items()}
        for ours, theirs in GEMMA_PRODUCTS.items():
            out[f"v.blk.{i}.{ours}.weight"] = state[f"{layer}{theirs}.linear.weight"]
            for end in ("input_min", "input_max", "output_min", "output_max"):
                if f"{layer}{theirs}.{end}" in state:
                    out[f"v.blk.{i}.{ours}.{end}"] = state[f"{layer}{theirs}.{end}"].view(1)
    return out
