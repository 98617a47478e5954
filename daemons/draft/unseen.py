"""Drafts behind tokens that only the device knows: it goes on while the host still waits for them.

How many drafts of a verify step are right decides where the next ones begin.  The host prepares the metadata of each
case while it waits, and the device picks one.  Knows no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from daemons.kv.batch import Layout


class UnseenDraft(NamedTuple):
    """Where a draft begins: ``layout``, whose metadata the device puts in place, and the ``row`` [1] of the step that
    holds the token before.
    """

    layout: Layout
    row: Tensor


def unseen_draft(layouts: Sequence[Layout], drafts: Sequence[int], first_row: int, drawn: Tensor) -> UnseenDraft | None:
    """The draft of one sequence behind a step that drew ``drawn`` [n + 1] on the device, and verified n ``drafts``.

    ``layouts[i]``: if i of them are right, each with one slice that begins with the newest token, whichever that is;
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
    return UnseenDraft(layout, right + first_row)
