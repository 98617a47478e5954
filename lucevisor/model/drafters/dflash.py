"""DFlash drafters, versions 1 and 2: block diffusion over features captured from the target.

Reads the GGUF layouts of llama.cpp (architecture ``dflash``) and of Lucebox and older community files
(``...dflash-draft``), and checkpoints through :mod:`.checkpoint`.  Maths and file forms: docs/speculation.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from lucevisor.model.drafters.spec import (
    EMBEDDING,
    LM_HEAD,
    MAX_DRAFT_TOKENS,
    DraftSpec,
    assemble,
    joined,
    refuse,
    with_tensors,
)
from lucevisor.model.families.llama import LlamaParams, hyperparameters, layer_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError, TensorInfo
from lucevisor.model.spec import Keys, LayerSpec, ModelSpec, Shapes, attention_state, tensor
from lucevisor.model.values import KvGroup

UPSTREAM = "dflash"
_ALIASES = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
}
"""Names in files of Lucebox and older ones -> names in llama.cpp's files."""
_OLD_NORM = re.compile(r"(blk\.\d+)\.post_attention_norm\.weight")
_EXTRAS = {
    "d2t": "the drafter has a vocabulary of its own",
    "markov": "this is a DSpark drafter",
    "confidence": "this is a DSpark drafter",
    "gru": "this is a Domino drafter",
    "sink": "its attention has sinks",
    "aux_hidden_norm": "this is a drafter for Laguna",
    "attn_gate": "this is a drafter for Laguna",
}
_CLOSED_KEYS = ("sample_from_anchor", "has_confidence_head")
"""Keys of drafters with other maths; only the value false is accepted."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Parameters of DFlash 2: convolutions of ``taps`` positions, whose weights ``group`` channels share, and a
    selector of ``rank`` that rescores the ``top_k`` best tokens of each position."""

    taps: int
    group: int
    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DflashParams(LlamaParams):
    """Hyperparameters of ``qwen3``, whose layers a drafter has, and its own.

    ``features``: numbers per token that are captured.  ``windows``: of each layer, 0: all positions.  ``causal``:
    whether a position of a block attends only to earlier ones of it.
    """

    features: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    mask_token: int
    embedding_scale: float
    logit_scale: float
    softcap: float
    selector: Selector | None


def read(files: GgufFiles, target: ModelSpec) -> DraftSpec:
    """Read and check a drafter of ``target``.  Raises GgufError."""
    architecture = files.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not (architecture == UPSTREAM or architecture.endswith("dflash-draft")):
        where = "metadata value 'general.architecture'"
        raise GgufError(
            str(files.paths[0]), where, f"{architecture!r} is not a DFlash drafter: name the drafter's file"
        )
    keys = Keys(files.metadata, architecture, str(files.paths[0]))
    drafter_files = _renamed(files)
    p, block_size = _hyperparameters(keys, drafter_files, target)
    shared, per_layer = _shared_tensors(p, target.vocabulary), _layer_tensors(drafter_files, p)
    _refuse_extras(drafter_files, {*shared, *(n for tensors in per_layer for n in tensors), EMBEDDING, LM_HEAD})
    if (EMBEDDING in drafter_files.tensors) != (LM_HEAD in drafter_files.tensors):
        present = next(name for name in (EMBEDDING, LM_HEAD) if name in drafter_files.tensors)
        raise refuse(
            drafter_files,
            drafter_files.tensors[present],
            f"comes without {EMBEDDING if present == LM_HEAD else LM_HEAD!r}",
        )
    from_target = frozenset[str]()
    lm_head = LM_HEAD
    if EMBEDDING not in drafter_files.tensors:
        lm_head = LM_HEAD if LM_HEAD in target.output_tensors else EMBEDDING
        from_target = frozenset({EMBEDDING, lm_head})
    all_files = joined(drafter_files, target.files, sorted(from_target))
    layers = [
        LayerSpec(i, KvGroup.FULL, tensors, attention_state(p.n_kv_heads, p.head_dim, p.head_dim))
        for i, tensors in enumerate(per_layer)
    ]
    model = replace(
        assemble(drafter_files, all_files, target, p, layers, shared, (lm_head, p.hidden_size)),
        architecture="dflash",
        context_tokens=keys.integer("context_length", target.context_tokens),
        boundary_width=p.features,
        embedding_scale=1.0,
    )
    n_drafts = min(block_size - 1, MAX_DRAFT_TOKENS)
    return DraftSpec(
        model=model,
        version=2 if p.selector else 1,
        files=drafter_files,
        from_target=from_target,
        captures=_captures(keys, drafter_files, target, p),
        max_drafts=n_drafts,
        default_drafts=n_drafts,
    )


def _renamed(files: GgufFiles) -> GgufFiles:
    out: dict[str, TensorInfo] = {}
    for name, info in files.tensors.items():
        old_norm = _OLD_NORM.fullmatch(name)
        out[f"{old_norm[1]}.ffn_norm.weight" if old_norm else _ALIASES.get(name, name)] = info
    if len(out) < len(files.tensors):
        raise GgufError(
            str(files.paths[0]), "tensor table", "has one tensor under two names: convert the drafter again"
        )
    return with_tensors(files, out)


def _nested(keys: Keys, key: str) -> str:
    """DFlash's own keys are one level deeper in files that are not llama.cpp's."""
    return key if keys.prefix == UPSTREAM else f"dflash.{key}"


def _hyperparameters(keys: Keys, files: GgufFiles, target: ModelSpec) -> tuple[DflashParams, int]:
    for key in _CLOSED_KEYS:
        if keys.flag(key, False):
            raise keys.error(key, "is true: this is a drafter of another kind (DSpark), which is not supported")
    if keys.number("attention.value_scale", 1.0) != 1.0:
        raise keys.error("attention.value_scale", "is not 1, which is not supported")
    if keys.text("hidden_act", "silu") != "silu":
        raise keys.error("hidden_act", f"is {keys.raw('hidden_act')!r}, known is 'silu'")
    hidden_size = keys.integer("embedding_length")
    if hidden_size != target.hidden_size:
        raise keys.error("embedding_length", f"is {hidden_size}, {target.name} has {target.hidden_size}: {_OTHER}")
    _check_vocabulary(keys, target)
    n_target = keys.integer("num_target_layers", target.n_layers)
    if n_target != target.n_layers:
        raise keys.error("num_target_layers", f"is {n_target}, {target.name} has {target.n_layers}: {_OTHER}")
    layers = hyperparameters(files, keys, {}, adjacent_pairs=False, qk_norm=True, experts=False)
    windows, causal = _masks(keys, layers.n_layers)
    p = DflashParams(
        **{f.name: getattr(layers, f.name) for f in fields(layers)},
        features=tensor(files, "fc.weight").shape[-1],
        windows=windows,
        causal=causal,
        mask_token=_mask_token(keys, target),
        embedding_scale=keys.number("embedding_scale", target.embedding_scale, above=0.0),
        logit_scale=keys.number("logit_scale", 1.0, above=0.0),
        softcap=keys.number("final_logit_softcapping", 0.0),
        selector=_selector(keys, files, target),
    )
    return p, keys.integer(_nested(keys, "block_size"), 16, low=2, high=1024)


_OTHER = "the drafter belongs to another model"


def _check_vocabulary(keys: Keys, target: ModelSpec) -> None:
    if keys.integer("vocab_size", target.vocabulary) != target.vocabulary:
        raise keys.error("vocab_size", f"is {keys.raw('vocab_size')}, {target.name} has {target.vocabulary}: {_OTHER}")
    key = "tokenizer.ggml.tokens"
    tokens, expected = keys.metadata.get(key), target.files.metadata.get(key)
    if isinstance(tokens, list) and isinstance(expected, list) and len(tokens) != len(expected):
        reason = f"has {len(tokens)} tokens, {target.name} has {len(expected)}: {_OTHER}"
        raise GgufError(keys.file, f"metadata value {key}", reason)


def _mask_token(keys: Keys, target: ModelSpec) -> int:
    last = target.vocabulary - 1
    if keys.prefix != UPSTREAM:
        return keys.integer("dflash.mask_token_id", low=0, high=last)
    return Keys(keys.metadata, "tokenizer.ggml", keys.file).integer("mask_token_id", low=0, high=last)


def _masks(keys: Keys, n_layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Windows and causality of the layers; without a flag for all, the sliding layers are causal, as trained."""
    sliding = keys.flags("attention.sliding_window_pattern", n_layers)
    if sliding is None:
        if keys.has("attention.sliding_window"):
            raise keys.error(
                "attention.sliding_window_pattern", "is missing: which layers slide is unknown; convert again"
            )
        sliding = [False] * n_layers
    window = keys.integer("attention.sliding_window") if any(sliding) else 0
    causal = [keys.flag("attention.causal", s) for s in sliding]
    return tuple(window if s else 0 for s in sliding), tuple(causal)


def _selector(keys: Keys, files: GgufFiles, target: ModelSpec) -> Selector | None:
    """DFlash 2 is detected by its tensors."""
    if "selector_hidden.weight" not in files.tensors and not keys.has("selector_top_k"):
        return None
    selector = Selector(
        taps=keys.integer("conv_kernel_size", high=64),
        group=keys.integer("conv_group_size", high=target.hidden_size),
        rank=keys.integer("selector_rank"),
        top_k=keys.integer("selector_top_k", high=min(256, target.vocabulary)),
    )
    if target.hidden_size % selector.group:
        raise keys.error("conv_group_size", f"is {selector.group}, which does not divide {target.hidden_size} channels")
    return selector


def _shared_tensors(p: DflashParams, vocabulary: int) -> Shapes:
    e, s = p.hidden_size, p.selector
    out: Shapes = {
        "fc.weight": (e, p.features),
        "enc.output_norm.weight": (e,),
        "output_norm.weight": (e,),
    }
    if s is not None:
        out["selector_hidden.weight"] = (s.rank, e)
        out |= {f"selector_{name}.weight": (vocabulary, s.rank) for name in ("predecessor", "successor")}
    return out


def _layer_tensors(files: GgufFiles, p: DflashParams) -> list[Shapes]:
    e, s, out = p.hidden_size, p.selector, []
    for i in range(p.n_layers):
        layer = layer_tensors(files, p, i)
        if s is not None:
            for part in (f"blk.{i}.attn", f"blk.{i}.ffn"):
                layer[f"{part}_conv_base"] = (2, s.taps, e)
                layer[f"{part}_conv_proj.weight"] = (2 * s.taps * e // s.group, e)
        out.append(layer)
    return out


def _refuse_extras(files: GgufFiles, used: set[str]) -> None:
    """Raise GgufError for a tensor that is not used: drafts would be garbage."""
    for name, info in files.tensors.items():
        if name not in used:
            kind = next((text for part, text in _EXTRAS.items() if part in name), "it is unknown to this version")
            raise refuse(files, info, f"{kind}, which is not supported: use a DFlash or DFlash 2 drafter")


def _captures(keys: Keys, files: GgufFiles, target: ModelSpec, p: DflashParams) -> tuple[int, ...]:
    """Captured layers, counted by their outputs; llama.cpp counts by inputs, one more."""
    n, remainder = divmod(p.features, target.hidden_size)
    if remainder or not n:
        reason = (
            f"has {p.features} columns, not a multiple of the width {target.hidden_size} of {target.name}: {_OTHER}"
        )
        raise refuse(files, files.tensors["fc.weight"], reason)
    upstream = keys.prefix == UPSTREAM
    key = "target_layers" if upstream else "dflash.target_layer_ids"
    if keys.raw(key) is None:
        if p.selector is not None:
            raise keys.error(key, "is missing: a DFlash 2 drafter lists the layers it reads")
        return default_captures(target.n_layers, n)
    raw = keys.raw(key)
    ids = [i - int(upstream) for i in raw if isinstance(i, int)] if isinstance(raw, list) else []
    if len(ids) != n or not isinstance(raw, list) or len(raw) != n:
        raise keys.error(key, f"is {raw!r}, but tensor {files.tensors['fc.weight'].name!r} reads {n} layers")
    if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < target.n_layers:
        reason = f"is {raw}: expected ascending layers of the {target.n_layers} of {target.name}"
        raise keys.error(key, f"{reason}, counted from {int(upstream)}")
    return tuple(ids)


def default_captures(n_layers: int, n: int) -> tuple[int, ...]:
    """The default captures of the authors' code: evenly from 1 to the third last layer."""
    if n == 1:
        return (n_layers // 2,)
    return tuple(round(1 + i * (n_layers - 4) / (n - 1)) for i in range(n))
