"""The `[kvflash]` section: how much of a sequence stays on the devices, and where the rest goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lucevisor.config.sections import AutoWord, Key
from lucevisor.config.strict import Choice, OrAuto, Size, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFlashConfig:
    """KV Flash: any context in a bounded number of pages on the devices. Beyond them answers change, except with
    policy `exact`, which is slower. See docs/kv-flash.md."""

    pool_tokens: Annotated[
        int | AutoWord,
        Key(OrAuto(Whole(0, 2**31 - 1)), "Kept per sequence, 512 or more; 0: off; `auto`: up to 16384.", "tokens"),
    ] = 0
    policy: Annotated[
        Literal["lru", "qk", "drafter", "exact"],
        Key(
            Choice(("lru", "qk", "drafter", "exact")),
            "Which pages stay. `lru`: the first and the last ones; `qk`: those that queries attend to most; "
            "`drafter`: those that the scoring model of `[pflash]` finds relevant to the end of a prompt; `exact`: the "
            "first and the last ones, and all others are read from host memory.",
        ),
    ] = "lru"
    host: Annotated[
        int,
        Key(
            Size(),
            "Host memory of all groups for pages that were paged out, which policy `lru` does not need; taken at "
            "start, as much as `engine.max_sequences` contexts fill.",
            "bytes",
        ),
    ] = 8 * 2**30
    tau: Annotated[
        int, Key(Whole(1, 2**20), "With `qk`: tokens between two selections of the pages to keep.", "tokens")
    ] = 64
