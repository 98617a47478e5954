"""Log-probabilities in both shapes: finite, and with tokens told apart."""

from __future__ import annotations

import math

from lucevisor.api.output import TokenRecord, chat_logprobs, completion_logprobs, token_text
from lucevisor.engine.request import TokenEvent
from tests.api.scripted_model import ids_of, tokenizer


def test_a_part_of_a_character_is_told_as_bytes():
    first, *rest = ids_of("ö")
    assert rest
    assert token_text(tokenizer(), first) == "bytes:\\xc3"
    assert token_text(tokenizer(), ids_of("Hello")[0]) == "Hello"


def test_chat_shape():
    a, b = ids_of("Hello")[0], ids_of("ö")[0]
    told = chat_logprobs(tokenizer(), [TokenRecord(TokenEvent(a, -0.5, ((a, -0.5), (b, -math.inf))), 0)])
    entry = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    other = {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3]}
    assert told == {"content": [{**entry, "top_logprobs": [entry, other]}], "refusal": None}


def test_completion_shape_holds_the_chosen_token_too():
    a, b = ids_of("Hello")[0], ids_of(",")[0]
    told = completion_logprobs(
        tokenizer(), [TokenRecord(TokenEvent(a, -2.0, ((b, -0.1),)), 0), TokenRecord(TokenEvent(b, -0.3), 5)]
    )
    assert told == {
        "tokens": ["Hello", ","],
        "token_logprobs": [-2.0, -0.3],
        "top_logprobs": [{",": -0.1, "Hello": -2.0}, {",": -0.3}],
        "text_offset": [0, 5],
    }


def test_a_missing_or_impossible_number_is_finite():
    for impossible in (math.nan, -math.inf, math.inf, None):
        record = TokenRecord(TokenEvent(5, impossible), 0)
        assert chat_logprobs(tokenizer(), [record])["content"][0]["logprob"] == -9999.0  # type: ignore[index]
