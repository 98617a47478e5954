"""Golden drafters behind their targets with a packed output matrix, as a GPU holds it, and drafts from a part of it."""

from __future__ import annotations

from pathlib import Path

import gguf

from daemons.draft.stage import DraftStage
from daemons.models.stage import LoadedStage
from lucevisor.model.drafters.draft_vocabulary import DRAFT_VOCABULARY, DraftVocabularySizes
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend
from lucevisor.protocol.loading import DraftKind
from tests.drafters.drafted import load_draft
from tests.families.test_weight_formats import with_formats_of
from tests.model.drafter_files import DFLASH2, MTP, TARGET, UPSTREAM, copy

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
