"""The `[draft]` section: what drafts, with which drafter, on which device.  Knows neither drafter files nor devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lucevisor.config.names import FilePath
from lucevisor.config.sections import AutoWord, Key, source_of
from lucevisor.config.strict import AUTO, Choice, OrAuto, Whole
from lucevisor.config.values import DeviceRef, HubFile, MaybeDevice

DraftChoice = Literal["auto", "off", "lookup", "mtp", "dflash"]
DRAFT_CHOICES: tuple[DraftChoice, ...] = ("auto", "off", "lookup", "mtp", "dflash")
DRAFTER_CHOICES: tuple[DraftChoice, ...] = ("auto", "mtp", "dflash")
"""Kinds with which a drafter model may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Speculative decoding: cheaply drafted tokens that the model verifies in one step. It never changes answers."""

    kind: Annotated[
        DraftChoice,
        Key(
            Choice(DRAFT_CHOICES),
            "What drafts. `lookup` repeats what followed the same tokens before; `mtp` is a multi-token prediction "
            "head, of the model's own file or of `path`; `dflash` is a drafter model in `path`. `auto`: the drafter in "
            "`path`, else the model's own MTP head if it has one, and `lookup` beside it or alone; a drafter that does "
            "not fit is left out with a notice.",
        ),
    ] = AUTO
    path: Annotated[
        str,
        Key(
            FilePath(hub=True),
            "The drafter's GGUF file, or its safetensors file or directory; required for `dflash`. Relative to the "
            "directory of this file.",
        ),
    ] = ""
    device: Annotated[
        DeviceRef | None,
        Key(
            MaybeDevice(),
            "Where the drafter runs: any device of any group, also of one without layers. Empty: where the last layers "
            "are.",
        ),
    ] = None
    width: Annotated[
        int | AutoWord,
        Key(OrAuto(Whole(1, 64)), "Most drafts verified in one step. `auto`: chosen by recent acceptance.", "tokens"),
    ] = AUTO

    @property
    def source(self) -> Path | HubFile | None:
        """Where the drafter's file is; None when `path` is empty."""
        return source_of(self.path) if self.path else None
