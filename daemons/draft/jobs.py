"""The drafts to make after a step, as pure functions of the step and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from daemons.errors import StateError
from daemons.kv.batch import Layout
from lucevisor.protocol.steps import Slice, Step


class DraftJob(NamedTuple):
    """A draft of ``n`` tokens after ``newest``, which is at ``position``.

    ``row``: the step's row of the preceding token; ``at``: index of the slice.
    """

    slice: Slice
    at: int
    newest: int
    position: int
    row: int

    @property
    def n(self) -> int:
        return self.slice.num_draft_tokens


def draft_jobs(step: Step, tokens: Sequence[Sequence[int]], max_drafts: int) -> list[DraftJob]:
    """Return the drafts to make, of at most ``max_drafts`` tokens, those of equal length next to each other.

    ``tokens[i]``: sampled for slice i.  Raises StateError for tokens or requests that contradict the step.
    """
    if len(tokens) != len(step.slices):
        where = f"draft step {step.step_id}"
        raise StateError(where, f"sampled tokens of {len(tokens)} slices, the step has {len(step.slices)}")
    jobs, row = [], 0
    for at, (s, sampled) in enumerate(zip(step.slices, tokens, strict=True)):
        if s.num_draft_tokens and sampled:
            if s.num_draft_tokens > max_drafts or len(sampled) > s.n_drafts + 1:
                most = f"{s.n_drafts + 1} are the most, and {max_drafts} drafts ahead"
                reason = f"{len(sampled)} tokens sampled and {s.num_draft_tokens} drafts ahead: {most}"
                raise StateError(f"slice of sequence {s.sequence} at {s.start}", reason)
            n_kept = s.n_context + len(sampled) - 1  # tokens of the slice that precede the newest
            jobs.append(DraftJob(s, at, sampled[-1], s.start + n_kept, row + n_kept - 1))
        row += len(s.tokens)
    return sorted(jobs, key=lambda job: job.n)


def without_rejected(step: Step, features: Tensor, tokens: Sequence[Sequence[int]]) -> tuple[Step, Tensor]:
    """Cut a step to the most accepted drafts of any slice, and ``features`` [T, n E] to its rows.

    A drafter's context does not need rows of rejected drafts.  Worth it on a cpu only, where each row takes time.
    ``tokens[i]``: sampled for slice i.  Slices of unequal lengths, which are no graph, stay as they are.
    """
    n_rows, n_drafts = len(step.slices[0].tokens), step.slices[0].n_drafts
    n = n_rows - n_drafts - 1 + max((len(sampled) for sampled in tokens), default=0)
    if (
        not n_drafts
        or not 0 < n < n_rows
        or any((len(s.tokens), s.n_drafts) != (n_rows, n_drafts) for s in step.slices)
    ):
        return step, features
    slices = [_first_tokens(s, n) for s in step.slices]
    rows = features[:n] if len(slices) == 1 else features.view(len(slices), n_rows, -1)[:, :n].flatten(0, 1)
    return msgspec.structs.replace(step, slices=slices), rows


def _first_tokens(s: Slice, n: int) -> Slice:
    """The first ``n`` tokens of a slice that ends with drafts."""
    n_cut = len(s.tokens) - n
    return msgspec.structs.replace(
        s, tokens=s.tokens[:n], n_drafts=s.n_drafts - n_cut, states=s.states[: max(0, len(s.states) - n_cut)]
    )


class PlaceholderDraft(NamedTuple):
    """A draft whose start only the device knows: ``layout``, whose metadata the device fills in, and the step's ``row``
    [1] of the preceding token.
    """

    layout: Layout
    row: Tensor


def placeholder_draft(
    layouts: Sequence[Layout], drafts: Sequence[int], first_row: int, drawn: Tensor
) -> PlaceholderDraft | None:
    """Draft behind tokens that only the device has, so that it goes on while the host waits for them.

    How many drafts of a verify step are right decides where the next ones begin: the host prepares the metadata of
    each case, and the device picks one.  The step is of one sequence, drew ``drawn`` [n + 1] on the device and verified
    n ``drafts``.  ``layouts[i]``: if i of them are right, each with one slice that begins with the newest token.
    ``first_row``: the row of the step before the newest token if none is.  None where one graph does not serve all.
    """
    if len({layout.graph_key for layout in layouts}) != 1:
        return None
    layout, device = layouts[0], drawn.device
    wanted, cases = torch.tensor(drafts, dtype=torch.int64), torch.from_numpy(np.stack([o.metadata for o in layouts]))
    if device.type != "cpu":
        wanted, cases = (x.pin_memory().to(device, non_blocking=True) for x in (wanted, cases))
    right = (drawn[:-1] == wanted).cumprod(0).sum(0, keepdim=True)

    def fill(metadata: Tensor) -> None:
        metadata.copy_(cases.index_select(0, right)[0])
        metadata[:1].copy_(drawn.index_select(0, right))

    layout.fill = fill
    return PlaceholderDraft(layout, right + first_row)
