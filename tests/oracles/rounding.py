"""How far llama.cpp's float32 logits may be from ours: what each of the two rounds, amplified by the model.

For llama.cpp our own code runs, with the delta rule token by token, within a mode that knows what ggml's operations
round more coarsely than tests/numerics.py says of any float32 path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from daemons.models import blocks
from daemons.ops.basic import Rope, plain_rope, rope
from daemons.ops.delta_rule import step
from lucevisor.model.rope import Rotary
from lucevisor.model.spec import ModelSpec
from tests.families.rounding import bounds
from tests.numerics import RUNS, ULP, UNIT, Bound, Exact

EXP = 3 * ULP
"""ggml_v_expf: its source says 1.95 ulp with fused multiply-adds; without them, less than one ulp more."""
MAGNITUDE = 16 * UNIT
"""YaRN's factor on cos and sin: three times 1 + 0.1 logf(factor), 4u each, and four products and quotients."""


def _softmax(x: Tensor, out: Tensor) -> Tensor:
    """A score less the largest is rounded by as much as it is apart.  Exponentials are added in eights, which takes
    three steps, then in double; the inverse of the sum and the product with it are rounded.
    """
    behind = (out.amax(dim=-1, keepdim=True) / out).log_().mul_(UNIT).add_(EXP)
    of_sum = (out * behind).nan_to_num_(0.0).sum(dim=-1, keepdim=True)
    return out * (behind + of_sum + 5 * UNIT)


COARSER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "_safe_softmax": _softmax,
    "_softmax": _softmax,
    "gelu": lambda x, out: 3 * UNIT * x.abs() + ULP * out.abs(),
    "sigmoid": lambda x, out: ULP * out * (1 - out),
    "silu": lambda x, out: EXP * out.abs() * (-x).sigmoid(),
    "softplus": lambda x, out: UNIT + ULP * x.sigmoid(),
    "tanh": lambda x, out: ULP * out.abs(),
}
"""What ggml's form of an operation adds, from its argument and result, to what tests/numerics.py says of it."""


class LlamaCpp(Exact):
    """Perturbs results as ggml's float32 kernels round them, of ``RUNS`` equal sequences in one step."""

    def _perturbed(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        out = super()._perturbed(name, func, args, kwargs)
        if coarser := COARSER.get(name):
            out.add_(coarser(args[0], out).mul_(self._uniform(out)).nan_to_num_(0.0, 0.0, 0.0))
        return out

    def noise(self, *shape: int) -> Tensor:
        return self._uniform(torch.empty(shape))


@dataclass(frozen=True, kw_only=True)
class LlamaCppRope(Rope):
    """The angle of pair j is the position times ``theta_scale``, j times over, in float32.

    Relative errors: ``ratio`` of theta_scale; of pairs [n / 2], ``constant`` at all positions, ``each`` at one.
    """

    ratio: float
    constant: Tensor
    each: Tensor
    stretched: bool

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, LlamaCpp):
            return super().tables(positions)
        n, pairs = len(positions) // RUNS, len(self.each)
        assert bool((positions.view(RUNS, n) == positions[:n]).all())
        with _disable_current_modes():
            error = torch.arange(pairs) * self.ratio * mode.noise(RUNS, 1, 1) + self.constant * mode.noise(
                RUNS, 1, pairs
            )
            error = (error + self.each * mode.noise(RUNS, n, pairs)).flatten(0, 1).unsqueeze(1)
            inverse = self.inverse_frequencies.double() * (1 + error)
            magnitude = 1 + MAGNITUDE * self.stretched * mode.noise(RUNS, 1).expand(RUNS, n).reshape(-1, 1, 1)
        cos, sin = Rope(self.n_rotary, inverse, self.magnitude).tables(positions)
        with _disable_current_modes():
            return cos * magnitude, sin * magnitude


def _rope(rotary: Rotary, device: torch.device, factors: Tensor | None = None) -> Rope:
    """:func:`daemons.ops.basic.rope` with the errors of llama.cpp's angles, and of our frequencies at rest."""
    found = rope(rotary, device, factors)
    pair, per_pair = torch.arange(rotary.n // 2, dtype=torch.float64), 2 * math.log(rotary.theta) / rotary.n
    constant = UNIT * (pair * per_pair + 3)
    each = UNIT * pair
    if factors is not None:
        constant, each = constant + UNIT, each + UNIT
    if rotary.yarn is not None:  # both interpolate: 4u, and the ramp between is 2u off
        plain, stretched = plain_rope(rotary.n, rotary.theta, device).inverse_frequencies, found.inverse_frequencies
        ramp = (stretched < plain) & (stretched > plain / rotary.yarn.factor * (1 + 8 * UNIT))
        constant = constant + 4 * UNIT * (2 + ramp * (plain / stretched))
    return LlamaCppRope(
        found.n_rotary,
        found.inverse_frequencies,
        found.magnitude,
        ratio=ULP + UNIT * per_pair,
        constant=constant,
        each=each,
        stretched=rotary.yarn is not None,
    )


def _token_by_token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, Tensor], offset: int
) -> tuple[Tensor, Tensor]:
    """:func:`daemons.ops.delta_rule.chunked` as ggml_gated_delta_net computes it."""
    qk, (g, beta) = torch.stack((q, k), dim=2), gates
    decay, tokens = g.exp(), range(q.shape[1])
    rows = [step(state, *(x[:, t : t + 1] for x in (qk, v, decay, beta))) for t in tokens]
    return torch.cat(rows, dim=1), state


@contextmanager
def _as_llama_cpp() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(blocks, "chunked", _token_by_token))
        stack.enter_context(mock.patch.object(blocks, "rope", _rope))
        yield


def bound_between(spec: ModelSpec, ids: Sequence[int]) -> Bound:
    """Of logits [T, V], ours beside llama.cpp's, both in float32.  Raises UnclearChoiceError."""
    ours = bounds(spec, ids).logits
    with _as_llama_cpp():
        theirs = bounds(spec, ids, perturbed=LlamaCpp(seed=1)).logits
    return Bound(ours.exact, (ours.allowed + theirs.allowed) / 2)  # each alone is of two runs of its kind
