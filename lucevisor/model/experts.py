"""Mixture-of-experts (MoE) metadata and tensors.  Routed experts are 3-D tensors, never split between shards."""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import Keys, Shapes, swiglu_tensors

GATING = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True, slots=True)
class Experts:
    """A token uses ``n_used`` of ``n_experts`` experts of ``width``, plus a shared one of ``shared_width`` (0: none).

    ``normalise``: divide the selected weights by their sum; then ``scale`` multiplies them.  ``biased``: a bias selects
    experts, and does not weigh them.  ``has_biases``: of the router's output and all matrices.
    """

    n_experts: int
    n_used: int
    width: int
    shared_width: int
    gating: str
    normalise: bool
    scale: float
    biased: bool
    has_biases: bool


def read_experts(
    keys: Keys,
    *,
    width: int | None,
    shared_width: int | None,
    gating: int,
    biased: bool = False,
    has_biases: bool = False,
) -> Experts:
    """Read the expert metadata.  The arguments are defaults; None: the key is required."""
    n_experts = keys.integer("expert_count", high=1 << 16)
    n_used = keys.integer("expert_used_count")
    if n_used > n_experts:
        raise keys.error("expert_used_count", f"is {n_used}, the model has {n_experts} experts")
    if keys.integer("expert_group_count", 1, low=0) > 1:
        raise keys.error("expert_group_count", "is more than 1: groups of experts are not supported")
    width = keys.integer("expert_feed_forward_length", width)
    function = keys.integer("expert_gating_func", gating, low=0)
    if function not in GATING:
        functions = ", ".join(f"{number} ({name})" for number, name in GATING.items())
        raise keys.error("expert_gating_func", f"is {function}, known are {functions}")
    return Experts(
        n_experts=n_experts,
        n_used=n_used,
        width=width,
        shared_width=keys.integer("expert_shared_feed_forward_length", shared_width, low=0),
        gating=GATING[function],
        normalise=keys.flag("expert_weights_norm", True),
        scale=keys.number("expert_weights_scale", 0.0) or 1.0,  # some files write 0 for "no scaling"
        biased=biased,
        has_biases=has_biases,
    )


def routed_tensors(files: GgufFiles, prefix: str, embedding: int, x: Experts) -> Shapes:
    """Router, its bias and routed experts of the layer ``prefix``, gate and up merged or separate as in the file."""
    e, f, n = embedding, x.width, x.n_experts
    out: Shapes = {prefix + "ffn_gate_inp.weight": (n, e)}
    if x.biased:
        out[prefix + "exp_probs_b.bias"] = (n,)
    rows = {"gate_up": 2 * f} if merged(files, prefix) else {"gate": f, "up": f}
    matrices = {f"ffn_{name}_exps": (n, r, e) for name, r in rows.items()} | {"ffn_down_exps": (n, e, f)}
    out |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
    if x.has_biases:
        out[prefix + "ffn_gate_inp.bias"] = (n,)
        out |= {f"{prefix}{name}.bias": shape[:2] for name, shape in matrices.items()}
    return out


def shared_tensors(prefix: str, embedding: int, x: Experts) -> Shapes:
    if not x.shared_width:
        return {}
    return swiglu_tensors(prefix, embedding, x.shared_width, "_shexp")


def merged(files: GgufFiles, prefix: str) -> bool:
    """Return whether gate and up of the experts are one tensor, gate rows first."""
    return prefix + "ffn_gate_up_exps.weight" in files.tensors


def refuse_experts(keys: Keys) -> None:
    """Raise GgufError for experts, which a dense family would ignore."""
    if keys.integer("expert_count", 0, low=0):
        raise keys.error("expert_count", "is not 0: this family has no experts")
