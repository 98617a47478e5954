"""What the owner of an engine sets, and the hooks through which it hears.

Invariant: hooks are called from inside the engine, so they must return at once and not call it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lucevisor.engine.journal import RowStore
from lucevisor.engine.pipeline import PipelineFailure, PipelineResult
from lucevisor.protocol.steps import Step

MAX_LOSSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """``max_queue``: requests that may wait.  ``hold_s``: how long the owner lets requests wait for a lost daemon
    before it ends them; 0: not at all.  ``max_losses``: losses in a row, without a token in between, that end a
    running request.  ``rows`` and ``journal_pages``: the memory of the journal; None: there is none,
    and all stages compute again what one has lost.  ``rate_window_s``: the span of ``tokens_per_s`` in statistics.
    ``blame`` names the first stage of a step whose rows are NaN or infinite.
    ``validate``: check all accounts whenever the engine is idle; raises AccountingError from there.
    ``mask_threads`` False: masks are made on the calling thread.

    ``on_step`` sees every finished step (for histograms), ``on_pipeline_failed`` why the pipeline failed and
    ``on_drafter_lost`` why the drafter was (for supervision; the engine has detached it by then).
    """

    max_queue: int
    hold_s: float = 0.0
    max_losses: int = MAX_LOSSES
    rows: RowStore | None = None
    journal_pages: int = 0
    rate_window_s: float = 10.0
    blame: Callable[[Step], str] = lambda _: "the output stage"
    validate: bool = False
    mask_threads: bool = True
    clock: Callable[[], float] = time.monotonic
    on_step: Callable[[PipelineResult], None] = lambda _: None
    on_pipeline_failed: Callable[[PipelineFailure], None] = lambda _: None
    on_drafter_lost: Callable[[PipelineFailure], None] = lambda _: None
