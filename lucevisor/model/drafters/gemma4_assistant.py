"""Gemma 4 assistants: small models whose layers have queries only and attend to keys and values of their target.

Those are made again from captures, with the target's matrices, so the drafter may run on any device.  Maths:
docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lucevisor.model.drafters.spec import EMBEDDING, LM_HEAD, DraftSpec, assemble, joined, with_tensors
from lucevisor.model.families.gemma4 import Gemma4Layer, Gemma4Params, attention_tensors, feed_forward_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.rope import Rotary, plain_rotary
from lucevisor.model.spec import MAX_LAYERS, Keys, LayerSpec, ModelSpec, Shapes, attention_state, tensor
from lucevisor.model.values import KvGroup

ARCHITECTURE = "gemma4-assistant"
ROPE_FREQS = "rope_freqs.weight"
PRE_PROJECTION, POST_PROJECTION = "nextn.pre_projection.weight", "nextn.post_projection.weight"
TARGET_NORM, TARGET_ROPE_FREQS = "target.output_norm.weight", "target.rope_freqs.weight"
"""Names of the target's tensors in the drafter's spec."""


@dataclass(frozen=True, slots=True)
class KeyValueSource:
    """A layer of the target whose keys and values are read.  ``layer``: of the drafter, where they are kept; ``at``:
    index of its input among the captures."""

    layer: int
    at: int
    of_target: Gemma4Layer


@dataclass(frozen=True, slots=True)
class AssistantParams:
    """``block``: of the drafter's layers; ``hidden_at``: index of the target's last layer among the captures;
    ``rotary``: of the keys, sliding and full; ``eps``: of the target's norms."""

    block: Gemma4Params
    sources: tuple[KeyValueSource, ...]
    hidden_at: int
    rotary: tuple[Rotary, Rotary]
    eps: float


def read(files: GgufFiles, target: ModelSpec) -> DraftSpec:
    """Read and check an assistant of ``target``.  Raises GgufError."""
    keys = Keys(files.metadata, ARCHITECTURE, str(files.paths[0]))
    of_target = target.params
    if not isinstance(of_target, Gemma4Params):
        reason = f"is {ARCHITECTURE!r}, a drafter for gemma4 models; {target.name} is {target.architecture}"
        raise GgufError(keys.file, "metadata value 'general.architecture'", reason)
    width = keys.integer("embedding_length_out")
    if width != target.hidden_size:
        reason = f"is {width}, expected {target.hidden_size}: the drafter belongs to another model than {target.name}"
        raise keys.error("embedding_length_out", reason)
    sliding = keys.flags("attention.sliding_window_pattern", keys.integer("block_count", high=MAX_LAYERS))
    if sliding is None:
        raise keys.error("attention.sliding_window_pattern", "is missing")
    last = {
        kind: max(
            (i for i, layer in enumerate(of_target.layers) if layer.sliding is kind and of_target.owns(i)), default=0
        )
        for kind in sorted(set(sliding))
    }
    if 0 in last.values():
        reason = f"is not one of {target.name}: what goes into its first layer cannot be captured"
        raise keys.error("attention.sliding_window_pattern", reason)
    captures = tuple(sorted({target.n_layers - 1, *(i - 1 for i in last.values())}))
    n = len(sliding)
    sources = {
        kind: KeyValueSource(n + at, captures.index(i - 1), of_target.layers[i])
        for at, (kind, i) in enumerate(last.items())
    }
    block = _block(keys, of_target, sliding, {kind: source.layer for kind, source in sources.items()})
    params = AssistantParams(
        block=block,
        sources=tuple(sources.values()),
        hidden_at=captures.index(target.n_layers - 1),
        rotary=(of_target.rotary_sliding, of_target.rotary),
        eps=of_target.eps,
    )
    layers = [_own_layer(files, params, i) for i in range(n)]
    layers += [_kept_layer(source, target.hidden_size) for source in sources.values()]
    prefixes = {f"blk.{sources[kind].layer}.": f"blk.{i}." for kind, i in last.items()}
    model, drafter_files, from_target = _assembled(files, target, params, tuple(layers), prefixes)
    return DraftSpec(model, 1, drafter_files, from_target, captures, max_drafts=15, default_drafts=3)


def _block(keys: Keys, of_target: Gemma4Params, sliding: list[bool], kept_in: Mapping[bool, int]) -> Gemma4Params:
    """Hyperparameters of the drafter's layers; heads are those of the keys."""
    heads = {layer.sliding: layer for i, layer in enumerate(of_target.layers) if of_target.owns(i)}
    dims = {True: keys.head_dim("_swa"), False: keys.head_dim()}
    n_heads, widths = keys.integer("attention.head_count"), keys.integers("feed_forward_length", len(sliding))
    for kind in set(sliding):
        keys.check_heads(n_heads, heads[kind].n_kv_heads)
        if dims[kind] != heads[kind].head_dim:
            key = "attention.key_length" + ("_swa" if kind else "")
            raise keys.error(key, f"is {dims[kind]}, and the model's keys have {heads[kind].head_dim}")
    layers = [
        Gemma4Layer(kind, heads[kind].n_kv_heads, dims[kind], width, kept_in[kind], key_values=False)
        for kind, width in zip(sliding, widths, strict=True)
    ]
    return Gemma4Params(
        hidden_size=keys.integer("embedding_length"),
        n_heads=n_heads,
        window=keys.integer("attention.sliding_window"),
        layers=tuple(layers),
        rotary=plain_rotary(keys, dims[False], 1e6),
        rotary_sliding=plain_rotary(keys, dims[True], 1e4, "_swa"),
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        layer_input=0,
        softcap=0.0,
        experts=None,
    )


def _own_layer(files: GgufFiles, params: AssistantParams, i: int) -> LayerSpec:
    """A layer of queries.  Its window counts the token that the target computed last, too."""
    p, layer = params.block, params.block.layers[i]
    tensors = attention_tensors(p, i) | feed_forward_tensors(files, p, i)
    window = p.window + 1 if layer.sliding else 0
    return LayerSpec(i, KvGroup.FULL, tensors, (), window=window, shares_with=layer.source)


def _kept_layer(source: KeyValueSource, hidden_size: int) -> LayerSpec:
    layer, b = source.of_target, f"blk.{source.layer}."
    kv, d = layer.n_kv_heads * layer.head_dim, layer.head_dim
    tensors: Shapes = {
        b + "attn_norm.weight": (hidden_size,),
        b + "attn_k.weight": (kv, hidden_size),
        b + "attn_k_norm.weight": (d,),
    }
    if not layer.key_values:
        tensors[b + "attn_v.weight"] = (kv, hidden_size)
    return LayerSpec(source.layer, KvGroup.FULL, tensors, attention_state(layer.n_kv_heads, d, d))


def _assembled(
    files: GgufFiles,
    target: ModelSpec,
    params: AssistantParams,
    layers: tuple[LayerSpec, ...],
    prefixes: Mapping[str, str],
) -> tuple[ModelSpec, GgufFiles, frozenset[str]]:
    """The spec, the drafter's own tensors, and the names of those that are the target's."""
    p, e = params.block, target.hidden_size
    drafter_files = with_tensors(
        files, {LM_HEAD if name == EMBEDDING else name: t for name, t in files.tensors.items()}
    )
    of_target = {EMBEDDING: EMBEDDING, TARGET_NORM: "output_norm.weight", TARGET_ROPE_FREQS: ROPE_FREQS}
    for here, there in prefixes.items():
        names = [name for layer in layers for name in layer.tensors if name.startswith(here)]
        of_target |= {name: there + name.removeprefix(here) for name in names}
    if ROPE_FREQS not in drafter_files.tensors:  # it has no full layer
        of_target[ROPE_FREQS] = ROPE_FREQS
    all_files, n = joined(drafter_files, target.files, ()), len(drafter_files.parts)
    tensors = {here: tensor(target.files, there) for here, there in of_target.items()}
    all_files = with_tensors(
        all_files, drafter_files.tensors | {here: replace(t, part=t.part + n) for here, t in tensors.items()}
    )
    pairs = (p.rotary.n // 2,)
    shared: Shapes = {
        PRE_PROJECTION: (p.hidden_size, 2 * e),
        POST_PROJECTION: (e, p.hidden_size),
        "output_norm.weight": (p.hidden_size,),
        ROPE_FREQS: pairs if ROPE_FREQS in drafter_files.tensors else (params.rotary[1].n // 2,),
        TARGET_NORM: (e,),
        TARGET_ROPE_FREQS: (params.rotary[1].n // 2,),
    }
    model = assemble(drafter_files, all_files, target, params, layers, shared, (LM_HEAD, p.hidden_size))
    return model, drafter_files, frozenset(of_target)
