"""Family ``qwen3next``: Qwen3-Next, Qwen3-Coder-Next.  The layers of ``qwen35moe`` with other input matrices of the
gated delta net, whose value heads are numbered key head by key head.

Metadata and tensors: docs/families.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from lucevisor.model.families.qwen35 import Qwen35Params, build
from lucevisor.model.families.qwen35moe import expert_tensors, moe_hyperparameters
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import Keys, ModelSpec, Shapes


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen3next`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, "qwen3next", str(files.paths[0]))
    p = moe_hyperparameters(keys, options)

    def inputs(p: Qwen35Params, b: str) -> Shapes:
        e = p.hidden_size
        out: Shapes = {b + "ssm_ba.weight": (2 * p.delta_value_heads, e)}
        if b + "ssm_in.weight" in files.tensors:  # of older files
            return out | {b + "ssm_in.weight": (p.conv_channels + p.inner_size, e)}
        return out | {b + "attn_qkv.weight": (p.conv_channels, e), b + "attn_gate.weight": (p.inner_size, e)}

    return build(files, keys, p, lambda i: expert_tensors(files, p, i), p.experts.n_used, inputs)
