"""The `[pflash]` section: which prompts are shortened, how far, and by which scoring model.  Knows no model files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lucevisor.config.names import FilePath
from lucevisor.config.sections import Key, source_of
from lucevisor.config.strict import Choice, Real, Refused, Several, TextType, Whole
from lucevisor.config.values import DeviceRef, HubFile, MaybeDevice

CurvePoint = tuple[int, float]
_POINT = re.compile(r"([1-9][0-9]{0,9}):([0-9.eE+-]{1,32})", re.ASCII)
_SHARE = Real(0.0, 1.0, open_low=True)


@dataclass(frozen=True, slots=True)
class Point(TextType[CurvePoint]):
    """A point of the curve as text: `TOKENS:SHARE`."""

    wants: ClassVar[str] = "TOKENS:SHARE"

    def from_text(self, text: str) -> CurvePoint:
        match = _POINT.fullmatch(text)
        if match is None:
            raise Refused("is not TOKENS:SHARE", 'such as "32000:0.1"', value=text)
        return int(match[1]), _SHARE.from_text(match[2])

    def write(self, value: CurvePoint) -> object:
        return f"{value[0]}:{value[1]!r}"

    def allowed(self) -> str:
        return f"`TOKENS:SHARE`, tokens >= 1, share {_SHARE.allowed()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PFlashConfig:
    """PFlash: a small scoring model shortens long prompts to their relevant parts before prefill. It changes what the
    model reads. See docs/pflash.md."""

    mode: Annotated[
        Literal["off", "auto", "always"],
        Key(Choice(("off", "auto", "always")), "`auto`: only prompts of at least `threshold` tokens."),
    ] = "off"
    path: Annotated[
        str,
        Key(
            FilePath(hub=True),
            "The scoring model's GGUF file, of any family with attention layers, such as Qwen3-0.6B; required unless "
            "`mode` is off. Relative to the directory of this file.",
        ),
    ] = ""
    device: Annotated[
        DeviceRef | None,
        Key(
            MaybeDevice(),
            "Where the scoring model runs: any device of any group, also of one without layers. Empty: where the last "
            "layers are.",
        ),
    ] = None
    threshold: Annotated[int, Key(Whole(1, 2**30), "Shortest prompt that `auto` shortens.", "tokens")] = 32000
    keep_ratio: Annotated[float, Key(_SHARE, "Share that is kept of what may be shortened.")] = 0.05
    curve: Annotated[
        tuple[CurvePoint, ...],
        Key(
            Several(Point()),
            "The share by the prompt's length, instead of `keep_ratio`: points in ascending order, linear between them "
            "and constant beyond.",
        ),
    ] = ()
    window: Annotated[
        int,
        Key(
            Whole(512, 2**20),
            "Tokens that the scoring model reads at once, at most its context; longer parts take several windows.",
            "tokens",
        ),
    ] = 8192

    @property
    def source(self) -> Path | HubFile | None:
        """Where the scoring model's file is; None when `path` is empty."""
        return source_of(self.path) if self.path else None
