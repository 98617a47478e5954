"""Before the first request: steps of every kind that kernels are compiled for, so that no request waits for a compiler.

A kernel is compiled when it is first launched, for a second or more, and kept on disk for later starts.  The steps go
through a stage as real ones do, on pages and a state that nobody uses yet, and leave no sequence behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from daemons import device as devices
from daemons.models.stage import LoadedStage
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.steps import CloseSequence, OpenSequence, Operation, Sampling, SetPages, Slice, Step, ZeroState

RUNS = (1, 2, 16, 32, 64, 160, 512)
"""Tokens of the steps: the tiles of few rows, and many rows with more than one chunk of a recurrent layer.  The longest
step there can be is run too.
"""
FAR = 512
"""A position from which attention over few tokens is split."""


def warm_up(stage: LoadedStage, report: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Run them all, and wait for them.  ``report`` hears how many of them are done."""
    sizes = {space: units for space, units in stage.sequences.units.items() if units}
    pages = min((n for space, n in sizes.items() if space is not Space.RECURRENT), default=FAR // PAGE_TOKENS + 4)
    slices = list(_slices(pages * PAGE_TOKENS, stage.max_step_tokens))
    for number, (start, n) in enumerate(slices):
        report(number, len(slices))  # more often than a load may be silent, however slow the compilers are
        table = list(range((start + n - 1) // PAGE_TOKENS + 1))
        states: list[Operation] = [ZeroState(0)] if Space.RECURRENT in sizes else []
        tables = [SetPages(0, space, 0, table) for space in sizes if space is not Space.RECURRENT]
        stage.apply([*states, OpenSequence(0, 0, Sampling()), *tables])
        rows = None
        if not stage.embedding:
            rows = torch.zeros(n, stage.spec.boundary_width, dtype=stage.dtype, device=stage.first_device)
        out = stage.forward(Step(number, 0, [], [Slice(0, start, [0] * n, sample=True)]), rows)
        if stage.output:
            stage.logits(out.rows, [n - 1])
        stage.apply([CloseSequence(0)])
    stage.reset()
    for shard in stage.shards:
        devices.synchronize(shard.device)


def _slices(room: int, longest: int) -> Iterator[tuple[int, int]]:
    """Start and length of every slice that fits ``room`` positions and a step of ``longest`` tokens."""
    for n in sorted({*RUNS, longest}):
        for start in (0, FAR):
            if n <= longest and start + n <= room:
                yield start, n
