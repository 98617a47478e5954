"""Rotary position embedding (RoPE): base, scaling and YaRN parameters from the metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lucevisor.model.spec import Keys


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN context extension by ``factor`` of a model trained on ``original_context`` positions.

    Pairs that rotate more than ``beta_fast`` times within the original context keep their frequency, those that rotate
    less than ``beta_slow`` times are slowed by ``factor``, with a ramp between.  Cos and sin are multiplied by
    ``attention_factor`` (None: 0.1 ln(factor) + 1) and by ``extra`` (``rope.scaling.attn_factor``).  The ramp begins
    and ends at a pair, unless ``whole_pairs`` is false.
    """

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    extra: float
    whole_pairs: bool = True


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE over the first ``n`` dims of a head, with base ``theta``; positions are divided by ``linear``.

    ``sections`` (M-RoPE): of the pairs, how many turn by the time, the row and the column of a token of an image; pair
    j by axis j mod 3 while that has pairs left, the others by the time.  Empty: there is one position.
    """

    n: int
    theta: float
    yarn: Yarn | None = None
    linear: float = 1.0
    sections: tuple[int, ...] = ()

    def axis(self, pair: int) -> int:
        """Return which position a pair turns by: 0 time, 1 row, 2 column."""
        axis = pair % 3
        return axis if self.sections and pair < 3 * self.sections[axis] else 0


def plain_rotary(keys: Keys, head_dim: int, theta: float, suffix: str = "") -> Rotary:
    """Read ``rope.dimension_count`` and ``rope.freq_base``, with a ``suffix`` as in "_swa"."""
    n = keys.even("rope.dimension_count" + suffix, head_dim, high=head_dim)
    return Rotary(n, keys.number("rope.freq_base" + suffix, theta, above=0.0))


def read_rotary(keys: Keys, head_dim: int, options: Mapping[str, str]) -> Rotary:
    """Read ``rope.dimension_count``, ``rope.freq_base`` and ``rope.scaling.*``.  Raises GgufError."""
    plain = plain_rotary(keys, head_dim, 10000.0)
    return replace(plain, yarn=read_yarn(keys, options), linear=read_linear(keys))


def scaling_type(keys: Keys) -> str:
    """The kind of RoPE scaling; files that give a factor only mean linear."""
    by_factor = "linear" if keys.has("rope.scaling.factor") or keys.has("rope.scale_linear") else "none"
    kind = keys.text("rope.scaling.type", by_factor)
    if kind not in ("none", "linear", "yarn"):
        raise keys.error("rope.scaling.type", f"is {kind!r}, known are 'linear', 'yarn' and 'none'")
    return kind


def read_linear(keys: Keys) -> float:
    if scaling_type(keys) != "linear":
        return 1.0
    key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    return keys.number(key, 0.0) or 1.0  # 0 stands for no scaling


def read_yarn(keys: Keys, options: Mapping[str, str]) -> Yarn | None:
    """YaRN's parameters; None when positions are not scaled.

    Option ``yarn_attn_factor``: "default" computes the factor on cos and sin by the formula, as common servers do;
    "file" uses that in the file.  ``yarn_log_multiplier`` m divides the formula's value by 0.1 m ln(factor) + 1.
    """
    if scaling_type(keys) != "yarn":
        return None
    factor = keys.number("rope.scaling.factor", 1.0, above=0.0)
    attention, multiplier = None, keys.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0)
    if multiplier:
        logarithm = 0.1 * math.log(max(factor, 1.0))
        attention = (1.0 + logarithm) / (1.0 + multiplier * logarithm)
    if options.get("yarn_attn_factor", "default") == "file":
        attention = keys.number("rope.scaling.yarn_attn_factor", 0.0) or attention
    return Yarn(
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", keys.integer("context_length", 4096)),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, above=0.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, above=0.0),
        attention_factor=attention,
        extra=keys.number("rope.scaling.attn_factor", 1.0, above=0.0),
    )
