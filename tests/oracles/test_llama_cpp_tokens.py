"""Our tokenizers beside llama.cpp's: the demo model's, the tiny ones of the golden files, and those of published models
that llama.cpp's own tests carry.

Where the two differ on purpose, ours does as transformers (see ``tests/text``):

- Qwen's vocabularies normalise text to NFC; llama.cpp does not, so it is given the text in NFC.
- ``</s>`` is struck-out HTML in Qwen's vocabularies, an ordinary token; llama.cpp makes it a marker by its spelling.
- Foreign text never becomes a marker here; llama.cpp finds markers of the type "user defined" in it all the same.
"""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
from gguf import GGUFReader

from lucevisor.text.tokenizer import Tokenizer
from tests.oracles.peer import Peer, vocabulary_file
from tests.text.vocabularies import AWKWARD, DEMO_GGUF, NORMAL, ROOT, USER_DEFINED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GOLDEN = ROOT / "tests/data/golden"
HERE = {"demo": DEMO_GGUF} | {f"golden {n}": GOLDEN / n / "model.gguf" for n in ("qwen3", "qwen35", "laguna")}
"""Not Gemma's golden files: they pair Gemma's kind of tokenizer with byte letters and no byte tokens, where unknown
text is lost in llama.cpp and ``<unk>`` here.
"""
PUBLISHED = ("gemma-4", "qwen35", "qwen2")
NORMALISED = ("qwen2", "qwen35")
DOCUMENTS = ("README.md", "docs/families.md", "docs/protocol.md", "tests/text/vocabularies.py", "daemons/ops/basic.py")
SCRIPTS = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939), (0xE01, 0xE3A)]
SCRIPTS += [(0x2010, 0x2044), (0x3041, 0x30FE), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F)]


def mixtures(n: int) -> list[str]:
    """Random text out of several scripts, blanks and digits, so that every seam of the splitting rules occurs."""
    rng = random.Random(0)

    def piece() -> str:
        low, high = rng.choice(SCRIPTS)
        letters = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 5)))
        return letters + rng.choice(["", "", " ", "  ", "\n", "\r\n", "\t", "'s", "12345", " 6", "...", "_-"])

    return ["".join(piece() for _ in range(rng.randint(1, 12))) for _ in range(n)]


def compare(path: Path, peer: Peer) -> None:
    fields = GGUFReader(path).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer")}
    tokens = Tokenizer.from_gguf(metadata)
    texts = [*AWKWARD, *mixtures(400), *((ROOT / name).read_text() for name in DOCUMENTS)]
    normal = metadata.get("tokenizer.ggml.pre") in NORMALISED
    theirs = peer.tokenize(path, [unicodedata.normalize("NFC", text) if normal else text for text in texts])

    kinds = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    defined = [token for token, kind in kinds.items() if kind == USER_DEFINED]
    spelled = ["</s>"] if kinds.get("</s>") == NORMAL else []
    for mode, differing in (("plain", defined), ("special", spelled)):
        for text, ids in zip(texts, theirs[mode], strict=True):
            same = tokens.encode(text, parse_special=mode == "special") == ids
            assert same or any(token in text for token in differing), f"{mode}: {text[:200]!r}"
    assert [bytes.fromhex(piece) for piece in theirs["pieces"]] == [
        tokens.token_bytes(i) for i in range(tokens.n_vocab)
    ]


@pytest.mark.parametrize("name", HERE)
def test_tokenizers_here(name, peer):
    compare(HERE[name], peer)


@pytest.mark.parametrize("name", PUBLISHED)
def test_vocabularies_of_published_models(name, peer):
    path = vocabulary_file(name)
    if path is None:
        pytest.skip("this llama.cpp has no source tree beside it; `make oracle` unpacks one")
    compare(path, peer)
