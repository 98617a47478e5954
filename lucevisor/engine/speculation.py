"""How many tokens to draft and to verify.

Pure.  Invariant: it never asks for more than ``max_drafts``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.engine.sequence import RequestRecord
from lucevisor.protocol.steps import Drafted


class Speculation:
    """A fixed width: all that may be drafted is drafted, and all drafts are verified."""

    def __init__(self, max_drafts: int, n_vocabulary: int) -> None:
        self._max_drafts = max_drafts

    def n_ahead(self, record: RequestRecord, n_decoding: int) -> int:
        """Return how many drafts to ask for behind the next sampled token; 0: none."""
        return self._max_drafts

    def n_verify(self, drafts: Sequence[tuple[RequestRecord, Drafted]], n_decoding: int) -> dict[str, int]:
        """Return by request id how many drafts the next slices verify, all of one step.

        0: a plain decode.  More than there are: padding makes the slices of a step equally long.
        """
        return {record.request.request_id: len(drafted.tokens) for record, drafted in drafts}

    def drafted(self, record: RequestRecord, drafted: Drafted) -> None:
        """Note drafts of the draft stage."""

    def verified(self, record: RequestRecord, n_drafts: int, n_accepted: int, *, looked_up: bool) -> None:
        """Note a verdict on drafts, padding left out.  ``looked_up``: they were not the draft stage's."""

    def measured(self, n_rows: int, n_slices: int, seconds: float) -> None:
        """Note how long the stages took for a step of decodes, one after the other."""

    def measured_draft(self, n_slices: int, n_ahead: int, seconds: float) -> None:
        """Note how long the draft stage took for a step of decodes that asked for ``n_ahead`` drafts each."""
