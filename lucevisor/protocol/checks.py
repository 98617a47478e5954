"""Records of `doctor` checks and of layer timings for a placement.  No sockets, no tensors."""

from __future__ import annotations

import msgspec

from lucevisor.model.values import Dtype, LayerRange
from lucevisor.protocol.loading import ArenaPlan


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Layers to time on a device, with the embedding and the output matrix where set."""

    device: int
    layers: LayerRange
    embedding: bool = False
    output: bool = False


class Measure(msgspec.Struct, frozen=True):
    """Time each of ``spans`` for a slice of ``n_rows`` tokens from position 0, and for one token after it."""

    spans: list[Span]
    kv_dtype: Dtype
    n_rows: int
    threads: int = 0
    options: dict[str, str] = {}


class Tune(msgspec.Struct, frozen=True):
    """Measure on each of ``devices`` up to how many rows each kernel is the fastest for the model's matrices, and keep
    that for later loads."""

    devices: list[int]
    threads: int = 0
    options: dict[str, str] = {}


class Check(msgspec.Struct, frozen=True):
    """Compare one layer on every visible device with the float32 cpu reference, and map ``arenas``, whose descriptors
    travel with the frame.  With ``measure`` or ``tune``, time layers or kernels instead of comparing one."""

    files: list[str]
    layer: int
    dtype: Dtype
    arenas: list[ArenaPlan] = []
    measure: Measure | None = None
    tune: Tune | None = None


class CheckLine(msgspec.Struct, frozen=True):
    subject: str  # "cuda:0 layer 3", "arena"
    ok: bool
    detail: str


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Seconds for the layers of a Span, for one token and for ``Measure.n_rows``.  ``end_``: its embedding and output,
    the output for one row in both."""

    decode_s: float
    prefill_s: float
    end_decode_s: float = 0.0
    end_prefill_s: float = 0.0


class Checked(msgspec.Struct, frozen=True):
    """Answer to Check.  ``timings``: one per Span, in order; empty when one failed, which ``lines`` then reports.
    ``lines``: also one for each limit that was tuned.  ``warnings``: what costs speed and can be fixed."""

    lines: list[CheckLine]
    timings: list[Timing] = []
    warnings: list[str] = []
