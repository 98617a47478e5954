"""Runs llama.cpp for the tests beside it: ``PYTHON llama_cpp_runner.py JOBS.json``, PYTHON being an interpreter that
has llama-cpp-python and numpy.  Knows nothing of Lucevisor.

JOBS.json is a list of objects, done in order; ``do`` says which function below, the rest are its arguments.  Arithmetic
is what llama.cpp does on a processor with float32 keys and values and without flash attention, in one batch.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np

F32 = 0
"""The number of ggml's type F32, for keys and values."""
N_BATCH = 512


@contextmanager
def opened(path: str, *, vocab_only: bool = False) -> Iterator[lib.llama_model_p]:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.vocab_only = vocab_only
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        sys.exit(f"llama.cpp does not open {path}")
    yield model
    lib.llama_model_free(model)


def logits(model: str, ids: list[int], out: str, beta_fast: float | None = None) -> None:
    """Logits [T, V] of every position of ``ids`` (at most 512) to the .npy file ``out``.  ``beta_fast``: YaRN's, in
    place of llama.cpp's own default.
    """
    params = plain_params()
    if beta_fast is not None:
        params.yarn_beta_fast = beta_fast
    with opened(model) as handle, context_of(handle, params) as context:
        np.save(out, np.stack(decoded(handle, context, ids)))


def scores(model: str, windows: list[list[int]], out: str) -> None:
    """To the .npy file ``out``: for each window (at most 512 ids, each by itself) the log-probability of each id after
    its first, [n, T - 1].
    """
    params = plain_params()
    found = []
    with opened(model) as handle:
        for ids in windows:
            with context_of(handle, params) as context:
                logits = np.stack(decoded(handle, context, ids)[:-1]).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            of_sum = np.log(np.exp(logits).sum(axis=1))
            found.append(logits[np.arange(len(ids) - 1), ids[1:]] - of_sum)
    np.save(out, np.stack(found))


def greedy(model: str, prompts: list[list[int]], n: int, out: str) -> None:
    """To the JSON file ``out``: the ``n`` likeliest tokens after each prompt, one after the other, and how far the
    second best logit was behind each.
    """
    params, found = plain_params(), []
    with opened(model) as handle:
        for prompt in prompts:
            tokens: list[int] = []
            margins: list[float] = []
            with context_of(handle, params) as context:
                rows, position = prompt, 0
                while len(tokens) < n:
                    logits = decoded(handle, context, rows, position)[-1]
                    second, best = np.sort(np.partition(logits, -2)[-2:])
                    tokens.append(int(logits.argmax()))
                    margins.append(float(best - second))
                    rows, position = tokens[-1:], position + len(rows)
            found.append({"tokens": tokens, "margins": margins})
    Path(out).write_text(json.dumps(found))


def plain_params() -> lib.llama_context_params:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_BATCH
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = F32
    return params


@contextmanager
def context_of(handle: lib.llama_model_p, params: lib.llama_context_params) -> Iterator[lib.llama_context_p]:
    context = lib.llama_init_from_model(handle, params)
    if not context:
        sys.exit("llama.cpp makes no context")
    yield context
    lib.llama_free(context)


def decoded(
    handle: lib.llama_model_p, context: lib.llama_context_p, ids: list[int], position: int = 0
) -> list[np.ndarray]:
    """Logits [V] of each of ``ids``, which are at ``position`` and behind it."""
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    code = lib.llama_decode(context, batch)
    if code:
        sys.exit(f"llama_decode returned {code}")
    width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(handle))
    rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (width,)).copy() for i in range(len(ids))]
    lib.llama_batch_free(batch)
    return rows


def quantize(source: str, target: str, kind: str) -> None:
    """``target`` = ``source`` in the mix ``kind`` as llama-quantize names it; ``F32`` dequantises."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = lib.LLAMA_FTYPE_ALL_F32 if kind == "F32" else getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    params.nthread = 1
    code = lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if code:
        sys.exit(f"llama_model_quantize of {source} to {kind} returned {code}")


def tokenize(model: str, texts: list[str], out: str) -> None:
    """Ids of every text, special tokens parsed and not, and the bytes of every token (as hex), to the JSON file
    ``out``.
    """
    with opened(model, vocab_only=True) as handle:
        vocab = lib.llama_model_get_vocab(handle)

        def ids(text: str, special: bool) -> list[int]:
            data = text.encode()
            found = (lib.llama_token * (len(data) + 8))()
            n = lib.llama_tokenize(vocab, data, len(data), found, len(found), False, special)
            return list(found[:n])

        def piece(token: int) -> str:
            buffer = ctypes.create_string_buffer(4096)
            n = lib.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
            return buffer.raw[:n].hex()

        found = {
            "plain": [ids(text, False) for text in texts],
            "special": [ids(text, True) for text in texts],
            "pieces": [piece(i) for i in range(lib.llama_vocab_n_tokens(vocab))],
        }
    Path(out).write_text(json.dumps(found))


def about(out: str) -> None:
    """Version of llama-cpp-python, and what llama.cpp was built with, to the JSON file ``out``."""
    Path(out).write_text(
        json.dumps({"version": llama_cpp.__version__, "system": lib.llama_print_system_info().decode()})
    )


JOBS = {
    "about": about,
    "greedy": greedy,
    "logits": logits,
    "scores": scores,
    "quantize": quantize,
    "tokenize": tokenize,
}

if __name__ == "__main__":
    lib.llama_backend_init()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        JOBS[job.pop("do")](**job)
