"""The model a supervisor serves.  Knows no bytes of tensors: those are for :mod:`lucevisor.deployment.weights`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lucevisor.model.drafters import DraftSpec
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ServedDrafter:
    """A drafter.  ``files``: as they were opened, of the drafter alone or the model's own."""

    spec: DraftSpec
    files: GgufFiles


@dataclass(frozen=True, slots=True)
class ServedScorer:
    """The scoring model of PFlash."""

    spec: ModelSpec
    files: GgufFiles


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Files of a model and what their header says.  ``name`` is its id in /v1/models."""

    spec: ModelSpec
    files: tuple[Path, ...]
    name: str
    drafter: ServedDrafter | None = None
    scorer: ServedScorer | None = None

    @property
    def draft_spec(self) -> DraftSpec | None:
        return None if self.drafter is None else self.drafter.spec

    @property
    def score_spec(self) -> ModelSpec | None:
        return None if self.scorer is None else self.scorer.spec
