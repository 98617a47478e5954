"""Token masks of constrained output: they arrive beside the steps, and rows of logits lose what they forbid.

A step is computed while the supervisor still makes its masks; only sampling waits for them.  Knows frames and logits,
no grammars.  Invariant: frames other than masks come out in the order of the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from daemons.errors import StateError
from lucevisor.protocol.blocking_link import BlockingLink
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import Shutdown
from lucevisor.protocol.steps import Masks, Reset, Slice


class MaskInbox:
    """The daemon's end of the link, with masks set aside until their step samples."""

    def __init__(self, link: BlockingLink) -> None:
        self._link = link
        self._waiting: deque[Frame] = deque()  # received while a step waited for its masks
        self._masks: dict[int, tuple[Masks, memoryview]] = {}  # by step id

    def receive(self) -> Frame | None:
        """The next frame that is not a mask, as BlockingLink.receive."""
        while True:
            frame = self._waiting.popleft() if self._waiting else self._link.receive()
            if frame is None or not self._keep(frame):
                return frame

    def wait(self, timeout_s: float) -> bool:
        """Wait for a frame, or for the end of the link, for so long at most; whether ``receive`` returns soon."""
        return bool(self._waiting) or self._link.wait(timeout_s)

    def take(self, step_id: int, slices: list[Slice]) -> Tensor | None:
        """The masks of a step, uint8 [rows of its masked slices, bytes], once they are here.

        None when they never will be: the supervisor is gone or has dropped the sequences, so nobody reads the result.
        StateError when they are for another number of rows.
        """
        while step_id not in self._masks:
            frame = self._link.receive()
            if frame is None:
                return None
            if not self._keep(frame):
                self._waiting.append(frame)
                if isinstance(frame.message, Reset | Shutdown):
                    return None
        message, payload = self._masks.pop(step_id)
        n_rows = sum(1 + s.n_drafts for s in slices if s.masked)
        if message.n_rows != n_rows or message.n_rows * message.row_bytes != len(payload):
            found = f"{message.n_rows} masks of {message.row_bytes} bytes in {len(payload)}"
            raise StateError(f"step {step_id}", f"{found} came for {n_rows} rows")
        return torch.frombuffer(payload, dtype=torch.uint8).view(message.n_rows, message.row_bytes)

    def clear(self) -> None:
        """Forget all masks: no step waits for them any more."""
        self._masks.clear()

    def _keep(self, frame: Frame) -> bool:
        if not isinstance(frame.message, Masks):
            return False
        self._masks[frame.message.step_id] = frame.message, frame.payload
        return True


def apply_masks(x: Tensor, masks: Tensor, rows: Sequence[int]) -> None:
    """Set what ``masks`` uint8 [m, bytes], 8 tokens a byte, forbid in the ``rows`` of logits ``x`` [n, V] to -inf."""
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    bits = (masks.to(x.device, non_blocking=True).unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, : x.shape[1]] == 0
    forbidden = torch.nn.functional.pad(forbidden, (0, x.shape[1] - forbidden.shape[1]), value=True)
    if len(rows) == x.shape[0]:
        x.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=x.device)
        x.index_copy_(0, index, x[index].masked_fill_(forbidden, float("-inf")))
