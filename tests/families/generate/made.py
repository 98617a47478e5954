"""What the generators of all families have in common: drawing, random weights, the file.

Invariant: a seed gives the same model on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bench.gguf_writing import Value, add_value, finish, new_file
from tests.numerics import RUNS, Bound, Exact

T = TypeVar("T")

VECTORS: dict[str, tuple[float, float]] = {
    "A_log": (-0.5, 1.0),
    "dt_bias": (-1.0, 1.0),
    "layer_scalar": (0.6, 1.1),
    "per_expert_scale": (0.6, 1.4),
    "e_score_correction_bias": (-0.3, 0.3),
    "sinks": (-2.0, 2.0),
}
"""Ranges of vectors that are no norms."""

PLAIN: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Settings of transformers: sums in plain steps, no kernels that ask for aligned widths."""


class Draw:
    """Choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *values: T) -> T:
        return values[int(self.rng.integers(len(values)))]

    def between(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def flag(self) -> bool:
        return bool(self.rng.integers(2))

    def ids(self, n: int, vocabulary: int) -> list[int]:
        return [int(i) for i in self.rng.integers(0, vocabulary, n)]


@dataclass(frozen=True)
class Made:
    """A model and its file's contents.  ``routers``: the modules whose output says who was chosen."""

    model: nn.Module
    architecture: str
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    @property
    def vocabulary(self) -> int:
        return self.tensors["token_embd.weight"].shape[0]

    @property
    def n_layers(self) -> int:
        return int(self.metadata["block_count"])

    def write(self, path: Path, more: Mapping[str, Value] | None = None) -> Path:
        """All tensors in F32, and ``more`` metadata, with their whole names."""
        writer = new_file(path, self.architecture, self.metadata)
        for key, value in (more or {}).items():
            add_value(writer, key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(tensor.detach().to(torch.float32).numpy()))
        finish(writer)
        return path


def build(
    model_class: Callable[[Any], nn.Module], config: Any, draw: Draw, *, centred_norms: bool = False
) -> nn.Module:
    """The model with random weights of a size that keeps the signal: matrices by their width, norms near their
    neutral value.

    ``centred_norms``: a norm multiplies by one plus its weight.
    """
    model = model_class(config).eval()
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            last = name.rpartition(".")[2]
            if (
                tensor.data_ptr() in seen
                or "inv_freq" in name
                or "embed_scale" in name
                or not tensor.dtype.is_floating_point
            ):
                continue
            seen.add(tensor.data_ptr())
            if last in VECTORS:
                low, high = VECTORS[last]
                x = draw.rng.uniform(low, high, tensor.shape)
            elif tensor.dim() < 2:
                centre = 0.0 if centred_norms and "linear_attn.norm" not in name else 1.0
                x = draw.rng.normal(centre, 0.15, tensor.shape)
                if not centre:  # a file holds 1 + x in float32
                    x = (1.0 + x).astype(np.float32) - np.float32(1.0)
            elif "embed" in name:
                x = draw.rng.normal(0.0, 1.0, tensor.shape)
            else:
                fan_in = tensor.shape[-1] if "conv1d" not in name else 2
                x = draw.rng.normal(0.0, 1.3 / fan_in**0.5, tensor.shape)
            tensor.copy_(torch.from_numpy(x.astype(np.float32)))
    return model


def renamed(state: dict[str, Tensor], names: dict[str, str], n_layers: int) -> dict[str, Tensor]:
    """Tensors of all layers under GGUF names: ``names`` maps the end of a GGUF name to that of the model's, without
    layer; a layer lacks those that the model does not have.
    """
    out = {}
    for i in range(n_layers):
        for ours, theirs in names.items():
            found = state.get(f"model.layers.{i}.{theirs}")
            if found is not None:
                out[f"blk.{i}.{ours}"] = found
    return out


def ends(state: dict[str, Tensor], *, tied: bool, norm_shift: float = 0.0) -> dict[str, Tensor]:
    """Token table, last norm, and the output matrix when it is not the table."""
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"] + norm_shift,
    }
    return out if tied else out | {"output.weight": state["lm_head.weight"]}


def reference(model: nn.Module, ids: Sequence[int]) -> tuple[Bound, bool]:
    """Exact logits [T, V] by transformers, how far its float32 may be from them, and whether rounding leaves all
    choices of experts as they are.
    """
    exact, perturbed = Exact(), Exact(seed=0)
    with torch.no_grad(), exact:
        [logits] = model(torch.tensor([list(ids)]), use_cache=False).logits
    with torch.no_grad(), perturbed:
        others = model(torch.tensor([list(ids)] * RUNS), use_cache=False).logits
    chosen = zip(exact.choices, perturbed.choices, strict=True)
    same = (torch.equal(one.flatten(0, -2).repeat(RUNS, 1), many.flatten(0, -2)) for one, many in chosen)
    return Bound.of(logits, others), all(same)
