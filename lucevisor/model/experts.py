"""Mixture-of-experts metadata and tensors that several families share.

Knows names of the file and shapes, no maths.  The routed experts of a layer are three-dimensional tensors: they stay
with their layer, whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import Keys

GATING = {1: "softmax", 2: "sigmoid"}
MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Experts:
    """``n_used`` of ``n_experts`` gated parts of ``width`` for each token, beside a shared one of ``shared_width``
    (0: none).

    ``gating``: softmax or sigmoid of the router's output.  ``normalise``: weights of the chosen are divided by their
    sum; then they are multiplied by ``scale``.
    """

    n_experts: int
    n_used: int
    width: int
    shared_width: int
    gating: str
    normalise: bool
    scale: float


def read_experts(keys: Keys, *, width: int | None, shared_width: int | None, gating: int) -> Experts:
    """Read what the file says of experts; the arguments stand for what it leaves out, None: it must say so."""
    n_experts = keys.integer("expert_count", high=MAX_EXPERTS)
    n_used = keys.integer("expert_used_count")
    if n_used > n_experts:
        raise keys.error("expert_used_count", f"is {n_used}, the model has {n_experts} experts")
    width = keys.integer("expert_feed_forward_length", width)
    function = keys.integer("expert_gating_func", gating, low=0)
    if function not in GATING:
        known = ", ".join(f"{number} ({name})" for number, name in GATING.items())
        raise keys.error("expert_gating_func", f"is {function}, known are {known}")
    return Experts(
        n_experts=n_experts,
        n_used=n_used,
        width=width,
        shared_width=keys.integer("expert_shared_feed_forward_length", shared_width, low=0),
        gating=GATING[function],
        normalise=keys.flag("expert_weights_norm", True),
        scale=keys.number("expert_weights_scale", 0.0) or 1.0,  # 0 stands for no scaling in files that write the key
    )


def routed_tensors(files: GgufFiles, prefix: str, embedding: int, x: Experts) -> dict[str, tuple[int, ...]]:
    """Router and routed experts of the layer ``prefix`` ("blk.3."), gate and up in one tensor or in two as the file has
    them."""
    e, f, n = embedding, x.width, x.n_experts
    out: dict[str, tuple[int, ...]] = {prefix + "ffn_gate_inp.weight": (n, e)}
    if merged(files, prefix):
        out[prefix + "ffn_gate_up_exps.weight"] = (n, 2 * f, e)
    else:
        out |= {prefix + "ffn_gate_exps.weight": (n, f, e), prefix + "ffn_up_exps.weight": (n, f, e)}
    return out | {prefix + "ffn_down_exps.weight": (n, e, f)}


def shared_tensors(prefix: str, embedding: int, x: Experts) -> dict[str, tuple[int, ...]]:
    """The shared expert of the layer ``prefix``."""
    e, f = embedding, x.shared_width
    return {
        prefix + "ffn_gate_shexp.weight": (f, e),
        prefix + "ffn_up_shexp.weight": (f, e),
        prefix + "ffn_down_shexp.weight": (e, f),
    }


def merged(files: GgufFiles, prefix: str) -> bool:
    """Whether gate and up of the experts are one tensor, gate rows first."""
    return prefix + "ffn_gate_up_exps.weight" in files.tensors


def refuse_experts(keys: Keys) -> None:
    """Raise GgufError when the metadata claim experts that a dense family would leave out."""
    if keys.integer("expert_count", 0, low=0):
        raise GgufError(keys.file, f"metadata value {keys.prefix}.expert_count", "is not 0: this family has no experts")
