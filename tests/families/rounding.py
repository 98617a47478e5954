"""What a model's float32 path gives in exact arithmetic, and how far float32 may take it from there.

The numbers that rest in memory are those of the float32 path; only what is computed from them is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.models import shard
from daemons.models.stage import LoadedStage
from daemons.ops.paged import DensePages
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Q8_GROUP, Dtype
from tests.families.pipeline import Pipeline, load_stages
from tests.numerics import BFLOAT16, FLOAT16, RUNS, Bound, Exact, Narrow


class Bounds(NamedTuple):
    """Of logits [T, V], and of hidden states [L + 1, T, E] behind the embedding and behind every layer."""

    logits: Bound
    hidden: Bound

    def assert_logits(self, found: Tensor, wanted: Tensor, rows: slice = slice(None)) -> None:
        """``found``: the ``rows`` of logits that two float32 runs agree on; ``wanted``: logits of all."""
        worst = Bound(*(x[rows] for x in self.logits)).worst(found, wanted[rows])
        assert worst <= 1.0, f"logits are {worst:.2f} times as far apart as rounding explains"

    def assert_layers(self, found: Sequence[Tensor], wanted: Tensor) -> None:
        """The same for all hidden states."""
        for i, (rows, golden, *bound) in enumerate(zip(found, wanted, *self.hidden, strict=True)):
            where, worst = f"layer {i - 1}" if i else "the embedding", Bound(*bound).worst(rows, golden)
            assert worst <= 1.0, f"the first difference is behind {where}: {worst:.2f} times what rounding explains"


class UnclearChoiceError(AssertionError):
    """Which experts are chosen hangs on rounding, so there is no bound: take other tokens."""


def load_exact(load: Callable[[], list[LoadedStage]]) -> list[LoadedStage]:
    """Stages whose pools are float64, to run within :class:`Exact`."""

    def pools(*args: Any, **more: Any) -> object:
        with Exact():
            return made(*args, **more)

    made = shard.Pools
    with mock.patch.object(shard, "Pools", pools):
        stages = load()
    for stage in stages:
        stage.max_step_tokens *= RUNS
    return stages


def bounds(
    spec: ModelSpec,
    ids: Sequence[int],
    load: Callable[[], list[LoadedStage]] | None = None,
    perturbed: Exact | None = None,
) -> Bounds:
    """Of one step that runs all of ``ids``.  ``perturbed``: with which roundings (None: those of our float32 path).
    Raises UnclearChoiceError.
    """
    stages = load_exact(load or (lambda: load_stages(spec)))

    def run(mode: Exact, n: int) -> tuple[Tensor, Tensor]:
        """All results of n sequences of the same tokens, [n, T, V] and [L + 1, n, T, E]."""
        with mode:
            pipeline = Pipeline(spec, stages)
            for i in range(n):
                pipeline.open(i)
            logits = pipeline.run(*((i, ids) for i in range(n)), want_hidden=True)
            return logits.unflatten(0, (n, -1)), torch.stack(pipeline.hidden).unflatten(1, (n, -1))

    exact, perturbed = Exact(), perturbed or Exact(seed=0)
    logits, hidden = run(exact, 1)
    others, others_hidden = run(perturbed, RUNS)  # every row is perturbed by itself
    for one, many in zip(exact.choices, perturbed.choices, strict=True):
        if not torch.equal(one.repeat(RUNS, 1), many):
            raise UnclearChoiceError(f"{spec.name}: which experts are chosen hangs on rounding; take other tokens")
    return Bounds(Bound.of(logits[0], others), Bound.of(hidden[:, 0], others_hidden.transpose(0, 1)))


class Formats(NamedTuple):
    """Of a run that is not float32: ``dtype`` of weights and results, ``kv`` of pages, ``packed`` weights."""

    dtype: Dtype = Dtype.FLOAT32
    kv: Dtype = Dtype.FLOAT32
    packed: bool = False


MIDDLE_RUNS = 3
"""Perturbed runs of which the worst counts: the middle row hardly differs between them."""
MIDDLE_SAFETY = 1.25
"""As the worst of few runs is a guess at the worst."""
UNITS = {Dtype.BFLOAT16: BFLOAT16, Dtype.FLOAT16: FLOAT16}


def middle_error(found: Tensor, wanted: Tensor) -> float:
    """Relative error of the middle one of all rows: a token whose last choice of expert hangs on the rounding may
    change as a whole.
    """
    return float(((found.double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)).median())


def explained(spec: ModelSpec, ids: Sequence[int], exact: Tensor, formats: Formats) -> float:
    """The largest :func:`middle_error` beside ``exact`` that rounding to ``formats`` explains."""
    return MIDDLE_SAFETY * max(middle_error(x, exact) for x in narrowed(spec, ids, formats))


def narrowed(spec: ModelSpec, ids: Sequence[int], formats: Formats) -> Tensor:
    """Logits [runs, T, V] of the float32 path when weights, results and pages are perturbed by as much as rounding them
    to ``formats`` does.  The narrow path itself is not asked.
    """
    narrow = None if formats.dtype is Dtype.FLOAT32 else Narrow(UNITS[formats.dtype], formats.packed)
    stages, write = load_exact(lambda: load_stages(spec)), DensePages.write

    def rounded(pages: DensePages, slots: Tensor, rows: Tensor) -> None:
        if formats.kv is Dtype.Q8_0:  # half a step, and the scale is float16
            groups = F.pad(rows, (0, -rows.shape[-1] % Q8_GROUP)).unflatten(-1, (-1, Q8_GROUP)).abs()
            size = (groups.amax(dim=-1, keepdim=True) * (0.5 / 127 + FLOAT16)).expand_as(groups)
            size = size.flatten(-2)[..., : rows.shape[-1]]
        else:
            size = rows.abs() * UNITS.get(formats.kv, 0.0)
        write(pages, slots, rows + size * (2 * torch.rand(rows.shape, generator=noise) - 1))

    noise = torch.Generator().manual_seed(0)
    with mock.patch.object(DensePages, "write", rounded), Exact(0, narrow):
        pipeline = Pipeline(spec, stages)
        for i in range(MIDDLE_RUNS):
            pipeline.open(i)
        return pipeline.run(*((i, ids) for i in range(MIDDLE_RUNS))).unflatten(0, (MIDDLE_RUNS, -1))


def assert_same_tokens(spec: ModelSpec, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> None:
    """Greedy continuations of ``prompt`` are equal, but for a token whose rivals rounding may swap: what follows it is
    not compared.
    """
    assert len(found) == len(wanted)
    parted = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
    if parted is None:
        return
    exact = bounds(spec, [*prompt, *wanted[:parted]]).logits
    row = exact.exact[-1]
    behind = float(row.max() - torch.minimum(row[found[parted]], row[wanted[parted]]))
    allowed = float(exact.allowed[-1])
    assert behind <= allowed, (
        f"token {parted} is {found[parted]} instead of {wanted[parted]}: {behind:.1e} behind the best,"
        f" rounding explains {allowed:.1e}"
    )
