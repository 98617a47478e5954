"""Warm-up: run every kind of step that compiles kernels, and capture the graphs that are used first: those of verify
slices and drafts, and of the chunks that begin a prompt.

A kernel compiles for a second or more, and is cached on disk for later starts: before the steps run, all kernels
compile at once, in a run in which none is launched (ops/compile_only.py).  A graph takes tens of milliseconds, which a
client would wait for whenever the width changes.  A cpu compiles nothing here, and records steps of a small model
alone: in 0.01 s each, as long as several of them take.  The steps run through a stage like real ones, on pages and
states that are still free, and leave no sequence open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from daemons import device as devices
from daemons.draft.stage import DraftStage
from daemons.graphs import CAPTURE_AT, CAPTURED, MAX_GRAPHS
from daemons.heartbeat import Field, Reporter, progress_of
from daemons.kv.sequences import Sequences
from daemons.kv.slice_group import PADDED_ROWS
from daemons.models.stage import LoadedStage
from daemons.ops.compile_only import compiling
from daemons.ops.operations import MAX_DECODE_TOKENS
from daemons.ops.page_scores import QUERIES
from daemons.sampling import Sampler
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.model.workspace import GRAPH_LENGTH
from lucevisor.protocol.loading import PoolSizes, StagePlan
from lucevisor.protocol.steps import (
    CloseSequence,
    OpenSequence,
    Operation,
    PageOut,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    ZeroState,
)

STEP_TOKENS = (1, 2, 16, 32, 64, 160, 512)
"""Tokens of the steps: every GEMV tile, and GEMMs with more than one chunk of a recurrent layer.  The longest possible
step runs too.
"""
DRAFTING = (2, 3, 4, 8, 16)
"""Sequences of a step that all draft, at least: whatever multiplies their rows has run once.  With the most drafts of a
block of 8 those are 16, 24, 32, 64 and 128.
"""
VERIFYING = (2, 3, 4)
"""Tokens of each of their slices when they verify: by the most of these sequences also captured, but for the last.  So
are their plain decodes, and as many drafts behind each as tokens in it."""
SPLIT_START = 512
"""A position from which decode attention is split."""
GRAPH_ENDS = (512, 1024, 256, 2048, 128)
"""Where the steps end that are captured: one for each bound of the attended length, the commonest first.  Graphs of
longer contexts are captured when they come to be used.
"""
WARM_GRAPHS = MAX_GRAPHS - 24
"""Graphs of verify slices captured at load, so that those of several sequences find room."""
GRAPH_SECONDS = 2.0
"""Capturing ends after so long, whatever is left; after a third of it verify slices of one sequence leave the rest to
those of several, and after two thirds to chunks.
"""
RECORD_SECONDS = 0.5
"""Recording on a cpu ends after so long, for verify slices and for drafts each."""

Report = Callable[[int, int], None]
"""(steps done, of how many)."""


class Log(Protocol):
    """See :meth:`daemons.heartbeat.Reporter.log`, with the level."""

    def __call__(self, event: str, **fields: Field) -> None: ...


class WarmStep(NamedTuple):
    """A slice of ``n`` tokens at ``start``, of which ``n_drafts`` are verified, and ``num_draft_tokens`` drafts
    behind it.  ``ranks``: it scores a page on the device and one in host memory.  ``sequences``: how many have such a
    slice.
    """

    start: int
    n: int
    n_drafts: int = 0
    num_draft_tokens: int = 0
    ranks: bool = False
    sequences: int = 1


def warm_up_all(stages: Sequence[tuple[StagePlan, LoadedStage]], draft: DraftStage | None, reporter: Reporter) -> None:
    """Compile the kernels of the stages and of the draft stage, and capture graphs, where they have any."""
    for plan, stage in stages:
        compiles, recorded = stage.device.type != "cpu", stage.kernels.get("cpu decodes", CAPTURED) == CAPTURED
        runs = any(stage.graphs) or stage.spec.pooling.bidirectional
        if runs and (compiles or (recorded and stage.max_drafts)):
            started, device, number = time.monotonic(), plan.shards[0].device, plan.stage
            log = partial(reporter.log, "debug", stage=number)
            waited_s = sum(shard.selector.waited_s for shard in stage.shards)
            log("the load waited for CUDA C++ kernels", seconds=round(waited_s, 2))
            warm_up(stage, progress_of(reporter.progress, number, device, "warm up"), log, compiles=compiles)
            what = "kernels are ready" if compiles else "verify slices are recorded"
            reporter.log(
                "info" if compiles else "debug", what, stage=number, seconds=round(time.monotonic() - started, 2)
            )
    if draft is not None and draft.graphs is not None:
        report = progress_of(reporter.progress, draft.plan.stage, draft.plan.device, "warm up")
        log = partial(reporter.log, "debug", stage=draft.plan.stage)
        warm_up_draft(draft, report, log, compiles=draft.device.type != "cpu")


def largest_step(stage: LoadedStage) -> WarmStep | None:
    """Return a step of as many tokens as any, at the end of the longest sequence; None if that is not known."""
    n = min(stage.max_step_tokens, stage.max_attended)
    return WarmStep(stage.max_attended - n, n) if n and not stage.spec.pooling.bidirectional else None


@torch.inference_mode()
def sample_many(stage: LoadedStage, rows: Tensor) -> None:
    """Draw from as many rows as a step samples at a time, with all that takes memory."""
    n = min(rows.shape[0], stage.max_sampled_rows, stage.sequences.max_sequences * (1 + stage.max_drafts))
    sampler = Sampler(stage.spec.vocabulary, stage.device)
    sampler.open(0, SamplingParams(temperature=1.0, top_p=0.99, n_top_logprobs=1), [])
    drafts = Slice(0, 0, [0] * n, sample=True, n_drafts=n - 1)
    sampler.sample([drafts], stage.logits(rows, range(rows.shape[0] - n, rows.shape[0])).nan_to_num_())


def warm_up(
    stage: LoadedStage,
    report: Report = lambda done, total: None,
    log: Log = lambda event, **fields: None,
    *,
    compiles: bool = True,
) -> None:
    """Run all steps and wait for them.  ``compiles``: else those of verify slices alone, to capture them."""
    sizes = stage.sequences.units
    pages = min(
        (n for kv_group, n in sizes.items() if n and kv_group is not KvGroup.RECURRENT),
        default=SPLIT_START // PAGE_TOKENS + 4,
    )
    pools = stage.sequences.sizes
    n_states = 1 + pools.draft_states if pools.device_states else stage.max_step_tokens
    n_positions = pages * PAGE_TOKENS
    if stage.spec.pooling.bidirectional:  # beyond the context there may be no row of a table of positions
        n_positions = min(n_positions, stage.spec.context_tokens)
    steps = [WarmStep(start, n) for start, n in _slices(n_positions, stage.max_step_tokens)]
    if stage.ranks_pages and sizes[KvGroup.FULL] > 2:
        steps += [WarmStep(2 * PAGE_TOKENS, n, ranks=True) for n in (1, QUERIES) if n <= stage.max_step_tokens]
    most = min(1 + stage.max_drafts, n_states, MAX_DECODE_TOKENS, stage.max_step_tokens)
    verifies = [WarmStep(0, n, n - 1) for n in range(1, most + 1)] if stage.max_drafts else []
    steps += verifies[1:2]  # states are made of updates, also where nothing is captured
    if stage.max_drafts < stage.max_lookup < min(n_states, stage.max_step_tokens):
        verifies.append(WarmStep(0, 1 + stage.max_lookup, stage.max_lookup))
    several = _several(stage, most) if stage.max_drafts else []
    steps += several
    largest = largest_step(stage) if compiles else None
    steps[:0] = [] if largest is None else [largest]  # first: the others reuse its memory

    def run(number: int, one: WarmStep) -> None:
        stage.apply(_opening(stage.sequences, one.start + one.n, one.sequences))
        rows, n_rows = None, one.sequences * one.n
        if not stage.embedding:
            rows = torch.zeros(n_rows, stage.spec.boundary_width, dtype=stage.dtype, device=stage.first_device)
        slices = [
            Slice(i, one.start, [0] * one.n, sample=True, n_drafts=one.n_drafts, states=_states(pools, one, i))
            for i in range(one.sequences)
        ]
        if one.ranks:
            stage.apply([PageOut(0, [0], [sizes[KvGroup.FULL]])])
        out = stage.forward(Step(number, 0, [], slices, rank_pages=[0] if one.ranks else []), rows)
        if one is largest and stage.output and stage.spec.pooling.generates:
            sample_many(stage, out.rows)
        elif stage.output and stage.spec.pooling.generates:
            stage.logits(out.rows, range(0 if one.sequences > 1 else max(0, n_rows - MAX_DECODE_TOKENS), n_rows))
        stage.apply([CloseSequence(i) for i in range(one.sequences)])

    most = max((graphs.chunk_rows for graphs in stage.graphs if graphs is not None), default=0)
    # longest first: the others find memory in the pool
    chunks = [WarmStep(0, n) for n in reversed(PADDED_ROWS) if n <= min(most, pages * PAGE_TOKENS)]
    if chunks and min(pages * PAGE_TOKENS, stage.max_attended) >= GRAPH_LENGTH:
        chunks.insert(0, WarmStep(GRAPH_LENGTH - chunks[0].n, chunks[0].n))  # no graph takes more memory
    if compiles:
        of_max_batch = [one for one in several if one.sequences == several[-1].sequences][: len(VERIFYING) - 1]
        of_max_batch[:0] = [WarmStep(0, 1, sequences=of_max_batch[0].sequences)] if of_max_batch else []
        captured = [_captured(verifies, pages * PAGE_TOKENS), _captured(of_max_batch, pages * PAGE_TOKENS), chunks]
        with stage.shortened():
            _compile_all([one for one in steps if one is not largest], run, report, log)
        stage.reset()
        run_all_sizes = _warning_if_full(stage, largest, run)
        _run_all(steps, captured, stage.device, run_all_sizes, report, stage.shortened())
    else:  # graphs of a cpu are for any length
        _run_all([], [verifies], stage.device, run, report, seconds=RECORD_SECONDS)
    stage.reset()
    for shard in stage.shards:
        devices.synchronize(shard.device)


def _warning_if_full(
    stage: LoadedStage, largest: WarmStep | None, run: Callable[[int, WarmStep], None]
) -> Callable[[int, WarmStep], None]:
    """Return ``run`` that warns if there is too little memory for the largest step."""

    def run_or_warn(number: int, one: WarmStep) -> None:
        try:
            run(number, one)
        except torch.OutOfMemoryError as error:
            if one is not largest:
                raise
            stage.reset()
            why = str(error).partition(". GPU")[0]
        else:
            return
        stage.warn(
            f"a step of {stage.max_step_tokens} tokens at position {stage.max_attended} does not fit beside the pages, "
            f"and requests of that length will fail: {why}; lower engine.pages, engine.max_context or "
            f"engine.prefill_chunk"
        )
        for shard in stage.shards:  # the frames that held its tensors are gone
            devices.release_memory(shard.device)

    return run_or_warn


def _several(stage: LoadedStage, most: int) -> list[WarmStep]:
    """Verify slices of several sequences, up to ``most`` tokens each, as far as there are states for their drafts."""
    pools = stage.sequences.sizes
    n_states = pools.draft_states if pools.device_states else stage.max_step_tokens
    return [
        WarmStep(0, n, n - 1, sequences=m)
        for m in DRAFTING
        for n in VERIFYING
        if m <= _most_sequences(stage.sequences) and n <= most
        if m * n <= stage.max_step_tokens and m * (n - 1) <= n_states
    ]


def _states(pools: PoolSizes, one: WarmStep, i: int) -> list[int]:
    """The states of the i-th slice of a step: the live one, and one for each draft."""
    if not one.n_drafts or not pools.device_states:
        return []
    first = pools.device_states + i * one.n_drafts
    return [i, *range(first, first + one.n_drafts)]


def warm_up_draft(
    stage: DraftStage,
    report: Report = lambda done, total: None,
    log: Log = lambda event, **fields: None,
    *,
    compiles: bool = True,
) -> None:
    """Warm a draft stage up: extend contexts by every kind of step and make drafts of all widths."""
    most = stage.spec.max_drafts
    n_positions = stage.sequences.units[KvGroup.FULL] * PAGE_TOKENS - most - 1
    lengths = list(_slices(n_positions, stage.max_step_tokens))
    steps = [WarmStep(start, n) for start, n in lengths]
    ahead = sorted({*range(1, stage.max_drafts + 1), stage.spec.default_drafts, most})
    steps += [WarmStep(start, 1, 0, k) for start, n in lengths if n == 1 for k in ahead]
    used = range(1, 1 + stage.max_drafts)
    verifies = [WarmStep(0, 1 + k, 0, k) for k in used] + [WarmStep(0, 1, 0, stage.max_drafts)] * bool(used)
    several = [n for n in DRAFTING if used and n <= _most_sequences(stage.sequences)]
    of_max_batch = [WarmStep(0, n, 0, n, sequences=several[-1]) for n in used if n < VERIFYING[-1]] if several else []
    steps += [WarmStep(0, 1, 0, stage.max_drafts, sequences=n) for n in several]
    width = stage.spec.model.hidden_size

    def run(number: int, one: WarmStep) -> None:
        stage.apply(_opening(stage.sequences, one.start + one.n + most + 1, one.sequences))
        captures = [torch.zeros(one.sequences * one.n, len(source.layers) * width) for source in stage.plan.sources]
        slices = [
            Slice(
                i, one.start, [0] * one.n, sample=True, num_draft_tokens=one.num_draft_tokens
            )  # all on the same pages
            for i in range(one.sequences)
        ]
        stage.run(Step(number, 0, [], slices), captures, [[0]] * one.sequences)
        stage.apply([CloseSequence(i) for i in range(one.sequences)])

    if compiles:
        # Drafts lie behind a slice: within the same bound of the length.
        captured = [_captured(alike, n_positions, room=most + 1) for alike in (verifies, of_max_batch)]
        _compile_all(steps, run, report, log)
        stage.reset()
        _run_all(steps, captured, stage.device, run, report)
    else:
        _run_all([], [verifies], stage.device, run, report, seconds=RECORD_SECONDS)
    stage.reset()
    devices.synchronize(stage.device)


def _compile_all(steps: Sequence[WarmStep], run: Callable[[int, WarmStep], None], report: Report, log: Log) -> None:
    """Compile the Triton kernels of ``steps`` in threads; those of the first one alone where they are cached.

    Whatever fails is left to the run of the steps, which says why.
    """
    began, kernels, problem = time.monotonic(), list[float](), ""
    try:
        with compiling() as compilation:
            kernels = compilation.seconds
            for number, one in enumerate(steps if compilation.mode is not None else []):
                report(0, len(steps))
                run(number, one)
                if not number and compilation.are_cached():
                    break
            compilation.wait(partial(report, 0, len(steps)))
    except Exception as error:  # any: nothing that runs needs it
        problem = f"{type(error).__name__}: {error}"
    seconds, one_by_one = round(time.monotonic() - began, 2), round(sum(kernels), 2)
    what = "Triton kernels compiled together"
    log(what, kernels=len(kernels), seconds=seconds, one_by_one=one_by_one, problem=problem)


def _run_all(
    steps: Sequence[WarmStep],
    captured: Sequence[Sequence[WarmStep]],
    device: torch.device,
    run: Callable[[int, WarmStep], None],
    report: Report,
    shortened: AbstractContextManager[None] | None = None,
    seconds: float | None = None,
) -> None:
    """Run ``steps`` once, within ``shortened``, and as many of ``captured`` as ``seconds`` (None: GRAPH_SECONDS) and
    memory allow until their graphs are captured: each list has an equal share of the time, and what those before it
    left.

    The report before each is often enough for the load's deadline, however slow the compiler is.
    """
    captured = [one for one in captured if one]
    total, done = len(steps) + sum(map(len, captured)), len(steps)
    with shortened or nullcontext():
        for number, one in enumerate(steps):
            report(number, total)
            run(number, one)
        devices.synchronize(device)
    devices.empty_cache(device)
    started, seconds = time.monotonic(), GRAPH_SECONDS if seconds is None else seconds
    for share, alike in enumerate(captured, 1):
        ends_at = started + seconds * share / len(captured)
        for number, one in enumerate(alike, done):
            if time.monotonic() > ends_at or devices.memory_free(device) < (1 << 29):
                break
            report(number, total)
            for _ in range(CAPTURE_AT):
                run(number, one)
            devices.synchronize(device)
        done += len(alike)


def _most_sequences(sequences: Sequences) -> int:
    """Return how many sequences may be open at once, each with a recurrent state if the model has any."""
    pools = sequences.sizes
    if not sequences.units[KvGroup.RECURRENT]:
        return sequences.max_sequences
    if pools.state_pages:  # a page is left beside the states
        return min(sequences.max_sequences, pools.device_states, (pools.full_pages - 1) // pools.state_pages)
    return min(sequences.max_sequences, pools.device_states)


def _opening(sequences: Sequences, n_tokens: int, n: int = 1) -> list[Operation]:
    """Operations that open ``n`` sequences, with the same pages for ``n_tokens`` and an empty state each."""
    kv_groups = [kv_group for kv_group, size in sequences.units.items() if size]
    states = [ZeroState(i) for i in range(n)] if KvGroup.RECURRENT in kv_groups else []
    table, pools = range((n_tokens - 1) // PAGE_TOKENS + 1), sequences.sizes
    first = n * pools.state_pages  # behind the memory of the states
    tables: list[Operation] = [
        SetPages(i, kv_group, 0, _pages(sequences.units[kv_group], first * (kv_group is KvGroup.FULL), table))
        for i in range(n)
        for kv_group in kv_groups
        if kv_group is not KvGroup.RECURRENT
    ]
    return [*states, *(OpenSequence(i, i if states else 0, SamplingParams()) for i in range(n)), *tables]


def _pages(n_pages: int, first: int, table: range) -> list[int]:
    """Return a page for each entry of a table, from ``first`` on, and again from there where a pool has fewer."""
    return [first + at % (n_pages - first) for at in table]


def _captured(steps: Sequence[WarmStep], n_positions: int, room: int = 0) -> list[WarmStep]:
    """Return the steps again for each bound of the length, ending ``room`` before it, if they fit ``n_positions``."""
    ends = [end - room for end in GRAPH_ENDS if end <= n_positions]
    return [one._replace(start=end - one.n) for end in ends for one in steps][:WARM_GRAPHS]


def _slices(n_positions: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Start and length of every slice that fits ``n_positions`` and a step of ``max_tokens``."""
    for n in sorted({*STEP_TOKENS, max_tokens}):
        for start in (0, SPLIT_START):
            if n <= max_tokens and start + n <= n_positions:
                yield start, n
