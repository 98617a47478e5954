"""The model a supervisor serves.  Knows no bytes of tensors: those are for :mod:`lucevisor.deployment.weights`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lucevisor.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Files of a model and what their header says.  ``name`` is its id in /v1/models."""

    spec: ModelSpec
    files: tuple[Path, ...]
    name: str
