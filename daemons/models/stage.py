"""One pipeline stage: the consecutive shards of a backend group, loaded once, then run step by step.

Invariants: steps run in the order given; no step synchronises with a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from daemons.device import launching, prepare, torch_device, torch_dtype
from daemons.errors import LoadError, StateError
from daemons.graphs import StepGraphs
from daemons.heartbeat import progress_of
from daemons.kv.batch import Batch, Group, Layout
from daemons.kv.sequences import Sequences
from daemons.kv.slice_group import SliceGroup
from daemons.models.replay import LayerwiseReplay
from daemons.models.shard import ShardConfig, ShardModel, ShardOutput, SharedOutput, check, stream_dtype
from daemons.ops.lora import LoraRows
from daemons.ops.operations import PageSums
from daemons.ops.page_scores import queries_by_head, scores_of
from daemons.ops.paged import PagedTensor, Pages
from daemons.ops.selection import KernelSelector
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup
from lucevisor.model.workspace import GRAPH_ROWS, SAMPLED_ROWS
from lucevisor.protocol.loading import DeviceUse, Load, StagePlan
from lucevisor.protocol.messages import Progress
from lucevisor.protocol.steps import OpenSequence, Operation, PageScores, SamplingParams, SetPages, Slice, Step


def rank_pages(batch: Batch, layout: Layout, page_sums: PageSums) -> dict[int, Tensor]:
    """Scores float32 [entries] of all whole pages before the slices that want them, by sequence.

    ``batch``: of a step of this shape, in whose groups the layers have left the queries of the step of ``layout``.
    """
    found: dict[int, Tensor] = {}
    for group, of in zip(batch.groups, layout.groups, strict=True):
        for b in of.ranked:
            if of.starts[b] >= PAGE_TOKENS and group.queries:
                found[of.sequences[b].id] = _scores(group, of, b, page_sums)
    return found


def _scores(group: Group, of: SliceGroup, b: int, page_sums: PageSums) -> Tensor:
    """The sum over the layers for one slice."""
    sequence, table = of.sequences[b], of.sequences[b].pages[KvGroup.FULL]
    n_entries, device = of.starts[b] // PAGE_TOKENS, group.starts.device
    out = sorted(entry for entry in sequence.hosts if entry < n_entries)
    resident = sorted({*range(n_entries)}.difference(sequence.out))
    host_rows = [sequence.hosts[entry] for entry in out]
    on_host = torch.from_numpy(np.array([*table[: len(resident)], *host_rows, *resident, *out], dtype=np.int64))
    index = on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)
    pages, rows, order = index.split_with_sizes([len(resident), len(out), len(resident) + len(out)])
    total = torch.zeros(len(order), device=device)
    for keys, q, scale in group.queries:
        assert keys.sketches is not None
        if keys.sketches.missing:
            _complete_sketches(keys, host_rows)
        queries = queries_by_head(q[b], len(keys.sketches.kept.means), scale).contiguous()  # a view without groups
        sums = page_sums.of_keys(queries, keys, pages), page_sums.of_sketches(queries, keys.sketches.kept, rows)
        total += scores_of(torch.cat(sums, dim=-1), len(q[b]))
    return torch.zeros(n_entries, device=device).index_copy_(0, order, total)


def _complete_sketches(keys: PagedTensor, rows: list[int]) -> None:
    """Make the sketches of pages in host memory that were restored there, and not paged out."""
    assert keys.sketches is not None
    assert keys.host is not None
    missing = [row for row in rows if row in keys.sketches.missing]
    first = 0
    for [parts], index in keys.host.pages.chunks([keys.host], missing):
        k = keys.over(parts).read(Pages(index, len(index), 0, PAGE_TOKENS), torch.float32)
        at = torch.tensor(missing[first : first + len(index)], device=k.device)
        keys.sketches.keep(k, at)
        first += len(index)
    keys.sketches.missing.difference_update(missing)


@dataclass(slots=True)
class StageOutput:
    """``rows`` [T, boundary_width], at the output stage [T, E], in the load's dtype on the last shard's device.

    ``hidden``, if wanted: the residual stream [T, E] after the embedding and after each layer, on the same device.
    ``captures`` [T, n E]: that after each of the plan's captured layers; None without any.  Rows and captures are valid
    until the next step.
    """

    rows: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    captures: Tensor | None = None
    page_scores: list[PageScores] = field(default_factory=list)
    cold: bool = False


class LoadedStage:
    """A loaded stage; see :meth:`load`."""

    def __init__(self, spec: ModelSpec, plan: StagePlan, load: Load, shards: list[ShardModel]) -> None:
        self.spec, self.plan, self.shards = spec, plan, shards
        self.embedding, self.output = shards[0].embedding is not None, shards[-1].output is not None
        self.first_device, self.device = shards[0].device, shards[-1].device
        self.dtype = torch_dtype(load.dtype)
        self.max_step_tokens, self.max_drafts, self.max_lookup = load.max_step_tokens, load.max_drafts, load.max_lookup
        self.max_attended = load.max_attended
        self.max_sampled_rows = max(SAMPLED_ROWS, load.max_sequences)
        self.ranks_pages = load.rank_pages
        self.sequences = Sequences(
            [s.pools for s in shards],
            load.pools,
            load.max_sequences,
            attend_host=load.attend_host,
            in_place=all(s.selector.kernels and s.pools.pages_locked for s in shards),
            adapters=[one.name for one in spec.adapters],
        )
        self._lora: LoraRows | None = None  # of the last step's rows
        self.kernels: dict[str, str] = {}
        for shard in shards:
            self.kernels |= shard.selector.selected
        self.warnings = [w for shard in shards for w in shard.warnings]
        self.warn: Callable[[str], None] = self.warnings.append
        self._load = load
        self.graphs = self._new_graphs()
        for shard in shards:
            shard.pools.updates.launches.warn = lambda text: self.warn(text)
        if self.device.type == "cpu" and any(self.graphs):
            self.kernels["cpu decodes"] = self._decode_capture(load)

    def _new_graphs(self) -> list[StepGraphs[ShardOutput] | None]:
        if self.spec.pooling.bidirectional:  # it never decodes, and pad rows would be seen
            return [None for _ in self.shards]
        return [self._graphs_of(shard, self._load) if shard.selector.captures else None for shard in self.shards]

    def _graphs_of(self, shard: ShardModel, load: Load) -> StepGraphs[ShardOutput]:
        # of chunks: kernels leave pad rows out of states and of dense pages
        pads = shard.selector.kernels and load.kv_dtype is not Dtype.Q8_0 and not load.deterministic
        n = min(GRAPH_ROWS, load.max_step_tokens) if pads else 0
        most, shared = shard.max_async_tokens, SharedOutput(n)
        return StepGraphs(shard.device, shard.run, most, lambda text: self.warn(text), n, shared)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Run one layer of each kind alone, which compiles every kernel, with graphs that are dropped afterwards."""
        graphs, self.graphs = self.graphs, self._new_graphs()
        try:
            with ExitStack() as stack:
                for shard in self.shards:
                    stack.enter_context(shard.shortened())
                yield
        finally:
            self.graphs = graphs

    @torch.inference_mode()
    def _decode_capture(self, load: Load) -> str:
        """Return whether decodes are captured on a cpu, for the report of kernel selection."""
        sequences = Sequences([s.pools for s in self.shards], load.pools, 1)
        kv_groups = [kv_group for kv_group in self.spec.kv_groups() if kv_group is not KvGroup.RECURRENT]
        last = {KvGroup.FULL: load.pools.full_pages - 1, KvGroup.WINDOW: load.pools.window_pages - 1}  # beside state 0
        operations: list[Operation] = [OpenSequence(0, 0, SamplingParams())]
        operations += [SetPages(0, kv_group, 0, [last[kv_group]]) for kv_group in kv_groups]
        for operation in operations:
            sequences.apply(operation)
        sequences.flush()
        layout = Layout([Slice(0, 0, [0], False)], sequences, self.spec)
        rows = torch.empty(1, self.spec.boundary_width, dtype=self.dtype)
        tables = sequences.tables(self.device)
        answers = [graphs.capture_status(rows, layout, tables) for graphs in self.graphs if graphs is not None]
        return " + ".join(dict.fromkeys(answers))

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        spec: ModelSpec,
        plan: StagePlan,
        load: Load,
        backend: Backend,
        progress: Callable[[Progress], None],
        replay: LayerwiseReplay | None = None,
    ) -> LoadedStage:
        """Load the stage's shards onto their devices, in order, and run ``replay`` as the layers come.

        ``spec.files`` must be open.  Raises LoadError (file, tensor) or DeviceError (device, tensor, bytes).
        """
        prepare(backend, load.threads)
        _check_plan(plan)
        last = len(plan.shards) - 1
        configs = [
            ShardConfig(
                spec=spec,
                plan=shard,
                embedding=plan.embedding and i == 0,
                output=plan.output and i == last,
                backend=backend,
                dtype=load.dtype,
                kv_dtype=load.kv_dtype,
                pools=load.pools,
                captures=tuple(layer for layer in plan.captures if layer in shard.layers),
                rank_pages=load.rank_pages,
            )
            for i, shard in enumerate(plan.shards)
        ]
        dtype = torch_dtype(load.dtype)
        shards = []
        for config in configs:
            check(config)
        for config in configs:
            device = config.plan.device
            progress(Progress(plan.stage, device, 0, 0, "kernels"))  # the first load of a version compiles some
            selector = KernelSelector(torch_device(backend, device), dtype, batch_invariant=load.deterministic)
            report = progress_of(progress, plan.stage, device)
            progress(Progress(plan.stage, device, 0, 0, "pools"))
            if replay is None:
                shards.append(ShardModel(config, selector, report))
            else:
                with replay.loading(selector):
                    shards.append(ShardModel(config, selector, report, replay.layer_loaded))
        return cls(spec, plan, load, shards)

    def replayed(self, replay: LayerwiseReplay) -> bool:
        """Take over the sequences of a replay; return whether it was computed."""
        found = replay.finish(self.shards[0])
        if found is not None:
            self.sequences = found
        return found is not None

    @torch.inference_mode()
    def apply(self, operations: Sequence[Operation]) -> None:
        """Apply state operations in order.  Raises StateError at the first invalid one; earlier ones stay applied."""
        for operation in operations:
            self.sequences.apply(operation)

    @torch.inference_mode()
    def forward(
        self,
        step: Step,
        rows_in: Tensor | None,
        fill: Callable[[Tensor], None] | None = None,
        await_rows: Callable[[], None] = lambda: None,
        embeddings: Tensor | None = None,
    ) -> StageOutput:
        """Run the forward pass of the step's slices, after the step's operations were applied.

        ``rows_in`` [T, boundary_width], on any device, is read after ``await_rows``, which is called when all else is
        prepared; the embedding stage reads token ids instead, and ``embeddings`` [n, E] in host memory of the tokens of
        images.  ``fill`` as in Layout.  Raises StateError for slices that contradict the tables.
        """
        n, where = step.n_tokens, f"step {step.step_id}"
        if n == 0:
            rows = torch.empty(0, self.spec.boundary_width, dtype=self.dtype, device=self.device)
            return StageOutput(rows, [])
        if n > self.max_step_tokens:
            raise StateError(where, f"{n} tokens, this daemon was loaded for steps of up to {self.max_step_tokens}")
        h = self._checked(rows_in, n, where)
        self.sequences.commit_states(step.slices)
        self.sequences.flush()
        layout = Layout(step.slices, self.sequences, self.spec, ranked=step.rank_pages)
        layout.fill = fill or layout.fill
        if self.embedding:
            self._check_embeddings(embeddings, layout, where)
        hidden: list[Tensor] | None = [] if step.want_hidden else None
        captures: list[Tensor] = []
        scores: list[dict[int, Tensor]] = []
        cold, self._lora = False, None
        for shard, graphs in zip(self.shards, self.graphs, strict=True):
            device = shard.device
            tables = self.sequences.tables(device)
            if h is not None and h is not rows_in:
                h = stream_dtype(h, self.dtype, device)
            with launching(device):
                if layout.reads_in_place:
                    shard.pools.finish_page_outs()
                others = hidden is not None or layout.image_rows or (h is not None and h.dtype != self.dtype)
                if graphs is None or others:
                    batch = Batch(layout, tables, layout.on(device))
                    if shard.embedding is not None and embeddings is not None:
                        batch.embeddings = embeddings.to(device)
                    await_rows()
                    h = None if h is None else stream_dtype(h, self.dtype, device)
                    h, captured = shard.run(h, batch, hidden)
                    adapters = batch.lora
                    if layout.is_ranked:
                        scores.append(rank_pages(batch, layout, shard.page_sums))
                else:
                    out = graphs.run(h, layout, tables, await_rows)
                    cold, adapters = cold or graphs.cold, graphs.batch.lora
                    h, captured = out.rows, out.captures
                    if h.shape[0] > (n := layout.n_rows):  # pad rows
                        h, captured = h[:n], None if captured is None else captured[:n]
                    if layout.is_ranked:
                        scores.append(rank_pages(graphs.batch, layout, shard.page_sums))
            if adapters is not None:
                self._lora = LoraRows(adapters.adapters[: layout.n_rows], layout.adapters)
            if captured is not None:
                captures.append(captured if device == self.device else captured.to(self.device, non_blocking=True))
        self.sequences.record_updates(step.slices)
        assert h is not None
        joined = torch.cat(captures, dim=-1) if len(captures) > 1 else next(iter(captures), None)
        return StageOutput(h, [x.to(self.device) for x in hidden or []], joined, _added(scores), cold)

    def _checked(self, rows_in: Tensor | None, n: int, where: str) -> Tensor | None:
        """Return the boundary rows to read, None for the embedding stage.  Raises StateError for a wrong shape."""
        if self.embedding:
            return None
        if rows_in is None or rows_in.shape != (n, self.spec.boundary_width):
            found = "none" if rows_in is None else list(rows_in.shape)
            raise StateError(where, f"boundary rows {found} for {n} tokens of width {self.spec.boundary_width}")
        return rows_in

    def _check_embeddings(self, embeddings: Tensor | None, layout: Layout, where: str) -> None:
        shape = None if embeddings is None else list(embeddings.shape)
        if (wanted := [len(layout.image_rows), self.spec.hidden_size]) != (shape or [0, self.spec.hidden_size]):
            raise StateError(where, f"embedding rows {shape or 'none'} came for the tokens of images, {wanted}")

    @torch.inference_mode()
    def logits(self, rows: Tensor, indices: Sequence[int] | None) -> Tensor:
        """Float32 logits [n, V] of some rows (None: all) of the last :meth:`forward`'s output.  Output stages only."""
        output, lora = self.shards[-1].output, self._lora
        if output is None or not self.spec.pooling.generates:
            raise StateError(f"stage {self.plan.stage}", "this stage has no output matrix: it cannot make logits")
        if indices is not None and list(indices) != list(range(rows.shape[0])):
            index = torch.tensor(list(indices), dtype=torch.int64)
            if rows.device.type != "cpu":
                index = index.pin_memory().to(rows.device, non_blocking=True)
            rows = rows.index_select(0, index)
            lora = None if lora is None else lora.take(index)
        with launching(rows.device), self.shards[-1].lora.of(lora):
            return output(rows)

    @torch.inference_mode()
    def pooled(self, rows: Tensor, slices: Sequence[Slice]) -> Tensor:
        """Float32 results [n, width] of the texts that end with the slices of a step, whose output is ``rows``."""
        output, spans, stop = self.shards[-1].output, list[tuple[int, int]](), 0
        if output is None or output.pooler is None:
            raise StateError(f"stage {self.plan.stage}", "this stage is not the last: it cannot pool hidden states")
        for slice_ in slices:
            start, stop = stop, stop + len(slice_.tokens)
            if not slice_.pooled:
                continue
            if slice_.start and self.spec.pooling.whole_texts:
                where = f"slice of sequence {slice_.sequence} at {slice_.start}"
                raise StateError(where, "a text of this model must be in one step")
            spans.append((start, stop))
        with launching(rows.device):
            return output.pooler(rows, spans)

    def reset(self) -> None:
        """Drop all sequences; weights and pools stay."""
        self.sequences.reset()

    def usage(self) -> list[DeviceUse]:
        """Memory of each shard, measured."""
        return [shard.usage() for shard in self.shards]


def _added(scores: Sequence[dict[int, Tensor]]) -> list[PageScores]:
    """Return the sums of all shards' scores, by sequence."""
    sums: dict[int, Tensor] = {}
    for one in scores:
        for sequence, found in one.items():
            sums[sequence] = sums[sequence] + found.cpu() if sequence in sums else found.cpu()
    return [PageScores(sequence, found.tolist()) for sequence, found in sums.items()]


def _check_plan(plan: StagePlan) -> None:
    """Raise LoadError for a plan that contradicts itself or asks for what this daemon cannot do."""
    reason = ""
    if not plan.shards:
        reason = "the plan has no shard"
    elif plan.embedding != (plan.source is None):
        reason = "a stage either embeds tokens or reads a boundary"
    elif plan.output != (plan.target is None):
        reason = "a stage either makes logits or writes a boundary"
    elif not all(a < b for a, b in pairwise(plan.captures)):
        reason = f"the captured layers {plan.captures} are not in ascending order"
    elif outside := [i for i in plan.captures if not any(i in shard.layers for shard in plan.shards)]:
        reason = f"it captures the layers {outside}, which it does not have"
    elif plan.capture_target is not None and not plan.captures:
        reason = "it has an arena for captures, and captures no layer"
    else:
        for a, b in pairwise(plan.shards):
            if a.layers.stop != b.layers.start:
                reason = f"shard {b.layers} does not follow {a.layers}"
    if reason:
        raise LoadError(f"stage {plan.stage}", reason, "correct the plan", configuration=True)
