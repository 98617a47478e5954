"""Golden drafters behind their targets: a pipeline that drafts, verifies and accepts as the supervisor would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import msgspec
import numpy as np
import torch
from torch import Tensor

from daemons.draft import stage as stage_module
from daemons.draft.stage import DraftJob, DraftStage
from daemons.kv.batch import Batch
from daemons.models.stage import LoadedStage
from lucevisor.model.drafters import draft_paths, open_draft, read_draft_spec
from lucevisor.model.drafters.spec import DRAFT_VOCABULARY, DraftVocabularySizes
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, KvGroup
from lucevisor.protocol.loading import CaptureSource, DraftKind, DraftPlan, Load
from lucevisor.protocol.steps import Drafted, OpenSequence, Operation, SamplingParams, SetPages, Slice, Step
from tests.families.pipeline import How, Pipeline, Text, pools_of
from tests.families.test_weight_formats import with_formats_of
from tests.model.drafter_files import DFLASH2, GOLDEN, MTP, TARGET, UPSTREAM, copy
from tests.numerics import RUNS, Bound, Exact


def golden(name: str) -> dict[str, Tensor]:
    """The arrays of a drafter's golden file."""
    with np.load(GOLDEN / name / "golden.npz") as z:
        return {key: torch.from_numpy(z[key]) for key in z.files}


def load_draft(
    target: ModelSpec,
    path: Path,
    kind: DraftKind = DraftKind.DFLASH,
    how: How | None = None,
    output_stage: LoadedStage | None = None,
    sources: Sequence[int] = (),
    sizes: DraftVocabularySizes = DRAFT_VOCABULARY,
) -> DraftStage:
    """A draft stage.  ``sources``: how many captured layers each source has; default: one source.  ``sizes``: of the
    draft vocabulary.
    """
    how, paths = how or How(), draft_paths(path)
    spec = read_draft_spec(open_draft(paths), target, kind)
    left, plans = list(spec.captures), []
    for stage, n in enumerate(sources or [len(left)] * bool(left)):
        plans.append(CaptureSource(stage, left[:n], None))
        left = left[n:]
    plan = DraftPlan(1, kind, [str(p) for p in paths], 0, spec.layers, plans)
    load = Load(
        [], how.dtype, how.kv_dtype, [], [], pools_of(target), max_sequences=16, max_step_tokens=512, draft=plan
    )
    return DraftStage.load(target, load, how.backend, lambda _: None, output_stage, sizes)


def draft_batch(stage: DraftStage, job: DraftJob) -> Batch:
    """The rows that a drafter computes for a job."""
    layout = stage.draft_layout([job])
    return Batch(layout, stage.sequences.tables(stage.device), layout.on(stage.device))


class DraftedPipeline(Pipeline):
    """A pipeline with a drafter.  Pages for drafts are dealt out before they are asked for."""

    def __init__(self, spec: ModelSpec, stages: list[LoadedStage], draft: DraftStage) -> None:
        self.draft_stage, self.num_draft_tokens = draft, draft.spec.max_drafts
        draft.reset()
        super().__init__(spec, stages)

    def apply(self, operations: list[Operation]) -> None:
        super().apply(operations)
        self.draft_stage.apply(operations)

    def _grow(self, sequence: int, text: Text, n: int) -> list[Operation]:
        operations = super()._grow(sequence, text, n)
        pages = text.pages[KvGroup.FULL]
        while len(pages) * PAGE_TOKENS < text.length + self.num_draft_tokens + 1:
            pages.append(self.free[KvGroup.FULL].pop())
            operations.append(SetPages(sequence, KvGroup.FULL, len(pages) - 1, pages[-1:]))
        return operations

    def draft(
        self, tokens: Sequence[Sequence[int]], num_draft_tokens: int | Sequence[int], draft_from: int = 0
    ) -> list[Drafted]:
        """Run the draft stage on the last step, of which ``tokens`` were sampled."""
        ahead = [num_draft_tokens] * len(tokens) if isinstance(num_draft_tokens, int) else num_draft_tokens
        slices = [
            msgspec.structs.replace(s, num_draft_tokens=n, draft_from=draft_from)
            for s, n in zip(self.step.slices, ahead, strict=True)
        ]
        step = msgspec.structs.replace(self.step, slices=slices)
        self.draft_stage.apply(step.operations)
        captures = [rows for rows in self.captures if rows is not None]
        return self.draft_stage.run(step, captures, tokens)

    def trace(
        self, prompt: Sequence[int], n: int, num_draft_tokens: int, chunk: int = 512
    ) -> list[tuple[int, list[int], int]]:
        """Speculative decoding of ``n`` tokens: of every block its first position, the drafts, and how many were
        right.  The tokens: see ``texts``; sequence 0.
        """
        self.open(0)
        for at in range(0, len(prompt), chunk):
            part = prompt[at : at + chunk]
            logits = self.run((0, part))
            last = at + chunk >= len(prompt)
            sampled = [int(logits[-1].argmax())] if last else []
            drafts = self.draft([sampled], num_draft_tokens)
        out, blocks = sampled, []
        while len(out) < n:
            [drafted] = drafts
            start = self.texts[0].length
            found = self.verify((0, [out[-1], *drafted.tokens], num_draft_tokens)).argmax(dim=-1).tolist()
            right = [a == b for a, b in zip(drafted.tokens, found, strict=False)]
            n_accepted = [*right, False].index(False)
            tokens = found[: n_accepted + 1]
            drafts = self.draft([tokens], num_draft_tokens)
            self.accept(0, num_draft_tokens, n_accepted)
            blocks.append((start, drafted.tokens, n_accepted))
            out += tokens
        self.generated = out[:n]
        return blocks


def wanted_trace(name: str) -> list[tuple[int, list[int], int]]:
    z = golden(name)
    columns = (z["spec_block_start"], z["spec_draft_tokens"], z["spec_accepted"])
    return list(zip(*(x.tolist() for x in columns), strict=True))


def load_exact_draft(load: Callable[[], DraftStage]) -> DraftStage:
    """A draft stage whose pools are float64, to run within :class:`Exact`."""

    def pools(*args: Any, **more: Any) -> object:
        with Exact():
            return made(*args, **more)

    made = stage_module.Pools
    with mock.patch.object(stage_module, "Pools", pools):
        return load()


def bounds_of(run: Callable[[], Sequence[Tensor]]) -> list[Bound]:
    """What rounding explains of the rows of each tensor of ``run()``, whose pools are float64."""

    def within(mode: Exact) -> Sequence[Tensor]:
        with mode:
            return run()

    exact, perturbed = within(Exact()), [within(Exact(seed)) for seed in range(RUNS)]
    return [Bound.of(one, torch.stack(many)) for one, *many in zip(exact, *perturbed, strict=True)]


def assert_explained(bounds: Sequence[Bound], found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Tensors are as near as two float32 runs must be."""
    for bound, ours, theirs in zip(bounds, found, wanted, strict=False):
        worst = bound.worst(ours, theirs)
        assert worst <= 1.0, f"{worst:.2f} times as far apart as rounding explains"


def context(
    stage: DraftStage, features: Tensor, ids: Sequence[int], newest: int, num_draft_tokens: int
) -> list[Drafted]:
    """Give a new sequence 0 of a stage the features of a whole prompt, and draft behind ``newest``."""

    stage.reset()
    stage.apply([OpenSequence(0, 0, SamplingParams()), SetPages(0, KvGroup.FULL, 0, [5, 3])])
    step = Step(1, 0, [], [Slice(0, 0, list(ids), sample=True, num_draft_tokens=num_draft_tokens)])
    return stage.run(step, [features], [[newest]])


KINDS = {"dflash": (TARGET, UPSTREAM), "dflash2": (TARGET, DFLASH2), "mtp": (MTP, MTP)}
FEW = DraftVocabularySizes(min_vocabulary=0, max_rows=16, multiple=16)
"""16 of the 288 tokens."""

MANY = DraftVocabularySizes(min_vocabulary=0, share=2, multiple=16)
"""144 of them."""


def quantised_target(path: Path, kind: str) -> Path:
    """The target of a drafter with a quantised output matrix."""
    return copy(path, KINDS[kind][0], kinds={"output.weight": gguf.GGMLQuantizationType.Q8_0})


class Packed:
    """A target on the cpu whose output matrix is packed, and any number of its drafter."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.spec = open_spec(quantised_target(folder / "target.gguf", kind))
        self.stage: LoadedStage
        [self.stage] = with_formats_of(self.spec, Backend.CUDA, kernels=True)

    def draft(self, sizes: DraftVocabularySizes = DRAFT_VOCABULARY) -> DraftStage:
        assert self.spec.files is not None
        mtp = self.kind == "mtp"
        path = self.spec.files.paths[0] if mtp else KINDS[self.kind][1]
        kind = DraftKind.MTP if mtp else DraftKind.DFLASH
        return load_draft(self.spec, path, kind, output_stage=self.stage, sizes=sizes)
