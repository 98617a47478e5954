"""Metadata of tokenizers for the tests: the bundled demo model's own, and small ones made here."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from gguf import GGUFReader
from tokenizers import Regex, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

ROOT = Path(__file__).parents[2]
DEMO_GGUF = ROOT / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"
DEMO_JSON = ROOT / "tests/data/demo-tokenizer/tokenizer.json"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@functools.cache
def demo_metadata() -> dict[str, object]:
    """The tokenizer part of the demo model's GGUF header."""
    fields = GGUFReader(DEMO_GGUF).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith(("tokenizer", "general"))}


@functools.cache
def demo_oracle() -> Library:
    """The Hugging Face tokenizer that the demo model was trained with."""
    return Library.from_file(str(DEMO_JSON))


def byte_metadata(pre: str, markers: dict[str, int], **more: object) -> dict[str, object]:
    """A byte-level tokenizer with few merges and the given markers (text to token type)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "i n", "Ċ Ċ", "Ġ Ġ", "a n", "an d"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = [*letters, *words, *markers]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(letters) + len(words)) + list(markers.values()),
        "tokenizer.ggml.merges": merges,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


GEMMA_MARKERS = {
    **dict.fromkeys(["<pad>", "<eos>", "<bos>"], CONTROL),
    "<unk>": UNKNOWN,
    **dict.fromkeys(["<|turn>", "<turn|>"], CONTROL),
    **dict.fromkeys(["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'], USER_DEFINED),
}


@functools.cache
def gemma_metadata() -> dict[str, object]:
    """A small tokenizer of Gemma's kind, trained here: spaces as U+2581, byte tokens, runs of line ends."""
    library = Library(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    specials = [*GEMMA_MARKERS, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\n\n", "\n\n\n", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False)
    library.train_from_iterator([Path(__file__).read_text(), "the cat and the dog  sat\t\ton  it. " * 20], trainer)
    vocab = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [GEMMA_MARKERS.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    merges = json.loads(library.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": vocab["<bos>"],
        "tokenizer.ggml.eos_token_id": vocab["<eos>"],
        "tokenizer.ggml.unknown_token_id": vocab["<unk>"],
        "tokenizer.ggml.add_bos_token": True,
    }
