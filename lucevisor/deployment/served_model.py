"""Records of the served model and its drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lucevisor.config import Config
from lucevisor.config.sections import Neighbour
from lucevisor.model.drafters import DraftSpec
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec
from lucevisor.model.vision import VisionSpec
from lucevisor.text.template import TEMPLATE_KEY
from lucevisor.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedDrafter:
    """A drafter.  ``files``: its own or the model's."""

    spec: DraftSpec
    files: GgufFiles


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Files of a model and their header.  ``name``: its id in /v1/models; ``scorer``: of PFlash; ``chat_template``:
    instead of the files' own, if not None; ``encoder``: of images; ``scorer_tokenizer``: where it is another one."""

    spec: ModelSpec
    files: tuple[Path, ...]
    name: str
    drafter: ServedDrafter | None = None
    scorer: ModelSpec | None = None
    chat_template: str | None = None
    encoder: VisionSpec | None = None
    scorer_tokenizer: Tokenizer | None = None

    @property
    def metadata(self) -> Mapping[str, object]:
        metadata = self.spec.files.metadata
        return metadata if self.chat_template is None else {**metadata, TEMPLATE_KEY: self.chat_template}

    @property
    def n_bytes(self) -> int:
        """The bytes of the weights, those of extra models included."""
        others = self.scorer and self.scorer.files, self.drafter and self.drafter.files
        own = self.spec.files, *others, self.encoder and self.encoder.files
        return sum(files.total_bytes for files in {id(files): files for files in own if files}.values())

    @property
    def draft_spec(self) -> DraftSpec | None:
        return None if self.drafter is None else self.drafter.spec


def pipelines(config: Config, models: Sequence[ServedModel]) -> list[tuple[Config, ServedModel]]:
    """Return configuration and model of each pipeline: one a model, or one a replica of the only one.

    Each has its neighbours and an equal part of the journal.
    """
    each = config.each_replica if config.replicas else config.each_model
    pairs = list(zip(each, [*models] * (len(each) // len(models)), strict=True))
    if len(pairs) == 1:
        return pairs
    recovery = replace(config.recovery, journal=config.recovery.journal // len(each))
    neighbours = tuple(Neighbour(own, model.n_bytes) for own, model in pairs)
    return [(replace(own, recovery=recovery, neighbours=neighbours), model) for own, model in pairs]
