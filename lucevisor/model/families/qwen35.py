"""Family ``qwen35``: Qwen3.5 / Qwen3.6 dense.  Three gated delta net layers, then one gated full-attention layer.

Metadata and tensors: docs/families.md.  An MTP block at the end of the file is a drafter, not a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.rope import Rotary, read_linear, read_yarn
from lucevisor.model.spec import (
    MAX_LAYERS,
    Keys,
    LayerSpec,
    ModelSpec,
    Shapes,
    StateTensor,
    assemble,
    attention_state,
    attention_tensors,
    swiglu_tensors,
    update_width,
)
from lucevisor.model.values import Dtype, KvGroup


@dataclass(frozen=True, slots=True)
class Qwen35Params:
    """Hyperparameters.  E embedding, F feed-forward, H/K query and kv heads of D; ``rotary``: dims of each head."""

    n_layers: int
    hidden_size: int
    feed_forward: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary: Rotary
    eps: float
    scale: float
    recurrent: tuple[bool, ...]
    conv_kernel: int
    delta_key_heads: int
    delta_value_heads: int
    delta_dim: int  # of keys and values

    @property
    def conv_channels(self) -> int:
        return (2 * self.delta_key_heads + self.delta_value_heads) * self.delta_dim

    @property
    def inner_size(self) -> int:
        return self.delta_value_heads * self.delta_dim


def hyperparameters(keys: Keys, options: Mapping[str, str]) -> Qwen35Params:
    n_layers = keys.integer("block_count", high=MAX_LAYERS) - keys.integer("nextn_predict_layers", 0, low=0)
    if n_layers < 1:
        raise keys.error("block_count", "leaves no layers besides the MTP blocks")
    head_dim = keys.head_dim()
    interval = keys.integer("full_attention_interval", 4)
    flags = keys.flags("attention.recurrent_layers", n_layers)
    sections = keys.raw("rope.dimension_sections")
    by_axis = [v for v in sections if isinstance(v, int)] if isinstance(sections, list) else []
    by_sections = 2 * sum(by_axis) if isinstance(sections, list) else None
    n_rotary = keys.even("rope.dimension_count", by_sections, high=head_dim)
    dim = keys.integer("ssm.state_size")
    n_value = keys.integer("ssm.time_step_rank")
    n_key = keys.integer("ssm.group_count")
    if keys.integer("ssm.inner_size") != n_value * dim:
        raise keys.error("ssm.inner_size", f"is not time_step_rank x state_size = {n_value * dim}")
    if n_value % n_key:
        raise keys.error("ssm.time_step_rank", f"{n_value} is not a multiple of group_count {n_key}")
    heads, kv_heads = keys.integer("attention.head_count"), _kv_heads(keys, n_layers)
    keys.check_heads(heads, kv_heads)
    return Qwen35Params(
        n_layers=n_layers,
        hidden_size=keys.integer("embedding_length"),
        feed_forward=keys.integer("feed_forward_length", 0, low=0),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=Rotary(
            n_rotary,
            keys.number("rope.freq_base", 10000.0, above=0.0),
            read_yarn(keys, options),
            read_linear(keys),
            tuple(by_axis[:3]) if len(by_axis) >= 3 else (),
        ),
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        scale=keys.number("attention.scale", head_dim**-0.5),
        recurrent=tuple(flags if flags is not None else [(i + 1) % interval != 0 for i in range(n_layers)]),
        conv_kernel=keys.integer("ssm.conv_kernel", low=2, high=64),
        delta_key_heads=n_key,
        delta_value_heads=n_value,
        delta_dim=dim,
    )


def _kv_heads(keys: Keys, n_layers: int) -> int:
    """A single number, or an array with 0 for layers without attention."""
    values = {v for v in keys.integers("attention.head_count_kv", n_layers) if v}
    if len(values) != 1:
        raise keys.error("attention.head_count_kv", f"has several values: {sorted(values)}")
    return values.pop()


def delta_inputs(p: Qwen35Params, b: str) -> Shapes:
    """Input matrices of the gated delta net of a layer."""
    return {
        b + "attn_qkv.weight": (p.conv_channels, p.hidden_size),
        b + "attn_gate.weight": (p.inner_size, p.hidden_size),
        b + "ssm_beta.weight": (p.delta_value_heads, p.hidden_size),
        b + "ssm_alpha.weight": (p.delta_value_heads, p.hidden_size),
    }


def mixer_tensors(p: Qwen35Params, i: int, inputs: Callable[[Qwen35Params, str], Shapes] = delta_inputs) -> Shapes:
    """Norms and token mixer of layer ``i``; ``inputs``: the matrices before a gated delta net."""
    b, e, d = f"blk.{i}.", p.hidden_size, p.head_dim
    out: Shapes = {b + "attn_norm.weight": (e,), b + "post_attention_norm.weight": (e,)}
    if p.recurrent[i]:
        out |= inputs(p, b)
        out |= {
            b + "ssm_a": (p.delta_value_heads,),
            b + "ssm_dt.bias": (p.delta_value_heads,),
            b + "ssm_conv1d.weight": (p.conv_channels, p.conv_kernel),
            b + "ssm_norm.weight": (p.delta_dim,),
            b + "ssm_out.weight": (e, p.inner_size),
        }
    else:
        out |= attention_tensors(b, e, p.n_heads, p.n_kv_heads, d, n_gates=p.n_heads * d)
    return out


def layer_state(p: Qwen35Params, i: int) -> tuple[StateTensor, ...]:
    """Gated delta net: last inputs of the convolution and the matrix S, float32.  Attention: keys and values."""
    if not p.recurrent[i]:
        return attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    matrices = (p.delta_value_heads, p.delta_dim, p.delta_dim)
    width = update_width(p.delta_key_heads, p.delta_value_heads, p.delta_dim)
    return (
        StateTensor("conv", (p.conv_kernel - 1, p.conv_channels), Dtype.FLOAT32),
        StateTensor("delta", matrices, Dtype.FLOAT32, width),
    )


def dense_tensors(p: Qwen35Params, i: int) -> Shapes:
    return swiglu_tensors(f"blk.{i}.", p.hidden_size, p.feed_forward)


def build(
    files: GgufFiles,
    keys: Keys,
    p: Qwen35Params,
    feed_forward: Callable[[int], Shapes],
    n_routed: int = 0,
    inputs: Callable[[Qwen35Params, str], Shapes] = delta_inputs,
) -> ModelSpec:
    """``feed_forward(i)``: the feed-forward tensors of layer i; ``inputs``: as in :func:`mixer_tensors`."""
    layers = [
        LayerSpec(
            index=i,
            kv_group=KvGroup.RECURRENT if p.recurrent[i] else KvGroup.FULL,
            tensors=mixer_tensors(p, i, inputs) | feed_forward(i),
            state=layer_state(p, i),
            n_routed=n_routed,
        )
        for i in range(p.n_layers)
    ]
    return replace(assemble(files, keys, p, layers), mrope=bool(p.rotary.sections))


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen35`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, "qwen35", str(files.paths[0]))
    p = hyperparameters(keys, options)
    if not p.feed_forward:
        raise keys.error("feed_forward_length", "is missing")
    return build(files, keys, p, lambda i: dense_tensors(p, i))
