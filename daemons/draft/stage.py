"""The draft stage: a drafter with its pools on one device, run after the output stage of each step.

:meth:`DraftStage.run` first adds the step's tokens to the drafter's context, then drafts after the sampled tokens; rows
of plain decodes are added when something needs them.  Pages and states have the ids of the target's.
Invariants: steps run in the order given; the next step overwrites the rows of rejected drafts, so nothing is rolled
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from daemons.async_output import AsyncDrafts, recorded
from daemons.device import launching, memory_free, prepare, torch_device, torch_dtype
from daemons.draft.dflash import Dflash
from daemons.draft.draft_model import DraftModel
from daemons.draft.drafter import Drafter, Drafts
from daemons.draft.gemma4_assistant import Gemma4Assistant
from daemons.draft.mtp import Mtp
from daemons.draft.vocabulary import DraftVocabulary, draft_vocabulary, shared_weights, vocabulary_weights
from daemons.errors import StateError
from daemons.file_identity import check_identities, unchanged
from daemons.graphs import StepGraphs
from daemons.heartbeat import progress_of
from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.models.loader import WeightLoader
from daemons.models.stage import LoadedStage
from daemons.ops.selection import KernelSelector
from lucevisor.model.drafters import open_draft, read_draft_spec
from lucevisor.model.drafters.dflash import DflashParams
from lucevisor.model.drafters.draft_model import DraftModelParams
from lucevisor.model.drafters.gemma4_assistant import AssistantParams
from lucevisor.model.drafters.mtp import MtpParams
from lucevisor.model.drafters.spec import DRAFT_VOCABULARY, DraftSpec, DraftVocabularySizes
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import Backend, KvGroup
from lucevisor.protocol.loading import DeviceUse, DraftPlan, Load, PoolSizes
from lucevisor.protocol.messages import Progress
from lucevisor.protocol.steps import Drafted, Operation, SetPages, Slice, Step

MAX_ROWS: Final = 64
"""Pending rows of one sequence: a pass over this many takes hardly longer than one over a single row."""
MAX_ROWS_OF_ALL: Final = 512
"""Pending rows of all sequences: on a GPU a pass over 64 to 512 rows takes about the same time, and with many sequences
a lower bound would cause a pass every few steps."""


class PendingRows:
    """The pending rows by sequence, at most ``max_rows`` in all."""

    def __init__(self, max_rows: int = MAX_ROWS_OF_ALL) -> None:
        self.n_rows, self._max_rows = 0, max_rows
        self._slices: dict[int, list[Slice]] = {}
        self._features: dict[int, list[Tensor]] = {}

    def allows(self, operations: Sequence[Operation]) -> bool:
        """Return whether operations may run before the pending rows are added, as they only add pages to sequences."""
        return not self.n_rows or all(isinstance(operation, SetPages) for operation in operations)

    def accepts(self, slices: Sequence[Slice]) -> bool:
        """Return whether the rows of a step may be computed later: one per sequence, following its pending ones."""
        if self.n_rows + len(slices) > self._max_rows:
            return False
        for s in slices:
            before = self._slices.get(s.sequence)
            if len(s.tokens) != 1 or s.states:
                return False
            if before and (before[-1].start + 1 != s.start or len(before) == MAX_ROWS):
                return False
        return True

    def add(self, slices: Sequence[Slice], features: Tensor) -> None:
        """Defer a row of each slice; ``features`` [B, n E] are copied."""
        for s, row in zip(slices, features.clone(), strict=True):
            self._slices.setdefault(s.sequence, []).append(s)
            self._features.setdefault(s.sequence, []).append(row)
        self.n_rows += len(slices)

    def pop_all(self) -> tuple[list[Slice], Tensor]:
        """Remove all rows and return them as one slice per sequence, with their features [T, n E]."""
        slices = [
            msgspec.structs.replace(parts[-1], start=parts[0].start, tokens=[s.tokens[0] for s in parts])
            for parts in self._slices.values()
        ]
        features = torch.stack([row for rows in self._features.values() for row in rows])
        self.clear()
        return slices, features

    def clear(self) -> None:
        """Drop all rows."""
        self.n_rows = 0
        self._slices.clear()
        self._features.clear()


class DraftJob(NamedTuple):
    """A draft of ``n`` tokens after ``newest``, which is at ``position``.

    ``row``: the step's row of the preceding token; ``at``: index of the slice.
    """

    slice: Slice
    at: int
    newest: int
    position: int
    row: int

    @property
    def n(self) -> int:
        return self.slice.num_draft_tokens


def draft_jobs(step: Step, tokens: Sequence[Sequence[int]], max_drafts: int) -> list[DraftJob]:
    """Return the drafts to make, of at most ``max_drafts`` tokens, those of equal length next to each other.

    ``tokens[i]``: sampled for slice i.  Raises StateError for tokens or requests that contradict the step.
    """
    if len(tokens) != len(step.slices):
        where = f"draft step {step.step_id}"
        raise StateError(where, f"sampled tokens of {len(tokens)} slices, the step has {len(step.slices)}")
    jobs, row = [], 0
    for at, (s, sampled) in enumerate(zip(step.slices, tokens, strict=True)):
        if s.num_draft_tokens and sampled:
            if s.num_draft_tokens > max_drafts or len(sampled) > s.n_drafts + 1:
                most = f"{s.n_drafts + 1} are the most, and {max_drafts} drafts ahead"
                reason = f"{len(sampled)} tokens sampled and {s.num_draft_tokens} drafts ahead: {most}"
                raise StateError(f"slice of sequence {s.sequence} at {s.start}", reason)
            n_kept = s.n_context + len(sampled) - 1  # tokens of the slice that precede the newest
            jobs.append(DraftJob(s, at, sampled[-1], s.start + n_kept, row + n_kept - 1))
        row += len(s.tokens)
    return sorted(jobs, key=lambda job: job.n)


def without_rejected(step: Step, features: Tensor, tokens: Sequence[Sequence[int]]) -> tuple[Step, Tensor]:
    """Cut a step to the most accepted drafts of any slice, and ``features`` [T, n E] to its rows.

    A drafter's context does not need rows of rejected drafts.  Worth it on a cpu only, where each row takes time.
    ``tokens[i]``: sampled for slice i.  Slices of unequal lengths, which are no graph, stay as they are.
    """
    n_rows, n_drafts = len(step.slices[0].tokens), step.slices[0].n_drafts
    n = n_rows - n_drafts - 1 + max((len(sampled) for sampled in tokens), default=0)
    if (
        not n_drafts
        or not 0 < n < n_rows
        or any((len(s.tokens), s.n_drafts) != (n_rows, n_drafts) for s in step.slices)
    ):
        return step, features
    slices = [_first_tokens(s, n) for s in step.slices]
    width = features.shape[1]
    rows = features[:n] if len(slices) == 1 else features.view(len(slices), n_rows, width)[:, :n].flatten(0, 1)
    return msgspec.structs.replace(step, slices=slices), rows


def _first_tokens(s: Slice, n: int) -> Slice:
    """The first ``n`` tokens of a slice that ends with drafts."""
    n_cut = len(s.tokens) - n
    return msgspec.structs.replace(
        s, tokens=s.tokens[:n], n_drafts=s.n_drafts - n_cut, states=s.states[: max(0, len(s.states) - n_cut)]
    )


class PlaceholderDraft(NamedTuple):
    """A draft whose start only the device has: ``layout``, whose metadata the device fills in, and the step's ``row``
    [1] of the preceding token.
    """

    layout: Layout
    row: Tensor


def placeholder_draft(
    layouts: Sequence[Layout], drafts: Sequence[int], first_row: int, drawn: Tensor
) -> PlaceholderDraft | None:
    """Draft behind tokens that only the device has, so that it goes on while the host waits for them.

    How many drafts of a verify step are right decides where the next ones begin: the host prepares the metadata of
    each case, and the device picks one.  The step is of one sequence, drew ``drawn`` [n + 1] on the device and verified
    n ``drafts``.  ``layouts[i]``: if i of them are right, each with one slice that begins with the newest token.
    ``first_row``: the row of the step before the newest token if none is.  None where one graph does not serve all.
    """
    if len({layout.graph_key for layout in layouts}) != 1:
        return None
    layout, device = layouts[0], drawn.device
    wanted, cases = torch.tensor(drafts, dtype=torch.int64), torch.from_numpy(np.stack([o.metadata for o in layouts]))
    if device.type != "cpu":
        wanted, cases = (x.pin_memory().to(device, non_blocking=True) for x in (wanted, cases))
    right = (drawn[:-1] == wanted).cumprod(0).sum(0, keepdim=True)

    def fill(metadata: Tensor) -> None:
        metadata.copy_(cases.index_select(0, right)[0])
        metadata[:1].copy_(drawn.index_select(0, right))

    layout.fill = fill
    return PlaceholderDraft(layout, right + first_row)


DRAFTERS: dict[type, type[Dflash] | type[Mtp] | type[Gemma4Assistant]] = {
    DflashParams: Dflash,
    MtpParams: Mtp,
    AssistantParams: Gemma4Assistant,
}


class ExtendedStep(NamedTuple):
    """A step whose rows were added to the context before its tokens were known: their hidden states, and its drafts if
    they were launched.
    """

    step_id: int
    hidden: Tensor
    drafts: AsyncDrafts | None


class DraftGraphs(NamedTuple):
    """Graphs of a drafter's two forwards."""

    extend: StepGraphs[Tensor]
    draft: StepGraphs[Drafts]


class DraftStage:
    """A loaded draft stage; see :meth:`load`."""

    def __init__(
        self, spec: DraftSpec, load: Load, drafter: Drafter, pools: Pools, weights: WeightLoader,
        vocabulary: DraftVocabulary | None,
    ) -> None:  # fmt: skip
        assert load.draft is not None
        self.spec, self.plan, self.drafter, self.draft_vocabulary = spec, load.draft, drafter, vocabulary
        self.layers: Sequence[LayerSpec] = spec.model.layers
        self.device, self.dtype = pools.device, torch_dtype(load.dtype)
        self._widths = [len(source.layers) * spec.model.hidden_size for source in self.plan.sources]
        self.pools = [pools]
        self.max_step_tokens, self.max_drafts = load.max_step_tokens, min(load.max_drafts, spec.max_drafts)
        self.sequences = Sequences(self.pools, _pools_of(load), load.max_sequences, forgets=load.attend_host)
        self._pending_rows = PendingRows(min(MAX_ROWS_OF_ALL, self.max_step_tokens))
        self._ahead: ExtendedStep | None = None  # the last step that ``extend`` took
        self.kernels = {f"{name} (drafter)": kernel for name, kernel in weights.selector.selected.items()}
        self.warnings = list(weights.selector.warnings)
        self.weight_bytes = weights.n_bytes
        if vocabulary is not None:
            self.kernels[f"{self.device} draft vocabulary"] = str(vocabulary)
            self.weight_bytes += vocabulary.n_bytes
        self._kv_groups = spec.model.kv_groups()
        self.warn: Callable[[str], None] = self.warnings.append
        pools.updates.launches.warn = lambda text: self.warn(text)
        self.graphs: DraftGraphs | None = None
        self.cold = False  # the last step was, as in StepResult
        if weights.selector.captures:
            n_routed = max(layer.n_routed for layer in self.layers)
            max_rows = weights.selector.max_async_pairs // max(1, n_routed)
            self.graphs = DraftGraphs(
                StepGraphs(self.device, drafter.extend, max_rows, lambda text: self.warn(text)),
                StepGraphs(self.device, drafter.draft, max_rows, lambda text: self.warn(text)),
            )

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        target: ModelSpec,
        load: Load,
        backend: Backend,
        progress: Callable[[Progress], None],
        output_stage: LoadedStage | None,
        sizes: DraftVocabularySizes = DRAFT_VOCABULARY,
    ) -> DraftStage:
        """Load the drafter of ``load.draft`` for the open model ``target``.

        ``output_stage``: this daemon's, if it runs one; its matrices on the same device are shared.  ``sizes``: of the
        draft vocabulary.  Raises GgufError for files that do not fit, LoadError (file, tensor) or DeviceError (device,
        tensor, bytes).
        """
        plan = load.draft
        assert plan is not None
        prepare(backend, load.threads)
        spec = _open_spec(target, load, plan)
        device, dtype = torch_device(backend, plan.device), torch_dtype(load.dtype)
        selector = KernelSelector(device, dtype)
        progress(Progress(plan.stage, plan.device, 0, 0, "pools"))
        copy = selector.operations.page_copy()
        pools = Pools(spec.model, spec.layers, device, load.kv_dtype, _pools_of(load), page_copy=copy)
        shared = shared_weights(output_stage, device)
        layouts = spec.layouts(
            backend, load.dtype, with_output=shared.lm_head is not None, with_embedding=shared.table is not None
        )
        report = progress_of(progress, plan.stage, plan.device)
        weights = WeightLoader(spec.model.files, layouts, selector, report)
        try:
            part: DraftVocabulary | None = None
            drafter: Drafter
            if isinstance(spec.model.params, DraftModelParams):
                drafter = DraftModel(spec, weights, pools)
            else:
                vocabulary = vocabulary_weights(spec, weights, shared)
                part = draft_vocabulary(spec, vocabulary.lm_head, selector, sizes)
                if part is not None:
                    vocabulary = vocabulary._replace(lm_head=part.lm_head, ids=part.ids)
                drafter = DRAFTERS[type(spec.model.params)](spec, vocabulary, weights, pools)
            weights.finish()
        finally:
            weights.close()
        unchanged(spec.files)
        return cls(spec, load, drafter, pools, weights, part)

    @torch.inference_mode()
    def apply(self, operations: Sequence[Operation]) -> None:
        """Apply the target's state operations in order.  Raises StateError at the first invalid one."""
        if not self._pending_rows.allows(operations):
            self.flush()
        for operation in operations:
            if not isinstance(operation, SetPages) or operation.kv_group in self._kv_groups:
                self.sequences.apply(operation)

    def extends_ahead(self, step: Step) -> bool:
        """Return whether ``extend`` can run a step before its sampled tokens are known: on a GPU, and if the tokens
        that it started from are known.
        """
        return self.device.type != "cpu" and all(token >= 0 for s in step.slices for token in s.tokens)

    def _ahead_of(self, step: Step) -> ExtendedStep | None:
        return self._ahead if self._ahead is not None and self._ahead.step_id == step.step_id else None

    def has_extended(self, step: Step) -> bool:
        """Return whether ``extend`` ran this step."""
        return self._ahead_of(step) is not None

    def has_begun(self, step: Step) -> bool:
        """Return whether ``extend`` launched the drafts of this step."""
        ahead = self._ahead_of(step)
        return ahead is not None and ahead.drafts is not None

    @torch.inference_mode()
    def extend(self, step: Step, captures: Sequence[Tensor], drawn: Tensor | None) -> None:
        """Apply a step's operations and add its rows to the context, before ``run``.

        Also launches the drafts of a step of one sequence, if the device has the tokens ``drawn`` [n_drafts + 1] for
        each row.  Raises StateError.
        """
        began, self.cold = recorded(self.device, timed=True), False
        self.apply(step.operations)
        features = self._features(step, captures)
        self._mark_used(step.slices)
        self.flush()
        hidden = self._extend(step, features)
        drafts = None if drawn is None else self._draft_behind_placeholders(step, hidden, drawn, began)
        self._ahead = ExtendedStep(step.step_id, hidden, drafts)

    def _draft_behind_placeholders(
        self, step: Step, hidden: Tensor, drawn: Tensor, began: torch.cuda.Event
    ) -> AsyncDrafts | None:
        """Launch the drafts of a step of one slice before its tokens are known on the host.

        None if that is impossible: without a CUDA graph the host reads where drafts start.
        """
        [s, *others] = step.slices
        if others or not s.sample or not s.num_draft_tokens or self.graphs is None:
            return None
        drawn, first = drawn.to(self.device, non_blocking=True), s.n_context
        jobs = [DraftJob(s, 0, 0, s.start + first + i, first - 1 + i) for i in range(s.n_drafts + 1)]
        found = placeholder_draft([self.draft_layout([job]) for job in jobs], s.drafts, first - 1, drawn)
        if found is None or not self.graphs.draft.has(found.layout, self.sequences.tables(self.device)):
            return None
        with launching(self.device):
            drafts = self._draft_at(found.layout, hidden, found.row)
            return AsyncDrafts.of([s.sequence], *drafts, began)

    @torch.inference_mode()
    def run(
        self, step: Step, captures: Sequence[Tensor], tokens: Sequence[Sequence[int]], *, defer: bool = False
    ) -> list[Drafted] | AsyncDrafts:
        """Extend the context by the step's tokens, then draft where a slice asks for it and sampled a token.

        ``captures``: rows [T, n E] of each source, on any device; ``tokens[i]``: sampled for slice i.  ``defer``: do
        not wait for the device, if all drafts are equally long.  Raises StateError if they contradict plan or tables.
        """
        if not step.slices:
            return []
        began = recorded(self.device, timed=True) if defer else None
        self._mark_used([] if self.has_extended(step) else step.slices, tokens)
        if (ahead := self._ahead_of(step)) is not None:
            if defer and ahead.drafts is not None:
                return ahead.drafts
            return self._drafts(draft_jobs(step, tokens, self.spec.max_drafts), ahead.hidden, began)
        features, self.cold = self._features(step, captures), False
        if self.device.type == "cpu":
            step, features = without_rejected(step, features, tokens)
        jobs = draft_jobs(step, tokens, self.spec.max_drafts)
        if jobs or not self._pending_rows.accepts(step.slices):
            self.flush()
        if not jobs and self._pending_rows.accepts(step.slices):
            for s in step.slices:  # the other checks are slow, and run when the rows are added
                self.sequences.get(s.sequence, f"slice of sequence {s.sequence} at {s.start}")
            self._pending_rows.add(step.slices, features)
            return []
        return self._drafts(jobs, self._extend(step, features), began)

    def _mark_used(self, slices: Sequence[Slice], tokens: Sequence[Sequence[int]] = ()) -> None:
        """Record tokens of slices, then sampled ones, as used: drafts are drawn from the most recently used tokens."""
        if self.draft_vocabulary is not None:
            for ids in (*(s.tokens for s in slices), *tokens):
                self.draft_vocabulary.mark_used(ids)

    def _extend(self, step: Step, features: Tensor) -> Tensor:
        """Add a step's rows to the context; return their hidden states."""
        layout = self._layout(step.slices)
        with launching(self.device):
            if self.graphs is None:
                hidden = self.drafter.extend(features, self._batch(layout))
            else:
                hidden = self.graphs.extend.run(features, layout, self.sequences.tables(self.device))
                self.cold = self.cold or self.graphs.extend.cold
        if KvGroup.RECURRENT in self._kv_groups:
            self.sequences.record_updates(step.slices)  # of the drafter's own states
        return hidden

    def _drafts(
        self, jobs: list[DraftJob], hidden: Tensor, began: torch.cuda.Event | None
    ) -> list[Drafted] | AsyncDrafts:
        """Make drafts; with ``began``, and if all are equally long, do not wait for the device."""
        with launching(self.device):
            if began is not None and jobs and jobs[0].n == jobs[-1].n:
                jobs.sort(key=lambda job: job.at)
                return AsyncDrafts.of([job.slice.sequence for job in jobs], *self._draft(jobs, hidden), began)
            rows: list[tuple[list[int], list[float]]] = []
            for _, alike in groupby(jobs, key=lambda job: job.n):
                drafts = self._draft(list(alike), hidden)  # valid until the next ones
                rows += zip(drafts.tokens.tolist(), drafts.probabilities.tolist(), strict=True)
        found = {job.at: Drafted(job.slice.sequence, *row) for job, row in zip(jobs, rows, strict=True)}
        return [found[at] for at in sorted(found)]

    def flush(self) -> None:
        """Add the pending rows to the context, before anything reads or copies it."""
        if self._pending_rows.n_rows:
            self._add_pending_rows()

    @torch.inference_mode()
    def _add_pending_rows(self) -> None:
        slices, features = self._pending_rows.pop_all()
        with launching(self.device):  # of any length: a graph of each would be used once
            self.drafter.extend(features, self._batch(self._layout(slices)))

    def reset(self) -> None:
        """Drop all sequences; weights and pools stay."""
        self._pending_rows.clear()
        self._ahead = None
        self.sequences.reset()

    def usage(self) -> list[DeviceUse]:
        """Memory of the drafter, measured."""
        [pools] = self.pools
        free, host = memory_free(self.device), pools.host_nbytes
        return [DeviceUse(self.plan.device, self.spec.layers, self.weight_bytes, pools.nbytes, free, host)]

    def _features(self, step: Step, captures: Sequence[Tensor]) -> Tensor:
        """Return the captures of all layers, [T, n E] on this device.  Raises StateError for other shapes."""
        n_tokens = step.n_tokens
        if [rows.shape for rows in captures] != [(n_tokens, width) for width in self._widths]:
            found, expected = [list(rows.shape) for rows in captures], [[n_tokens, width] for width in self._widths]
            raise StateError(f"draft step {step.step_id}", f"captures of shapes {found}, expected {expected}")
        rows = [
            r if r.dtype is self.dtype and r.device == self.device
            else r.to(device=self.device, dtype=self.dtype, non_blocking=True)
            for r in captures
        ]  # fmt: skip
        if not rows:
            return torch.empty(n_tokens, 0, dtype=self.dtype, device=self.device)
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _layout(self, slices: Sequence[Slice]) -> Layout:
        self.sequences.flush()
        if KvGroup.RECURRENT not in self._kv_groups:
            slices = [msgspec.structs.replace(s, states=[]) if s.states else s for s in slices]
        if self.drafter.attends_to_context:  # nothing reads rows before draft_from
            slices = [
                msgspec.structs.replace(s, tokens=self._clamp_ids(s.tokens), draft_from=min(s.draft_from, s.start))
                for s in slices
            ]
        return Layout(slices, self.sequences, self.spec.model, bounded=self.drafter.attends_to_context)

    def _clamp_ids(self, tokens: list[int]) -> list[int]:
        """Replace ids beyond the drafter's vocabulary, of rows that pad the target's and stand for no token."""
        last = self.spec.model.vocabulary - 1
        return [min(token, last) for token in tokens] if max(tokens) > last else tokens

    def _batch(self, layout: Layout) -> Batch:
        return Batch(layout, self.sequences.tables(self.device), layout.on(self.device))

    def draft_layout(self, jobs: Sequence[DraftJob]) -> Layout:
        """Return the layout of drafts of equal length."""
        drafter, n = self.drafter, jobs[0].n
        slices = [
            Slice(
                job.slice.sequence,
                job.position + drafter.first_row,
                drafter.draft_tokens(job.newest, n),
                sample=True,
                draft_from=drafter.first_visible(job.slice.draft_from),
            )
            for job in jobs
        ]
        return Layout(slices, self.sequences, self.spec.model, bounded=True)

    def _draft(self, jobs: Sequence[DraftJob], hidden: Tensor) -> Drafts:
        """Make drafts of equal length."""
        index = None
        if self.drafter.starts_from_hidden:
            index = torch.tensor([job.row for job in jobs], dtype=torch.int64)
            if self.device.type != "cpu":
                index = index.pin_memory().to(self.device, non_blocking=True)
        return self._draft_at(self.draft_layout(jobs), hidden, index)

    def _draft_at(self, layout: Layout, hidden: Tensor, index: Tensor | None) -> Drafts:
        """Make the drafts of a layout; ``index`` [B]: the rows of ``hidden`` to start from, if the drafter does."""
        rows = hidden.index_select(0, index) if self.drafter.starts_from_hidden and index is not None else None
        if self.draft_vocabulary is not None:
            self.draft_vocabulary.renew()  # not in a graph, which reads what is there by then
        if self.graphs is None:
            return self.drafter.draft(rows, self._batch(layout))
        drafts = self.graphs.draft.run(rows, layout, self.sequences.tables(self.device))
        self.cold = self.cold or self.graphs.draft.cold
        return drafts


def _pools_of(load: Load) -> PoolSizes:
    """Return the drafter's pools, which share no memory, without host pages if attention reads those in place.

    The drafter attends to resident pages only.  Pages that return under policy ``exact`` have no draft epoch, so it
    does not attend to them.
    """
    host_pages = 0 if load.attend_host else load.pools.host_pages
    return msgspec.structs.replace(load.pools, host_pages=host_pages, state_pages=0)


def _open_spec(target: ModelSpec, load: Load, plan: DraftPlan) -> DraftSpec:
    """Open the drafter's files, which may be the target's."""
    paths = tuple(Path(file) for file in plan.files)
    files = target.files if paths == target.files.paths else check_identities(open_draft(paths), plan.identities)
    return read_draft_spec(files, target, plan.kind, load.options)
