"""Small value types that supervisor and daemons share.  Invariant: no I/O, no torch, no defaults that depend on the
machine."""

from __future__ import annotations

from enum import StrEnum

import msgspec

PAGE_TOKENS = 64
"""Token positions of one page, in every pool of every shard."""


class Backend(StrEnum):
    """An accelerator stack; torch calls the devices of both cuda and hip ``cuda``."""

    CPU = "cpu"
    CUDA = "cuda"
    HIP = "hip"


class Dtype(StrEnum):
    """Number formats of activations, boundary activations and attention state."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    Q8_0 = "q8_0"  # attention state only: blocks of 32 int8 with one float16 scale


class Space(StrEnum):
    """Layers whose state has the same lifetime."""

    FULL = "full"  # attention over all positions: pages live as long as the sequence
    WINDOW = "window"  # sliding attention: pages older than the window are released
    RECURRENT = "recurrent"  # one state per sequence, overwritten each step


SCALE = ".scale"
"""Ends the name of a state tensor that holds the scales of q8_0 codes."""


class LayerRange(msgspec.Struct, frozen=True, array_like=True):
    """Half-open range ``[start, stop)`` of absolute layer indices."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"[{self.start},{self.stop})"


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One state of one file on this host, by what fstat says and the sha256 of its GGUF header.

    Every write through a descriptor moves ``ctime_ns``; ``os.utime`` cannot set it back.
    """

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    header: str


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the tail stage turns the logits of one sequence into a token.

    ``temperature`` 0 is greedy.  ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.
    ``repetition_penalty`` 1,
    ``presence_penalty`` 0 and ``frequency_penalty`` 0 switch a penalty off; penalties count the whole prompt and
    output.
    ``seed`` makes the choice a function of (seed, position, logits) alone, so it does not depend on the batch, the
    placement or a restart.  ``n_top_logprobs`` -1: no log-probabilities; n >= 0: that of the chosen token and the n
    best.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    n_top_logprobs: int = -1
    banned: tuple[int, ...] = ()  # ids never sampled (padding rows of the vocabulary, ignore_eos)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def dtype_bytes(dtype: Dtype, n: int) -> int:
    """Bytes of ``n`` consecutive numbers stored as ``dtype`` (q8_0: ``n`` is a multiple of 32, or is rounded up to
    one)."""
    if dtype is Dtype.Q8_0:
        return (n + 31) // 32 * 34
    return n * (4 if dtype is Dtype.FLOAT32 else 2)
