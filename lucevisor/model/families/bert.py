"""Family ``bert``: an encoder.  Its tokens see those after them, norms follow both blocks, positions are a table.

BERT, MiniLM, BGE, E5 and other models for embeddings, and cross-encoders, which score a pair of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import (
    MAX_LAYERS,
    Keys,
    ModelSpec,
    Pooling,
    PoolingType,
    Shapes,
    assemble,
    attention_layer,
    attention_state,
    tensor,
)

POSITIONS, TYPES, NORM = "position_embd.weight", "token_types.weight", "token_embd_norm"
CLASSIFIER, SCORE = "cls", "cls.output"


@dataclass(frozen=True, slots=True)
class BertParams:
    """``has_types``: a row of token types is added, the first one; behind a ``separator`` (-1: none) the second one."""

    n_layers: int
    hidden_size: int
    feed_forward: int
    n_heads: int
    eps: float
    has_types: bool
    separator: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads


def layer_tensors(p: BertParams, i: int) -> Shapes:
    b, e, f = f"blk.{i}.", p.hidden_size, p.feed_forward
    matrices = {**{f"attn_{name}": (e, e) for name in ("q", "k", "v", "output")}, "ffn_up": (f, e), "ffn_down": (e, f)}
    norms = ("attn_output_norm", "layer_output_norm")
    return {
        **{f"{b}{name}.weight": shape for name, shape in matrices.items()},
        **{f"{b}{name}.bias": shape[:1] for name, shape in matrices.items()},
        **{f"{b}{name}.{kind}": (e,) for name in norms for kind in ("weight", "bias")},
    }


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``bert`` file.  No model options."""
    keys = Keys(files.metadata, "bert", str(files.paths[0]))
    if keys.flag("attention.causal", False):
        raise keys.error("attention.causal", "is true, which this family does not support")
    e, context = keys.integer("embedding_length"), keys.integer("context_length")
    p = BertParams(
        n_layers=keys.integer("block_count", high=MAX_LAYERS),
        hidden_size=e,
        feed_forward=keys.integer("feed_forward_length"),
        n_heads=keys.integer("attention.head_count"),
        eps=keys.number("attention.layer_norm_epsilon", above=0.0),
        has_types=TYPES in files.tensors,
        separator=_separator(files, keys),
    )
    if e % p.n_heads:
        raise keys.error("attention.head_count", f"is {p.n_heads}, which does not divide the embedding length {e}")
    state = attention_state(p.n_heads, p.head_dim, p.head_dim)
    layers = [attention_layer(i, layer_tensors(p, i), state) for i in range(p.n_layers)]
    inputs: Shapes = {POSITIONS: (context, e), f"{NORM}.weight": (e,), f"{NORM}.bias": (e,)}
    if p.has_types:
        inputs[TYPES] = tensor(files, TYPES).shape
    pooling, outputs = _pooling(files, keys, e)
    return assemble(files, keys, p, layers, pooling=pooling, inputs=inputs, outputs=outputs)


def _separator(files: GgufFiles, keys: Keys) -> int:
    """Return the token behind which the types of a pair change."""
    types = files.tensors.get(TYPES)
    if keys.integer("pooling_type", 0, low=0) != PoolingType.RANK or types is None or types.shape[0] < 2:
        return -1
    value, tokens = (files.metadata.get(f"tokenizer.ggml.{key}") for key in ("seperator_token_id", "tokens"))
    if isinstance(value, int):
        return value
    return next((i for i, text in enumerate(tokens) if text == "[SEP]"), -1) if isinstance(tokens, list) else -1


def _pooling(files: GgufFiles, keys: Keys, e: int) -> tuple[Pooling, Shapes]:
    """Return the pooling, and the tensors of a classifier."""
    value = keys.integer("pooling_type", PoolingType.MEAN, low=0)
    if value not in (PoolingType.MEAN, PoolingType.CLS, PoolingType.RANK):
        raise keys.error("pooling_type", f"is {value}; this family pools by 1 (mean), 2 (cls) or 4 (rank)")
    kind = PoolingType(value)
    if kind is not PoolingType.RANK:
        return Pooling(kind, bidirectional=True, generates=False), {}
    dense: Shapes = {}
    if f"{CLASSIFIER}.weight" in files.tensors:
        dense = {f"{CLASSIFIER}.weight": (e, e), f"{CLASSIFIER}.bias": (e,)}
    if tensor(files, f"{SCORE}.weight").shape[0] != 1:
        raise keys.error("pooling_type", "is 4 (rank) for a classifier of several classes; this version ranks by one")
    score: Shapes = {f"{SCORE}.weight": (1, e), f"{SCORE}.bias": (1,)}
    return Pooling(kind, width=1, bidirectional=True, generates=False), {**dense, **score}
