"""Family ``qwen35moe``: the layers of ``qwen35`` with routed experts and a gated shared expert as feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lucevisor.model.experts import Experts, read_experts, routed_tensors, shared_tensors
from lucevisor.model.families.qwen35 import Qwen35Params, build, hyperparameters
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import Keys, ModelSpec, Shapes


@dataclass(frozen=True, slots=True)
class Qwen35MoeParams(Qwen35Params):
    """Hyperparameters of ``qwen35``, plus the experts."""

    experts: Experts


def expert_tensors(files: GgufFiles, p: Qwen35MoeParams, i: int) -> Shapes:
    """Router, routed experts, shared expert and its gate (one row, stored as a vector in some files)."""
    b, e = f"blk.{i}.", p.hidden_size
    gate = files.tensors.get(b + "ffn_gate_inp_shexp.weight")
    vector = gate is not None and len(gate.shape) == 1
    return {
        **routed_tensors(files, b, e, p.experts),
        **shared_tensors(b, e, p.experts),
        b + "ffn_gate_inp_shexp.weight": (e,) if vector else (1, e),
    }


def moe_hyperparameters(keys: Keys, options: Mapping[str, str]) -> Qwen35MoeParams:
    dense = hyperparameters(keys, options)
    width = None
    if dense.feed_forward:
        width = dense.feed_forward // keys.integer("expert_used_count")
    experts = read_experts(keys, width=width, shared_width=dense.feed_forward or None, gating=1)
    return Qwen35MoeParams(**{f.name: getattr(dense, f.name) for f in fields(dense)}, experts=experts)


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen35moe`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, "qwen35moe", str(files.paths[0]))
    p = moe_hyperparameters(keys, options)
    return build(files, keys, p, lambda i: expert_tensors(files, p, i), p.experts.n_used)
