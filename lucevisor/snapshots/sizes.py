"""How large the file of a slot may get, from its length alone: a few multiplications instead of laying it out.

Pure.  Knows the layer table and the header format.  Invariant: never less than the file takes; what it takes less is
the slack of the header, since tensors are counted exactly.
"""

from __future__ import annotations

from collections import Counter

from lucevisor.model.values import Space
from lucevisor.snapshots.file_format import HEADER_BYTES_PER_TOKEN, max_header_bytes
from lucevisor.snapshots.layout import StateModel, slot_tensors


class FileSizes:
    """Sizes of one model's files, the drafter's tensors included."""

    def __init__(self, model: StateModel) -> None:
        self._fixed_bytes = max_header_bytes(model)
        self._token_bytes = HEADER_BYTES_PER_TOKEN
        self._window_bytes: Counter[int] = Counter()  # by window: bytes of one position
        for layer in (*model.layers, *(model.draft.layers if model.draft is not None else ())):
            n_bytes = sum(tensor.n_bytes for tensor in slot_tensors([layer], 1, model.kv_dtype))
            if layer.space is Space.RECURRENT:
                self._fixed_bytes += n_bytes
            elif layer.space is Space.WINDOW and layer.window:
                self._window_bytes[layer.window] += n_bytes
            else:
                self._token_bytes += n_bytes

    def max_bytes(self, n_tokens: int) -> int:
        """Return the most bytes that the file of a slot takes."""
        windows = sum(n_bytes * min(n_tokens, window - 1) for window, n_bytes in self._window_bytes.items())
        return self._fixed_bytes + n_tokens * self._token_bytes + windows
