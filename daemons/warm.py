"""Warm-up: run every kind of step that compiles kernels, so that no request waits for a compiler.

A kernel compiles at its first launch, for a second or more, and is cached on disk for later starts.  The steps run
through a stage like real ones, on pages and a state that are still free, and leave no sequence open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from daemons import device as devices
from daemons.draft.stage import DraftStage
from daemons.models.stage import LoadedStage
from daemons.ops.operations import MAX_DECODE_TOKENS
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.steps import CloseSequence, OpenSequence, Operation, Sampling, SetPages, Slice, Step, ZeroState

STEP_TOKENS = (1, 2, 16, 32, 64, 160, 512)
"""Tokens of the steps: every GEMV tile, and GEMMs with more than one chunk of a recurrent layer.  The longest possible
step runs too.
"""
SPLIT_START = 512
"""A position from which decode attention is split."""


def warm_up(stage: LoadedStage, report: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Run all steps and wait for them.  ``report(done, total)`` is called before each."""
    sizes = {space: units for space, units in stage.sequences.units.items() if units}
    pages = min(
        (n for space, n in sizes.items() if space is not Space.RECURRENT), default=SPLIT_START // PAGE_TOKENS + 4
    )
    slices = list(_slices(pages * PAGE_TOKENS, stage.max_step_tokens))
    for number, (start, n) in enumerate(slices):
        report(number, len(slices))  # often enough for the load's deadline, however slow the compiler is
        table = list(range((start + n - 1) // PAGE_TOKENS + 1))
        states: list[Operation] = [ZeroState(0)] if Space.RECURRENT in sizes else []
        tables = [SetPages(0, space, 0, table) for space in sizes if space is not Space.RECURRENT]
        stage.apply([*states, OpenSequence(0, 0, Sampling()), *tables])
        rows = None
        if not stage.embedding:
            rows = torch.zeros(n, stage.spec.boundary_width, dtype=stage.dtype, device=stage.first_device)
        out = stage.forward(Step(number, 0, [], [Slice(0, start, [0] * n, sample=True)]), rows)
        if stage.output:
            stage.logits(out.rows, range(max(0, n - MAX_DECODE_TOKENS), n))  # a verify slice samples from several rows
        stage.apply([CloseSequence(0)])
    stage.reset()
    for shard in stage.shards:
        devices.synchronize(shard.device)


def warm_up_draft(stage: DraftStage, report: Callable[[int, int], None] = lambda done, total: None) -> None:
    """The same for a draft stage: it extends contexts by every kind of step and makes drafts of several lengths."""
    n_positions = stage.sequences.units[Space.FULL] * PAGE_TOKENS
    most = stage.spec.max_drafts
    ahead = sorted({1, 2, 3, 4, stage.spec.default_drafts, most})
    lengths = [(start, n) for start, n in _slices(n_positions - most - 1, stage.max_step_tokens)]
    steps = [(start, n, 0) for start, n in lengths] + [(start, 1, k) for start, n in lengths if n == 1 for k in ahead]
    width = stage.spec.model.hidden_size
    for number, (start, n, k) in enumerate(steps):
        report(number, len(steps))
        table = list(range((start + n + most) // PAGE_TOKENS + 1))
        state: list[Operation] = [ZeroState(0)] if stage.sequences.units[Space.RECURRENT] else []
        stage.apply([*state, OpenSequence(0, 0, Sampling()), SetPages(0, Space.FULL, 0, table)])
        captures = [torch.zeros(n, len(source.layers) * width) for source in stage.plan.sources]
        stage.run(Step(number, 0, [], [Slice(0, start, [0] * n, sample=True, n_ahead=k)]), captures, [[0]])
        stage.apply([CloseSequence(0)])
    stage.reset()
    devices.synchronize(stage.device)


def _slices(n_positions: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Start and length of every slice that fits ``n_positions`` and a step of ``max_tokens``."""
    for n in sorted({*STEP_TOKENS, max_tokens}):
        for start in (0, SPLIT_START):
            if n <= max_tokens and start + n <= n_positions:
                yield start, n
