"""Defaults of a model family, from etc/model_cards/*.toml: sampling, thinking budgets, tokens that end an answer.

Knows files and metadata, no requests.  The model's file overrides its card, and a request overrides both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lucevisor.api.app_context import SamplingDefaults
from lucevisor.source_tree import locate
from lucevisor.text.tokenizer import Tokenizer

_Fraction = Annotated[float, Meta(ge=0, le=1)]


class CardSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters that a card sets."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Fraction | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: _Fraction | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None

    def defaults(self) -> SamplingDefaults:
        """The defaults, OpenAI's where the card has none."""
        return SamplingDefaults(
            **{name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        )


class FamilyCard(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One card: for models of these ``architectures`` whose ``general.name`` the expression ``name`` is found in.

    ``stop``: control tokens that end an answer besides those of the file, where the vocabulary has them.
    """

    architectures: list[str]
    name: str
    stop: list[str] = []
    sampling: CardSampling = msgspec.field(default_factory=CardSampling)
    sampling_without_thinking: CardSampling | None = None
    thinking_budgets: dict[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"], Annotated[int, Meta(ge=0)]
    ] = {}

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The tokens that end an answer."""
        ids = (tokenizer.token_id(text) for text in self.stop)
        return frozenset(i for i in ids if i is not None and tokenizer.is_special(i))


def card_files() -> list[Path]:
    """The files of all cards."""
    return sorted((locate("etc") / "model_cards").glob("*.toml"))


def find_card(architecture: str, metadata: Mapping[str, object]) -> FamilyCard | None:
    """Return the card of a model, None if there is none."""
    name = str(metadata.get("general.name", ""))
    for file in card_files():
        card = msgspec.toml.decode(file.read_bytes(), type=FamilyCard)
        if architecture in card.architectures and re.search(card.name, name, re.IGNORECASE):
            return card
    return None
