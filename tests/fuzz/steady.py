"""What every fuzzer here shares: seeds that a failure names, a few cases by default and many with ``-m slow``, and
memory that stays as it was after the first tenth.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE_KIB = 4


def rss_kib() -> int:
    """Resident memory of this process in use: without garbage in cycles, and without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB


def amounts(quick: int, full: int) -> list[object]:
    """Parameters of a test: a number of cases by default, another with ``-m slow``."""
    slow = [pytest.mark.slow, pytest.mark.timeout(3600)]
    return [pytest.param(quick, id=str(quick)), pytest.param(full, id=str(full), marks=slow)]


def run(name: str, n: int, case: Callable[[random.Random], str], *, growth_kib: int) -> Counter[str]:
    """Run ``n`` cases, each of its own seed; returns how often each outcome came.

    A failure names the seed: ``case(random.Random(seed))`` repeats it alone.
    """
    outcomes: Counter[str] = Counter()
    warm_kib = 0
    for i in range(n):
        seed = f"{name} {i}"
        try:
            outcomes[case(random.Random(seed))] += 1
        except BaseException as error:
            error.add_note(f"seed {seed!r}")
            raise
        if i == n // 10:
            warm_kib = rss_kib()
    grown_kib = rss_kib() - warm_kib
    told = f"{name}: {n} cases, {dict(outcomes.most_common(12))}, {warm_kib >> 10} MiB at 10 %, grown {grown_kib} KiB"
    print(told, file=sys.stderr)
    assert grown_kib < growth_kib, told
    return outcomes


BYTES = (0, 1, 9, 10, 13, 32, 34, 39, 44, 46, 47, 58, 59, 61, 91, 92, 93, 123, 125, 127, 128, 192, 237, 255)


def mutated(rng: random.Random, data: bytes, n: int = 3) -> bytes:
    """The bytes with up to ``n`` pieces flipped, put in, taken out, doubled or moved."""
    out = bytearray(data)
    for _ in range(rng.randint(1, n)):
        at, length = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, rng.randrange(40)))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at:at] = bytes(rng.choice(BYTES) for _ in range(length))
            case 2:
                del out[at : at + length]
            case 3:
                out[at:at] = out[at : at + length] * rng.choice((1, 2, 50))
            case 4:
                piece = out[at : at + length]
                del out[at : at + length]
                to = rng.randrange(len(out) + 1)
                out[to:to] = piece
            case _:
                out[at : at + length] = bytes(rng.choice(BYTES) for _ in range(length))
    return bytes(out)
