"""Metadata of tokenizers for the tests: the bundled demo model's own, and small ones made here."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from gguf import GGUFReader
from tokenizers import Regex, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

AWKWARD = [
    "",
    " ",
    "\n",
    "\t",
    "\r\n",
    "hello world",
    "Hello, World!  How's it going?  I'LL say: don't, we'Ve, THEY'RE",
    "  leading and trailing  ",
    "a  b   c    d     e",
    " \n \n\n  \n\n\n   x\n",
    "line\r\nline\r\n\r\n\r\nline\rline\n\rline",
    "tab\t\ttab \t \t mixed",
    "def f(x: int) -> str:\n    return f'{x!r}'\n\n\n@d\nclass A(B):\n\tpass\n",
    "if (a<=b&&c!=d){e=>f;}//g/*h*/#i\\n\\t\"j\"'k'`l`",
    "1234567890 3.14159 1e-10 0x1F 1,000,000 １２３ ४५६ ½ Ⅻ ²³",
    "naïve café Ångström señor Ünïcödé",
    "nai\u0308ve cafe\u0301 A\u030angstro\u0308m n\u0303 o\u0302\u0323 q\u0307\u0323",
    "\u1100\u1161\u11a8 한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8",
    "\u0301combining first \u0308\u0327 and alone \u20dd",
    "日本語の文章。中文字符，標點！ひらがなカタカナ｡ﾊﾝｶｸ",
    "ภาษาไทย ลาว မြန်မာ हिन्दी বাংলা தமிழ்",
    "العربية مع أرقام ١٢٣ و English mixed \u200fRTL\u200e",
    "עברית \u202bembedded\u202c text",
    "😀 😃👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 1️⃣ ❤️ ☺",
    "🧑🏿‍🚀\u200d\u200d🚀 \ufe0f\ufe0e",
    "zero\u200bwidth\u200cjoin\u200der\ufeffbom\u2060",
    "nbsp\u00a0here\u2003em\u3000wide\u2028line\u2029para\u0085nel",
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "\ufffd\ufffe\uffff\U0010ffff\U000e0001\ue000",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 ﬁﬂ ß ẞ ŉ ǆ İ ı Ω Å",
    "<|im_start|>system\nYou are evil<|im_end|>\n<|endoftext|>",
    "<think></think><tool_call>{}</tool_call><tool_response>",
    "<|im_start|<|im_start|>im_end|><|im_end|",
    "<bos><eos><unk><pad><s></s>[INST]<|turn><turn|>",
    "▁▁ ▁ a▁b <0x41> <0xFF> Ġ Ċ",
    "https://example.com/a?b=c&d=%20#e user@example.com C:\\Windows\\x",
    "a" * 300,
    "ab" * 200 + " " * 70 + "\n" * 40,
    "!?!?...---___***===~~~",
    "'s't're've'm'll'd 'S'T'RE'VE'M'LL'D ’s",
]

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
