"""The model runner: executes prefill chunks and decode steps on the stages of one daemon.

``run_step`` applies state operations, reads boundary rows, runs the stage's layers (the forward pass) and writes
boundary rows; the output stage makes logits and samples.  ``run_draft`` runs the same step on the draft stage: captures
and sampled tokens in, drafts out.  Ids, pages and order come from the supervisor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from daemons import device as devices
from daemons.async_output import AsyncDrafts, AsyncTokens, PlaceholderFill, QueuedStep, recorded
from daemons.boundary import BoundaryBuffer, RowArrival, RowWait, arena_width, boundary_rows
from daemons.draft.inputs import DraftInputs
from daemons.draft.stage import DraftStage
from daemons.errors import StateError
from daemons.failures import try_to_load
from daemons.file_identity import open_adapters, open_files, unchanged
from daemons.heartbeat import Reporter, warn_once
from daemons.logprobs import prompt_logprobs
from daemons.models.replay import LayerwiseReplay, layerwise_replays, report_replays
from daemons.models.stage import LoadedStage
from daemons.relevance.stage import ScoreStage
from daemons.sampling import Sampler, rows_to_sample, sampled_parts
from daemons.snapshots.state_map import DraftPools, StateMap
from daemons.step_output import Payload, StepOutput
from daemons.token_ring import RunAheadStep, TokenRing, zero_placeholders
from daemons.vision.stage import VisionStage
from daemons.warmup import warm_up_all
from lucevisor.model.families import read_spec
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.values import Backend
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.files import ByteFile
from lucevisor.protocol.loading import DeviceUse, Load, Loaded, StagePlan
from lucevisor.protocol.steps import DraftStep, PageScores, PromptLogprobs, Sampled, Slice, Step, StepResult

NO_ROWS = memoryview(b"")
MaskSource = Callable[[int, list[Slice]], Tensor | None]
"""Waits for the masks of a step; see MessageQueue.wait_for_masks."""


class ModelRunner:
    """The stages of one daemon, and its draft, scoring and vision stages if it runs them; made by :meth:`load`."""

    def __init__(self, load: Load, backend: Backend, arenas: Sequence[SharedBuffer], files: GgufFiles) -> None:
        self._load = load
        self._backend = backend
        self.stages: dict[int, LoadedStage] = {}
        self._plans: dict[int, StagePlan] = {p.stage: p for p in load.stages}
        self._sampler: Sampler | None = None
        self.spec = open_adapters(load, read_spec(files, load.options))
        pinned = backend is not Backend.CPU
        self._boundaries = [
            BoundaryBuffer(arena, load.dtype, arena_width(load, i, self.spec), pinned=pinned)
            for i, arena in enumerate(arenas)
        ]
        tokens = next((p.tokens for p in load.stages if p.tokens is not None), None)
        self._token_ring = None if tokens is None else TokenRing(arenas[tokens], self.spec.vocabulary)
        self._finished_at = self._upkeep_s = 0.0
        # Other stages wait for what these compute, and there is a core for polling.
        self.is_polling = load.spin_s > 0 and any(not (p.embedding and p.output) for p in load.stages)
        self.shares_cores = not load.spin_s  # with the supervisor and other daemons
        self._queues = pinned and self.is_polling and len(load.stages) == 1  # steps, behind one that is not finished
        self.defers_drafts = pinned
        self._has_unfinished_step = False  # the device computes one
        self._warned: list[str] = []
        self.scorer: ScoreStage | None = None
        self.vision: VisionStage | None = None
        self._draft: DraftStage | None = None
        self.draft_step: Callable[[int], DraftStep | None] = lambda step_id: None  # see MessageQueue.draft_step
        self.await_captures: Callable[[SharedBuffer, Step], None] = lambda rows, step: (
            None
        )  # see MessageQueue.await_captures
        self._draft_inputs = None
        if load.draft is not None:
            self._draft_inputs = DraftInputs(
                load.draft, self._boundaries, lambda rows, step: self.await_captures(rows, step)
            )

    @classmethod
    def load(
        cls,
        load: Load,
        backend: Backend,
        arenas: Sequence[SharedBuffer],
        reporter: Reporter,
        rows: ByteFile | None = None,
    ) -> tuple[ModelRunner, Loaded]:
        """Load and warm up every stage, and load the draft, scoring and vision stages.

        ``rows``: the file of those to replay.

        Raises GgufError, LoadError or DeviceError.
        """
        started = time.monotonic()
        runner = cls(load, backend, arenas, open_files(load))
        replays = {} if rows is None else layerwise_replays(load, runner.spec, rows)
        uses, kernels = list[DeviceUse](), dict[str, str]()
        for plan in load.stages:
            replay = replays.get(plan.stage)
            stage = LoadedStage.load(runner.spec, plan, load, backend, reporter.progress, replay)
            warn_once(reporter, runner._warned, stage.warnings, plan.stage)
            stage.warn = partial(reporter.log, "warning", stage=plan.stage)
            runner.stages[plan.stage] = stage
            uses += stage.usage()
            kernels |= stage.kernels
            if plan.output:
                runner._sampler = Sampler(runner.spec.vocabulary, stage.device, load.deterministic)
        problem = score_problem = vision_problem = ""
        if load.draft is not None:
            runner._draft, problem = try_to_load("drafter", reporter, runner._load_draft, needed=not load.stages)
            if problem:
                runner._draft_inputs = None
        if load.score is not None:
            runner.scorer, score_problem = try_to_load(
                "scoring model", reporter, runner._load_scorer, needed=not load.stages
            )
        if load.vision is not None:
            runner.vision, vision_problem = try_to_load(
                "vision encoder", reporter, runner._load_vision, needed=not load.stages
            )
        draft, scorer, vision = runner._draft, runner.scorer, runner.vision
        identities = unchanged(runner.spec.files)
        for adapter in runner.spec.adapters:
            identities += unchanged(adapter.files)
        if draft is not None:
            kernels |= draft.kernels
            identities += draft.spec.files.identities
        use = draft.usage()[0] if draft is not None else None
        kernels |= scorer.kernels if scorer is not None else {}
        score_use = scorer.usage() if scorer is not None else None
        seconds = time.monotonic() - started
        replayed = runner._take_replays(replays, reporter, started)
        loaded = Loaded(
            uses, kernels, seconds, identities, use, problem, score_use, score_problem,
            None if vision is None else vision.usage(), vision_problem, replayed, runner._warned,
        )  # fmt: skip
        if load.warm_up:
            gpus = {shard.device.index: shard.device for stage in runner.stages.values() for shard in stage.shards}
            gpus = {i: device for i, device in gpus.items() if device.type != "cpu"}
            for gpu in gpus.values():  # what the load leaves does not fit steps
                devices.empty_cache(gpu)
            held = {i: devices.reset_peak(gpu) for i, gpu in gpus.items()}
            rounding = {i: devices.reserved_bytes(gpu) - held[i] for i, gpu in gpus.items()}
            others = {i: devices.graph_bytes(gpu) for i, gpu in gpus.items()}  # of models that this process has, too
            warm_up_all([(p, runner.stages[p.stage]) for p in load.stages], runner._draft, reporter)
            peaks = {i: devices.peak_bytes(gpu) - held[i] for i, gpu in gpus.items()}
            graphs = {i: devices.graph_bytes(gpu) - others[i] for i, gpu in gpus.items()}
            loaded = replace(loaded, workspace_bytes={i: peaks[i] + graphs[i] + rounding[i] for i in gpus})
            for i, gpu in gpus.items():
                reserved = devices.reserved_bytes(gpu) - held[i]
                reporter.log(
                    "debug", "workspace of the warm-up", device=i, steps_bytes=peaks[i], graphs_bytes=graphs[i],
                    rounding_bytes=rounding[i], reserved_bytes=reserved,
                )  # fmt: skip
        return runner, loaded

    @torch.inference_mode()
    def _take_replays(self, replays: Mapping[int, LayerwiseReplay], reporter: Reporter, started: float) -> bool:
        """Continue from the replayed state; return whether all stages were replayed.  If one was not, none counts."""
        ended = [self.stages[stage].replayed(replay) for stage, replay in replays.items()]
        for stage, replay in replays.items() if all(ended) else ():
            if self._plans[stage].output and self._sampler is not None:
                self._sampler.replayed(replay.steps)
        if replays:
            report_replays([*replays.values()], reporter, time.monotonic() - started, ended=all(ended))
        if not all(ended):
            self.reset()
        return bool(replays) and all(ended)

    def _load_scorer(self, reporter: Reporter) -> ScoreStage:
        scorer = ScoreStage.load(self._load, self._backend, reporter.progress)
        warn_once(reporter, self._warned, scorer.warnings, "scoring")
        return scorer

    def _load_vision(self, reporter: Reporter) -> VisionStage:
        return VisionStage.load(self._load, self._backend, reporter.progress)

    def _load_draft(self, reporter: Reporter) -> DraftStage:
        assert self._load.draft is not None
        output_stage = next((self.stages[p.stage] for p in self._load.stages if p.output), None)
        draft = DraftStage.load(self.spec, self._load, self._backend, reporter.progress, output_stage)
        warn_once(reporter, self._warned, draft.warnings, self._load.draft.stage)
        draft.warn = partial(reporter.log, "warning", stage=self._load.draft.stage)
        return draft

    @torch.inference_mode()
    def run_step(
        self,
        step: Step,
        stage_index: int,
        wait_s: float,
        masks: MaskSource = lambda step_id, slices: None,
        finish_previous: Callable[[], None] = lambda: None,
        await_rows: RowWait | None = None,
        posted: bool = False,
        poll_previous: Callable[[], object] = lambda: None,
        embeddings: memoryview = NO_ROWS,
    ) -> StepOutput:
        """Execute one step on one of the stages.

        ``masks`` is called before constrained slices are sampled.  ``await_rows``, of a ``posted`` step, is called when
        all but its rows is prepared; it may raise StepCancelled, after which the step's operations count as applied.
        ``finish_previous`` is called before anything waits for the device: the result of the previous step may be
        asynchronous.  ``poll_previous`` is called between launches and may finish it earlier.  ``embeddings``: the
        payload of the step.
        """
        started = time.monotonic()
        stage, plan = self.stages[stage_index], self._plans[stage_index]
        original_step, (step, placeholder_fill, ring_step) = step, self._fill_placeholders(plan, step, await_rows)
        queues, inputs = self._may_queue(plan, step), self._draft_inputs if plan.output else None
        if placeholder_fill is None:
            if not queues and (inputs is None or not inputs.drafts_wait):
                finish_previous()
            if inputs is not None:
                inputs.store_slices(step, step.slices)
        self._apply(stage, plan, step)
        arrival, cold = RowArrival(), False
        async_output: QueuedStep | None = None
        payload, sampled, page_scores = Payload(), list[Sampled](), list[PageScores]()
        of_prompts = list[PromptLogprobs]()
        written: list[BoundaryBuffer] = []
        if step.n_tokens:
            rows_in, arrival = boundary_rows(self._boundaries, plan.source, step, await_rows, posted=posted)
            of_images = self._embedding_rows(step, embeddings)
            out = stage.forward(step, rows_in, placeholder_fill or ring_step, arrival, of_images)
            if ring_step is not None:
                arrival, step, sampled = ring_step.arrival, ring_step.step, ring_step.tokens
            wait_s += 0.0 if self._has_unfinished_step else arrival.idle_s(self._finished_at)
            page_scores, cold = out.page_scores, out.cold
            if step.want_hidden:
                payload.add("hidden", torch.stack([h.float().cpu() for h in out.hidden]))  # maybe of several devices
            if out.captures is not None:
                written += self._hand_captures(plan, step, out.captures, finish_previous, queues)
            if plan.target is not None:
                written.append(self._boundaries[plan.target])
                written[-1].write(step, out.rows, wait=not queues)
                async_output = QueuedStep(recorded(out.rows.device)) if queues else None
            else:
                finish_and_share: Callable[[], list[Slice] | None] = finish_previous
                if placeholder_fill is not None:
                    finish_and_share = partial(self._share_known_tokens, original_step, finish_previous)
                of_prompts = self._count_and_find_logprobs(stage, step, out.rows, finish_previous)
                self._pool(stage, step, out.rows, payload, finish_previous)
                found = self._sample(stage, step, out.rows, masks, payload, finish_and_share, poll_previous, queues)
                async_output, sampled = (None, found) if isinstance(found, list) else (found, [])
        if async_output is None:
            _ring_doorbells(written, step)
        finish_previous()
        self._has_unfinished_step = async_output is not None
        if inputs is not None and async_output is None:
            inputs.store_tokens(step, sampled)
        started += arrival.waited_s
        compute_s = time.monotonic() - max(started, self._finished_at)
        upkeep_s, self._upkeep_s = (self._upkeep_s, 0.0) if plan.output else (0.0, self._upkeep_s)
        invalid = (
            self._sampler.take_invalid() if plan.output and self._sampler is not None and async_output is None else []
        )
        result = StepResult(
            step.step_id, stage_index, sampled, compute_s, wait_s, payload.segments,
            prompt_logprobs=of_prompts, page_scores=page_scores, hop_s=arrival.hop_s, upkeep_s=upkeep_s, cold=cold,
            invalid=invalid,
        )  # fmt: skip
        return StepOutput(result, payload.arrays, async_output, step, started, [] if async_output is None else written)

    def _embedding_rows(self, step: Step, payload: memoryview) -> Tensor | None:
        """Return the float32 embedding rows [n, E] of a payload; None without any.  Raises StateError."""
        if not len(payload):
            return None
        width = self.spec.hidden_size
        if len(payload) % (width * torch.float32.itemsize):
            raise StateError(f"step {step.step_id}", f"{len(payload)} bytes of embedding rows of {width} numbers")
        return torch.frombuffer(payload, dtype=torch.float32).view(-1, width)

    def _fill_placeholders(
        self, plan: StagePlan, step: Step, await_tokens: RowWait | None
    ) -> tuple[Step, PlaceholderFill | None, RunAheadStep | None]:
        """Return a step with tokens in place of placeholders.

        They are 0 where only the device has them (the second result copies them) or where another daemon is still
        computing them (the third result waits for them).
        """
        if plan.output and self._sampler is not None:
            inputs, drafts = self._draft_inputs, None
            if inputs is not None:
                step, drafts = inputs.with_drafts(step)
            step, tokens = self._sampler.fill_placeholders(
                step
            )  # none of one that verifies: drafts are made behind known tokens
            return step, drafts or tokens, None
        if not step.waits_for_tokens:
            return step, None, None
        ring_step = RunAheadStep(self._token_ring, step, await_tokens) if plan.embedding else None
        return zero_placeholders(step) if ring_step is None else ring_step.step, None, ring_step

    def publish_tokens(self, output: StepOutput, *, drafts: bool = False) -> StepOutput:
        """Publish drafts, or tokens already sent to the supervisor, to a first stage in another daemon."""
        if self._token_ring is not None and self._sampler is not None and drafts == bool(output.result.drafts):
            self._token_ring.publish(output.step, output.result)
        return output

    def finish_step(self, output: StepOutput) -> StepOutput:
        """Wait for a step's asynchronous tokens, drafts or rows; return its complete output."""
        async_output, sampled, drafts, now = output.async_output, output.result.sampled, output.result.drafts, math.inf
        if async_output is None:
            return output
        if isinstance(async_output, AsyncDrafts) and self._draft_inputs is not None:
            drafts, now = self._draft_inputs.finish_drafts(async_output), output.started + async_output.seconds
        elif isinstance(async_output, AsyncTokens) and self._sampler is not None:
            sampled = self._sampler.finish_tokens(async_output)
        else:
            async_output.copied.synchronize()
        now, self._has_unfinished_step = min(now, time.monotonic()), False
        if output.step is not None:
            _ring_doorbells(output.written, output.step)
        if self._draft_inputs is not None and output.step is not None:
            self._draft_inputs.store_tokens(output.step, sampled)
        begun, self._finished_at = max(output.started, self._finished_at), now
        invalid = output.result.invalid
        if isinstance(async_output, AsyncTokens) and self._sampler is not None:
            invalid = self._sampler.take_invalid()
        result = replace(output.result, sampled=sampled, drafts=drafts, compute_s=now - begun, invalid=invalid)
        return self.publish_tokens(StepOutput(result, output.payload, step=output.step), drafts=True)

    def _may_queue(self, plan: StagePlan, step: Step) -> bool:
        """Return whether the next step may be queued before this one is answered."""
        host_reads = plan.output and (self._wants_drafts(step) or any(s.pooled for s in step.slices))
        return self._queues and not (host_reads or step.want_hidden or step.want_logits or step.rank_pages)

    def _share_known_tokens(self, original_step: Step, finish_previous: Callable[[], None]) -> list[Slice] | None:
        """Finish the previous step, and store the tokens of a step launched without them for the draft stage."""
        finish_previous()
        if self._draft_inputs is None or self._sampler is None:
            return None
        slices = self._sampler.refill_placeholders(self._draft_inputs.refill_draft_placeholders(original_step.slices))
        self._draft_inputs.store_slices(original_step, slices)
        return slices

    def _hand_captures(
        self, plan: StagePlan, step: Step, captures: Tensor, finish_previous: Callable[[], None], queues: bool
    ) -> list[BoundaryBuffer]:
        """Pass a stage's captures to the draft stage, in this daemon or in another; return where they are written."""
        if not queues:
            finish_previous()
        if plan.capture_target is not None:
            # the output stage, and a stage that queues steps, wait for their device before they answer the step
            wait = not (plan.output or queues) or captures.device != self.stages[plan.stage].device
            self._boundaries[plan.capture_target].write(step, captures, wait=wait)
            return [self._boundaries[plan.capture_target]]
        if self._draft_inputs is not None:
            self._draft_inputs.store_captures(step, plan.stage, captures)
        return []

    def awaits_drafts(self, step: Step) -> bool:
        """Return whether the device would be idle after a step until ``run_draft``."""
        return self.defers_drafts and self._wants_drafts(step) and not (self._draft and self._draft.has_begun(step))

    def _wants_drafts(self, step: Step) -> bool:
        """Return whether a step asks the draft stage of this daemon for drafts."""
        return self._draft is not None and any(s.num_draft_tokens for s in step.slices)

    @torch.inference_mode()
    def run_draft(self, message: DraftStep, wait_s: float) -> StepOutput:
        """Execute a step on the draft stage, after the output stage ran it.  Raises StateError."""
        started, step, draft, inputs = time.monotonic(), message.step, self._draft, self._draft_inputs
        if draft is None or inputs is None:
            raise StateError(f"draft step {step.step_id}", "this daemon has no draft stage")
        if not draft.has_extended(step):
            draft.apply(step.operations)
        drafts = inputs.run(draft, message, defer=message.tokens is None and self.defers_drafts)
        self._has_unfinished_step = isinstance(drafts, AsyncDrafts)
        made = StepOutput.of_drafts(message, inputs.plan.stage, drafts, wait_s, started, cold=draft.cold)
        return self.publish_tokens(made, drafts=True)  # before the supervisor: the first stage waits for them

    @torch.inference_mode()
    def run_upkeep(self, step: Step, stage_index: int) -> None:
        """Extend the drafter's context by an upkeep step that the output stage has launched.  Raises StateError."""
        inputs, started = self._draft_inputs, time.monotonic()
        if step.upkeep and self._plans[stage_index].output and self._draft and inputs:
            inputs.run(self._draft, DraftStep(step, [[] for _ in step.slices]))
            self._upkeep_s += time.monotonic() - started

    def flush(self) -> None:
        """Apply all pending state changes before the state is read."""
        if self._draft is not None:
            self._draft.flush()

    def state_map(self) -> StateMap:
        """Return where the state of every layer lies."""
        draft = None if self._draft is None else DraftPools(self._draft.layers, self._draft.pools[0])
        return StateMap(self.spec, [shard.pools for stage in self.stages.values() for shard in stage.shards], draft)

    def reset(self) -> None:
        """Drop every sequence of every stage."""
        for stage in self.stages.values():
            stage.reset()
        if self._sampler is not None:
            self._sampler.reset()
        for part in (self._draft, self._draft_inputs):
            if part is not None:
                part.reset()

    def free_bytes(self) -> dict[int, int]:
        """Return the free bytes of each device, by its index."""
        others = {plan.device for plan in (self._load.draft, self._load.score, self._load.vision) if plan}
        indices = sorted(others.union(s.device for p in self._load.stages for s in p.shards))
        return {i: devices.memory_free(devices.torch_device(self._backend, i)) for i in indices}

    def _apply(self, stage: LoadedStage, plan: StagePlan, step: Step) -> None:
        stage.apply(step.operations)
        if self._draft_inputs is not None:
            self._draft_inputs.copy_captures(plan.stage)
        if step.upkeep and plan.output and self._draft is not None:
            self._draft.apply(step.operations)
        if plan.output and self._sampler is not None:
            self._sampler.apply_operations(step.operations)

    def _count_and_find_logprobs(
        self, stage: LoadedStage, step: Step, rows: Tensor, finish_previous: Callable[[], None]
    ) -> list[PromptLogprobs]:
        """Count the tokens of a computed step for penalties, and return the prompt log-probabilities it asks for."""
        if self._sampler is None:
            return []
        self._sampler.count_context(step.slices)
        if not any(s.logprob_targets for s in step.slices):
            return []
        finish_previous()
        states = self._sampler.states
        logits_of, by_row = partial(stage.logits, rows), self._load.deterministic
        found = prompt_logprobs(step.slices, logits_of, lambda s: states[s].sampling.n_top_logprobs, by_row=by_row)
        return self._sampler.checked(found)

    def _pool(
        self, stage: LoadedStage, step: Step, rows: Tensor, payload: Payload, finish_previous: Callable[[], None]
    ) -> None:
        """Add the pooled hidden states of the texts that end with the step to its payload."""
        texts = [s.sequence for s in step.slices if s.pooled]
        if not texts or self._sampler is None:
            return
        finish_previous()
        payload.add("pooled", self._sampler.checked_rows(texts, stage.pooled(rows, step.slices).cpu()))

    def _sample(
        self, stage: LoadedStage, step: Step, rows: Tensor, masks: MaskSource, payload: Payload,
        finish_and_share: Callable[[], list[Slice] | None], poll_previous: Callable[[], object], queues: bool,
    ) -> list[Sampled] | QueuedStep:  # fmt: skip
        poll_previous()
        if step.want_logits:
            finish_and_share()
            payload.add("logits", stage.logits(rows, None).cpu())
        wanted = rows_to_sample(step.slices)
        if not wanted or self._sampler is None:
            if queues:
                return QueuedStep(recorded(stage.device))
            finish_and_share()
            devices.synchronize(stage.device)  # as drawing does: the step's time is known
            return []
        if len(wanted) > stage.max_sampled_rows:
            return self._sample_in_parts(stage, step, rows, masks, finish_and_share)
        logits = stage.logits(rows, wanted)  # on a device it is queued by now: the masks arrive meanwhile
        poll_previous()
        slices = [s for s in step.slices if s.sample]
        waits = self._wants_drafts(step) or step.want_logits  # a DraftStep begins with tokens that the host reads
        alone = not waits and (queues or self._plans[stage.plan.stage].source is None)
        async_output = self._sampler.defer(slices, logits) if alone else None
        slices = [s for s in finish_and_share() or slices if s.sample]
        if async_output is not None:
            return async_output
        found = masks(step.step_id, slices) if any(s.masked for s in slices) else None
        return self._sampler.sample(slices, logits, found, partial(self._extend_drafts, step))

    def _sample_in_parts(
        self, stage: LoadedStage, step: Step, rows: Tensor, masks: MaskSource,
        finish_and_share: Callable[[], list[Slice] | None],
    ) -> list[Sampled]:  # fmt: skip
        """Sample slices of many drafts, some at a time: the logits of all would take gigabytes."""
        assert self._sampler is not None
        slices = [s for s in finish_and_share() or step.slices if s.sample]
        found = masks(step.step_id, slices) if any(s.masked for s in slices) else None
        wanted, sampled, first, first_mask = rows_to_sample(step.slices), list[Sampled](), 0, 0
        for part in sampled_parts(slices, stage.max_sampled_rows):
            stop = first + len(rows_to_sample(part))
            stop_mask = first_mask + sum(1 + s.n_drafts for s in part if s.masked)
            own = None if found is None or stop_mask == first_mask else found[first_mask:stop_mask]
            sampled += self._sampler.sample(part, stage.logits(rows, wanted[first:stop]), own)
            first, first_mask = stop, stop_mask
        return sampled

    def _extend_drafts(self, step: Step, drawn: Tensor | None) -> None:
        """Extend the drafter's context while the host waits for a step, if its DraftStep has arrived."""
        draft, inputs = self._draft, self._draft_inputs
        if self.defers_drafts and self._wants_drafts(step) and draft is not None and inputs is not None:
            inputs.extend(draft, self.draft_step(step.step_id), drawn)


def _ring_doorbells(written: Sequence[BoundaryBuffer], step: Step) -> None:
    """Announce the rows of a step, which have left the device; captures come first."""
    for boundary in written:
        boundary.ring(step)
