"""Records what llama.cpp's samplers do, for tests/daemons/test_sampling.py.

    python -m tests.oracles.llama_samplers .../libllama.so > tests/data/golden/llama-samplers.json

The library: of any build of llama.cpp, such as the npm package @node-llama-cpp/linux-x64; recorded with release 0.5.0.
Left out, as llama.cpp's results are accidents there: typical_p behind top_n_sigma (a logarithm of 0), and mirostat 1
with distributions so flat that its number of tokens overflows.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any


class TokenData(Structure):
    _fields_ = (("id", c_int32), ("logit", c_float), ("p", c_float))


class TokenArray(Structure):
    _fields_ = (("data", POINTER(TokenData)), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool))


class Vector(Structure):
    """libstdc++'s std::vector."""

    _fields_ = (("begin", c_void_p), ("end", c_void_p), ("capacity", c_void_p))


class Library:
    """Constructors of samplers by their names, and what is done with one."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        self._lib.llama_sampler_apply.argtypes = [c_void_p, c_void_p]
        self._lib.llama_sampler_accept.argtypes = [c_void_p, c_int32]

    def make(self, symbol: str, *types: Any) -> Callable[..., int]:
        function = self._lib[symbol]
        function.argtypes, function.restype = list(types), c_void_p
        return function

    def apply(self, sampler: int, array: TokenArray) -> None:
        self._lib.llama_sampler_apply(sampler, byref(array))

    def accept(self, sampler: int, token: int) -> None:
        self._lib.llama_sampler_accept(sampler, token)


def token_array(logits: Sequence[float]) -> TokenArray:
    return TokenArray((TokenData * len(logits))(*[TokenData(i, x, 0.0) for i, x in enumerate(logits)]), len(logits), -1)


def entries(array: TokenArray) -> list[TokenData]:
    return [array.data[i] for i in range(array.size)]


def draw_logits(draw: random.Random, n: int, scale: float) -> list[float]:
    return [round(draw.gauss(0, scale), 3) for _ in range(n)]


CHAINS: list[dict[str, float]] = [
    {"typical_p": 0.3},
    {"typical_p": 0.9},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5},
    {"xtc": 0.05},
    {"xtc": 0.2},
    {"xtc": 0.6},
    {"top_k": 15, "typical_p": 0.7, "top_p": 0.8, "min_p": 0.1, "xtc": 0.1},
]


def filters(library: Library, draw: random.Random) -> list[dict[str, Any]]:
    make = library.make
    makers: dict[str, Callable[[float], int]] = {
        "typical_p": lambda v: make("llama_sampler_init_typical", c_float, c_size_t)(v, 0),
        "top_n_sigma": lambda v: make("llama_sampler_init_top_n_sigma", c_float)(v),
        "xtc": lambda v: make("llama_sampler_init_xtc", c_float, c_float, c_size_t, c_uint32)(1.0, v, 0, 1),
        "top_k": lambda v: make("llama_sampler_init_top_k", c_int32)(int(v)),
        "top_p": lambda v: make("llama_sampler_init_top_p", c_float, c_size_t)(v, 0),
        "min_p": lambda v: make("llama_sampler_init_min_p", c_float, c_size_t)(v, 0),
    }
    normalise = make("llama_sampler_init_dist", c_uint32)(1)
    found = []
    for scale in (0.3, 1.0, 3.0):
        for n in (20, 150):
            for chain in CHAINS:
                logits = draw_logits(draw, n, scale)
                array = token_array(logits)
                for name, value in chain.items():
                    library.apply(makers[name](value), array)
                library.apply(normalise, array)
                kept = sorted((e.id, round(e.p, 7)) for e in entries(array) if e.logit > -1e30 and e.p > 0)
                found.append({"logits": logits, "settings": chain, "kept": kept})
    return found


def mirostats(library: Library, draw: random.Random) -> list[dict[str, Any]]:
    first = library.make("llama_sampler_init_mirostat", c_int32, c_uint32, c_float, c_float, c_int32)
    second = library.make("llama_sampler_init_mirostat_v2", c_uint32, c_float, c_float)
    found = []
    for version in (1, 2):
        for tau, eta in ((5.0, 0.1), (2.0, 0.3), (3.0, 0.5)):
            for scale in (1.0, 2.0, 3.0):
                n, steps = 120, []
                sampler = first(n, 7, tau, eta, 100) if version == 1 else second(7, tau, eta)
                for _ in range(6):
                    logits = draw_logits(draw, n, scale)
                    array = token_array(logits)
                    library.apply(sampler, array)
                    chosen = array.data[array.selected]
                    library.accept(sampler, chosen.id)
                    steps.append({"logits": logits, "n_kept": array.size, "token": chosen.id, "p": round(chosen.p, 7)})
                found.append({"version": version, "tau": tau, "eta": eta, "steps": steps})
    return found


def vector(items: ctypes.Array[Any]) -> Vector:
    start = ctypes.addressof(items)
    return Vector(start, start + ctypes.sizeof(items), start + ctypes.sizeof(items))


def repetitions(library: Library, draw: random.Random) -> list[dict[str, Any]]:
    types = (c_float, c_float, c_int32, c_int32, c_void_p)
    make = library.make("_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE", *types)
    found = []
    for case in range(60):
        vocabulary, n = draw.choice([3, 6, 12]), draw.choice([5, 12, 40, 120])
        context = [draw.randrange(vocabulary) for _ in range(n)]
        context += context[: n // 3] if case % 3 == 0 else []
        context = [1] * 30 if case % 7 == 0 else context
        breakers = [] if case % 2 else [[draw.randrange(vocabulary)]]
        breakers += [[draw.randrange(vocabulary), draw.randrange(vocabulary)]] if case % 4 == 0 else []
        multiplier, base = draw.choice([0.8, 2.0]), draw.choice([1.0, 1.2, 1.75, 4.0])
        allowed, last_n = draw.choice([1, 2, 3]), draw.choice([-1, 10, 50])
        arrays = [(c_int32 * len(one))(*one) for one in breakers]
        outer = (Vector * len(arrays))(*map(vector, arrays))
        sampler = make(multiplier, base, allowed, 1024 if last_n < 0 else last_n, byref(vector(outer)))
        for token in context:
            library.accept(sampler, token)
        array = token_array([0.0] * vocabulary)
        library.apply(sampler, array)
        logits = [e.logit for e in sorted(entries(array), key=lambda e: e.id)]
        settings = {"multiplier": multiplier, "base": base, "allowed_length": allowed, "last_n": last_n}
        found.append({"context": context, **settings, "breakers": breakers, "logits": logits})
    return found


if __name__ == "__main__":
    of, generator = Library(sys.argv[1]), random.Random(5)
    recorded = {
        "filters": filters(of, generator),
        "mirostat": mirostats(of, generator),
        "dry": repetitions(of, generator),
    }
    json.dump(recorded, sys.stdout)
