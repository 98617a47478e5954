"""Multi-token-prediction (MTP, "nextn") heads of the families ``qwen35``, ``qwen35moe`` and ``qwen3next``.

A head is the block after the last layer of the model's file, or alone in a file.  Embedding, output norm and output
matrix are the target's.  Maths: docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lucevisor.model.drafters.spec import EMBEDDING, LM_HEAD, DraftSpec, assemble, joined, with_tensors
from lucevisor.model.families.qwen35 import Qwen35Params, dense_tensors, hyperparameters, mixer_tensors
from lucevisor.model.families.qwen35moe import Qwen35MoeParams, expert_tensors, moe_hyperparameters
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import Keys, LayerSpec, ModelSpec, Shapes, StateTensor, attention_state
from lucevisor.model.values import Dtype, KvGroup

FAMILIES = ("qwen35", "qwen35moe", "qwen3next")
OUTPUT_NORM = "output_norm.weight"
HIDDEN_LAYER = 1
"""The layer of the drafter whose state is the last hidden state of a sequence; layer 0 is the head."""
_HEAD_NORM = "nextn.shared_head_norm.weight"
_OWN = {"nextn.embed_tokens.weight": EMBEDDING, "nextn.shared_head_head.weight": LM_HEAD}
"""An embedding and an output matrix that only the head uses; published files have none."""


@dataclass(frozen=True, slots=True)
class MtpParams:
    """``block``: the decoder layer inside the head, layer 0 of the drafter."""

    family: str
    block: Qwen35Params


def read(files: GgufFiles, target: ModelSpec, options: Mapping[str, str]) -> DraftSpec:
    """Read and check the head of ``target`` in ``files``.  Raises GgufError."""
    file = str(files.paths[0])
    architecture = files.metadata.get("general.architecture")
    if target.architecture not in FAMILIES or architecture != target.architecture:
        families = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
        reason = (
            f"is {architecture!r}: an MTP head is of its model's family, here {target.architecture!r}, of {families}"
        )
        raise GgufError(file, "metadata value 'general.architecture'", reason)
    keys = Keys(files.metadata, target.architecture, file)
    p = _block(keys, target, options)
    drafter_files = _head_tensors(files, target)
    shared, layer = _tensors(drafter_files, p)
    lm_head = LM_HEAD if LM_HEAD in {*drafter_files.tensors, *target.output_tensors} else EMBEDDING
    from_target = frozenset({EMBEDDING, OUTPUT_NORM, lm_head} - drafter_files.tensors.keys())
    all_files = joined(drafter_files, target.files, sorted(from_target))
    if _HEAD_NORM not in drafter_files.tensors:
        all_files = with_tensors(all_files, all_files.tensors | {_HEAD_NORM: all_files.tensors[OUTPUT_NORM]})
    n_routed = p.experts.n_used if isinstance(p, Qwen35MoeParams) else 0
    attention = LayerSpec(
        0, KvGroup.FULL, layer, attention_state(p.n_kv_heads, p.head_dim, p.head_dim), n_routed=n_routed
    )
    hidden = StateTensor("hidden", (p.hidden_size,), Dtype.FLOAT32)
    layers = (attention, LayerSpec(HIDDEN_LAYER, KvGroup.RECURRENT, {}, (hidden,)))
    params = MtpParams(target.architecture, p)
    model = assemble(drafter_files, all_files, target, params, layers, shared, (lm_head, p.hidden_size))
    # A head reads its own drafts as input, so acceptance falls with each.
    return DraftSpec(model, 1, drafter_files, from_target, (target.n_layers - 1,), max_drafts=15, default_drafts=3)


def _block(keys: Keys, target: ModelSpec, options: Mapping[str, str]) -> Qwen35Params:
    n = keys.integer("nextn_predict_layers", 0, low=0)
    if not n:
        reason = "is missing: the file has no MTP head; use one that was converted with it, or another draft.kind"
        raise keys.error("nextn_predict_layers", reason)
    if n > 1:
        raise keys.error("nextn_predict_layers", f"is {n}: heads of more than one layer are not supported")
    p = hyperparameters(keys, options) if keys.prefix == "qwen35" else moe_hyperparameters(keys, options)
    for key, value, expected in (
        ("block_count", p.n_layers + 1, target.n_layers + 1),
        ("embedding_length", p.hidden_size, target.hidden_size),
    ):
        if value != expected:
            raise keys.error(
                key, f"is {value}, expected {expected}: the head belongs to another model than {target.name}"
            )
    return replace(p, n_layers=2, recurrent=(False, True))


def _head_tensors(files: GgufFiles, target: ModelSpec) -> GgufFiles:
    """The tensors of the head: its block is layer 0."""
    prefix, head = f"blk.{target.n_layers}.", "blk.0."
    tensors = {name.removeprefix(prefix): info for name, info in files.tensors.items() if name.startswith(prefix)}
    if not tensors:
        reason = f"is missing: the file has no block {target.n_layers}, where an MTP head of {target.name} would be"
        raise GgufError(str(files.paths[0]), f"tensor {prefix + 'nextn.eh_proj.weight'!r}", reason)
    return with_tensors(
        files,
        {
            _OWN.get(name) or (name if name.startswith("nextn.") else head + name): info
            for name, info in tensors.items()
        },
    )


def _tensors(files: GgufFiles, p: Qwen35Params) -> tuple[Shapes, Shapes]:
    e = p.hidden_size
    norms = ("nextn.enorm.weight", "nextn.hnorm.weight", _HEAD_NORM, OUTPUT_NORM)
    shared: Shapes = {"nextn.eh_proj.weight": (e, 2 * e), **dict.fromkeys(norms, (e,))}
    mlp = expert_tensors(files, p, 0) if isinstance(p, Qwen35MoeParams) else dense_tensors(p, 0)
    return shared, mixer_tensors(p, 0) | mlp
