"""Token sequences in which a breaker's text begins and ends, so that the DRY penalty finds it however it is tokenised.

Knows texts and tokens.  Invariant: one of a breaker's sequences matches wherever it ends in a text, if it begins inside
one token and continues with its own tokenisation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from lucevisor.text.tokenizer import Tokenizer

MAX_SEQUENCES: Final = 16384


class TooManyTokens(Exception):
    """A breaker is in so many tokens that hardly any text lies between two of them."""


def breaker_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of all breakers: one token each, or a token that ends with a breaker's beginning and
    the tokens of its rest.  Looks at the whole vocabulary.  Raises TooManyTokens."""
    sequences = {sequence for text in texts for sequence in _sequences(tokenizer, text)}
    if len(sequences) > MAX_SEQUENCES:
        raise TooManyTokens(f"the breakers are in {len(sequences)} tokens, more than {MAX_SEQUENCES}")
    return tuple(sorted(sequences))


@lru_cache(maxsize=64)
def _sequences(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], ...]:
    raw, sequences = text.encode("utf-8", "surrogatepass"), list[tuple[int, ...]]()
    beginnings = [raw[:n] for n in range(len(raw) - 1, 0, -1)]
    for token in range(tokenizer.n_vocab):
        word = tokenizer.token_bytes(token)
        if raw in word:
            sequences.append((token,))
            continue
        sequences += [
            (token, *tokenizer.encode(rest))
            for beginning in beginnings
            if word.endswith(beginning) and (rest := _decoded(raw[len(beginning) :]))
        ]
    return tuple(sequences)


def _decoded(raw: bytes) -> str:
    """Return bytes as text, "" if they are not."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""
