"""Pre-tokenizers by `tokenizer.ggml.pre`: normalisation and splitting of text before BPE, as the Hugging Face tokenizer
has it.

Sources: llama.cpp `src/llama-vocab.cpp` (names and aliases), transformers `tokenization_qwen2.py`,
`tokenization_qwen3_5.py`, `tokenization_gemma.py`, and the published `tokenizer.json` of Llama 3, GPT-2 and Laguna."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from tokenizers import Regex, normalizers, pre_tokenizers


class Normalization(Enum):
    """Normalisation of text before it is split."""

    NONE = auto()
    NFC = auto()
    METASPACE = auto()  # each space becomes U+2581, as SentencePiece writes it


@dataclass(frozen=True)
class SplitRule:
    """One regular expression (Oniguruma syntax) that splits text; `behavior`: what happens to a match."""

    pattern: str
    behavior: str = "isolated"


@dataclass(frozen=True)
class PreTokenizerSpec:
    """One way to turn text into the symbols that BPE merges.

    `byte_level`: symbols are the 256 letters of GPT-2's byte alphabet; else characters, with `<0xNN>` for unknown ones.
    `wordpiece`: words are cut into the longest tokens from the left instead, as BERT's are.
    `add_bos`: raw prompts begin with BOS where the file does not say.
    `prefix_space`: a space is put before a text, and before one behind a marker.
    `ignore_merges`: a piece that is a token itself becomes that token, whatever the merges.
    `whole_text`: tokens of any type that match this pattern entirely are found in text first.
    `added_text`: user-defined tokens that are ordinary text; other user-defined tokens are template markers.
    """

    cuts: tuple[SplitRule, ...] = ()
    normal: Normalization = Normalization.NONE
    byte_level: bool = True
    wordpiece: bool = False
    add_bos: bool = False
    prefix_space: bool = False
    ignore_merges: bool = False
    whole_text: re.Pattern[str] | None = None
    added_text: re.Pattern[str] = re.compile(r"\s+")

    def normalizer(self) -> normalizers.Normalizer | None:
        if self.normal is Normalization.NFC:
            return normalizers.NFC()
        if self.normal is Normalization.METASPACE:
            spaces = normalizers.Replace(" ", "▁")
            return normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if self.prefix_space else spaces
        return None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer | None:
        """Return the pre-tokenizer of the `tokenizers` library, or None when text is merged as one piece."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(cut.pattern), cut.behavior) for cut in self.cuts
        ]
        if self.byte_level:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps) if steps else None


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# llama.cpp's own fallback for files that name no pre-tokenizer; no published tokenizer.json has it.
DEFAULT = PreTokenizerSpec(
    (
        SplitRule(r"[\p{P}\$\+<=>\^~\|]+"),
        SplitRule(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        SplitRule(r"\p{N}+"),
        SplitRule(r"[0-9][0-9][0-9]"),
    )
)
GPT2 = PreTokenizerSpec((SplitRule(_GPT2),))
SMOLLM = PreTokenizerSpec((SplitRule(r"\p{N}"), SplitRule(_GPT2)))
LLAMA3 = PreTokenizerSpec((SplitRule(_LLAMA3),), ignore_merges=True, add_bos=True)
GLM4 = replace(LLAMA3, add_bos=False)
CHATGLM = PreTokenizerSpec((SplitRule(_LLAMA3),))
GPT4O = PreTokenizerSpec((SplitRule(_O200K),))
TEKKEN = PreTokenizerSpec((SplitRule(_TEKKEN),), ignore_merges=True, add_bos=True)
FALCON = PreTokenizerSpec(
    (
        SplitRule(r"[\p{P}\$\+<=>\^~\|`]+"),
        SplitRule(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        SplitRule(r"[0-9][0-9][0-9]"),
    )
)
# Its user-defined single letters are those of words, as in its tokenizer.json.
DEEPSEEK_CODER = PreTokenizerSpec(
    (
        SplitRule(r"[\r\n]"),
        SplitRule(r"\s?\p{L}+"),
        SplitRule(r"\s?\p{P}+"),
        SplitRule("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        SplitRule(r"\p{N}"),
    ),
    added_text=re.compile(r"\s+|[\u0080-\U0010ffff]"),
)
DEEPSEEK3 = PreTokenizerSpec(
    (
        SplitRule(r"\p{N}{1,3}"),
        SplitRule("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        SplitRule(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    )
)
# Qwen's tokenizer.json normalises to NFC; llama.cpp does not, so its ids differ for decomposed accents and Hangul jamo.
QWEN2 = PreTokenizerSpec((SplitRule(_QWEN2),), normal=Normalization.NFC)
QWEN35 = PreTokenizerSpec((SplitRule(_QWEN35),), normal=Normalization.NFC)
# Laguna's tokenizer.json keeps CR LF together and glues each run of line ends to what follows; llama.cpp cuts at LF
# only, so its ids differ for CR LF text.
LAGUNA = PreTokenizerSpec((SplitRule(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), SplitRule(_QWEN2)))
# Gemma merges over the whole text. No token mixes line ends with anything else, so runs of them are found first, the
# longest token winning; the HTML tags that older files mark as user-defined are text as well.
GEMMA4 = PreTokenizerSpec(
    normal=Normalization.METASPACE,
    byte_level=False,
    whole_text=re.compile(r"\n+"),
    added_text=re.compile(r"\s+|▁+|</?[a-z][a-z0-9]*>"),
)
# Llama 2, Mistral, Gemma 3: user-defined runs of blanks and the HTML tags of Gemma are text.
SENTENCEPIECE_SPEC = PreTokenizerSpec(
    normal=Normalization.METASPACE,
    byte_level=False,
    add_bos=True,
    added_text=re.compile(r"\s+|▁+|</?[a-z][a-z0-9]*>"),
)

WORDPIECE_SPEC = replace(SENTENCEPIECE_SPEC, wordpiece=True, prefix_space=True)


def _rows(*rows: tuple[PreTokenizerSpec, Iterable[str]]) -> dict[str, PreTokenizerSpec]:
    return {name: scheme for scheme, names in rows for name in names}


PRE_TOKENIZERS: dict[str, PreTokenizerSpec] = _rows(
    (DEFAULT, ["default"]),
    (GPT2, ["gpt-2", "phi-2"]),
    (SMOLLM, ["smollm", "starcoder", "refact"]),
    (LLAMA3, ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"]),
    (GLM4, ["glm4"]),
    (CHATGLM, ["chatglm-bpe", "smaug-bpe", "dbrx"]),
    (GPT4O, ["gpt-4o", "llama4", "minimax-m2"]),
    (TEKKEN, ["tekken"]),
    (FALCON, ["falcon"]),
    (DEEPSEEK_CODER, ["deepseek-coder"]),
    (DEEPSEEK3, ["deepseek-v3", "hunyuan-dense"]),
    (QWEN2, ["qwen2", "deepseek-r1-qwen"]),
    (QWEN35, ["qwen35"]),
    (LAGUNA, ["laguna"]),
    (GEMMA4, ["gemma4"]),
)
