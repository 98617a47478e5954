"""Whole prompts: what is kept, what never goes, what a growing chat keeps of its beginning, and what failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.compression.compressor import CompressionSettings, Compressor
from lucevisor.compression.selection import CHUNK_TOKENS
from lucevisor.compression.windows import QUERY_TOKENS, QUESTION_TOKENS, Windows, align_scores
from lucevisor.errors import ScoringError
from lucevisor.model.gguf_files import open_model
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
METADATA = open_model([ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"]).metadata
TEXTS = Tokenizer.from_gguf(METADATA)
WORDS = [f"{first}{last} " for first in ("tin", "oak", "sea", "ice") for last in ("man", "ton", "side", "ward", "born")]


class Rarity:
    """A scorer: a token of the window that is also in the question scores one over how often it occurs."""

    def __init__(self, window_tokens: int = 512) -> None:
        self.window_tokens = window_tokens
        self.windows: list[list[int]] = []
        self.failing = False

    async def score(self, tokens: Sequence[int], n_query: int) -> Sequence[float]:
        await asyncio.sleep(0)
        if self.failing:
            raise ScoringError("the scoring model is unavailable: group x is BACKOFF")
        assert len(tokens) <= self.window_tokens
        assert 0 < n_query <= QUERY_TOKENS
        self.windows.append(list(tokens))
        asked, window = set(tokens[-n_query:]), list(tokens)
        return [1.0 / window.count(token) if token in asked else 0.0 for token in window]


def made(ratio: float = 0.2, threshold: int = 0, scorer: Rarity | None = None, **more) -> Compressor:
    settings = CompressionSettings(threshold=threshold, keep_ratio=ratio, **more)
    return Compressor(settings, Windows(TEXTS, scorer or Rarity()))


def text_of(n_words: int, seed: int = 0) -> str:
    return "".join(WORDS[(seed + 7 * i * i) % len(WORDS)] for i in range(n_words))


async def test_a_fact_that_the_question_names_stays() -> None:
    ids = TEXTS.encode(f"{text_of(400)}The secret number of the harbor is 73935. {text_of(400, 3)}")
    ids += TEXTS.encode("The secret number of the harbor is ")
    found = await made(0.1).compress(ids, [], [])
    assert found.outcome == "compressed"
    assert "harbor is 73935" in TEXTS.decode(found.ids)
    assert abs(found.n_kept - 0.1 * len(ids)) <= CHUNK_TOKENS
    assert found.n_before == len(ids)


@given(
    n_words=st.integers(1, 700),
    ratio=st.sampled_from([0.05, 0.1, 0.3, 0.6, 1.0]),
    threshold=st.sampled_from([0, 400, 10**6]),
    window=st.sampled_from([256, 512, 4096]),
)
def test_what_is_kept_is_in_order_and_as_much_as_asked(n_words, ratio, threshold, window):
    ids = TEXTS.encode(text_of(n_words))
    found = asyncio.run(made(ratio, threshold, Rarity(window)).compress(ids, [], []))
    if len(ids) < threshold:
        assert found.outcome == "short"
    if found.outcome != "compressed":
        assert found.ids == ids
        return
    assert abs(found.n_kept - ratio * len(ids)) <= CHUNK_TOKENS
    left = iter(ids)
    assert all(token in left for token in found.ids), "a subsequence of the prompt"
    assert found.ids[-QUERY_TOKENS:] == ids[-len(found.ids[-QUERY_TOKENS:]) :]


async def test_windows_are_short_and_end_with_the_question() -> None:
    scorer = Rarity(window_tokens=400)
    ids = TEXTS.encode(text_of(600))
    await made(scorer=scorer).compress(ids, [], [])
    assert len(scorer.windows) > 2
    assert all(window[-QUESTION_TOKENS:] == ids[-QUESTION_TOKENS:] for window in scorer.windows)
    scored = [token for window in scorer.windows for token in window[:-QUESTION_TOKENS]]
    assert scored == ids[:-QUESTION_TOKENS], "each token once, and the question not at all"


def chat(*contents: str) -> tuple[list[int], list[int], list[str]]:
    """A chat with a system prompt, user first, and its roles."""
    roles = ["system", *(["user", "assistant"] * len(contents))[: len(contents)]]
    messages = [{"role": r, "content": c} for r, c in zip(roles, ("You are terse.", *contents), strict=True)]
    template = ChatTemplate.from_gguf(METADATA)
    assert template is not None
    prompt = template.render(messages).encoded(TEXTS)
    return prompt.ids, prompt.turn_ends, roles


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def test_markers_system_prompt_and_turn_ends_stay() -> None:
    ids, ends, roles = chat(text_of(500) + "What is this?")
    found = await made(0.1).compress(ids, ends, roles)
    markers = [token for token in ids if TEXTS.is_marker(token)]
    assert [token for token in found.ids if TEXTS.is_marker(token)] == markers
    assert TEXTS.decode(found.ids, skip_special=False).startswith("<|im_start|>system\nYou are terse.<|im_end|>\n")
    assert found.turn_ends == TEXTS.turn_ends(found.ids)
    content = len(ids) - len([*markers])
    assert abs(found.n_kept - len(markers) - 0.1 * content) <= CHUNK_TOKENS + 30  # the words of the template


async def test_a_growing_chat_keeps_its_beginning_so_prefix_slots_match() -> None:
    """Only turns that have aged shrink; one that has been shortened stays as it is, whatever is asked later."""
    compressor, scorer = made(0.1, scorer=(scorer := Rarity())), scorer
    turns = [text_of(400) + "First?", "One.", text_of(500, 3) + "Second?", "Two.", "Third?", "Three.", "Fourth?"]
    prompts = [await compressor.compress(*chat(*turns[: n + 1])) for n in range(0, len(turns), 2)]
    first, second, third, fourth = prompts
    assert shared(first.ids, second.ids) >= first.n_kept - 8, "all but the generation prompt"
    long = len(TEXTS.encode(turns[2]))
    assert second.n_kept > first.n_kept + long, "the last turns are whole"
    assert third.n_kept < second.n_kept, "the second question has aged"
    assert shared(second.ids, third.ids) >= first.n_kept, "all before the turn that aged"
    assert shared(third.ids, fourth.ids) >= third.n_kept - 8, "nothing else changes"
    n_windows = len(scorer.windows)
    again = await compressor.compress(*chat(*turns))
    assert again.ids == fourth.ids
    assert len(scorer.windows) == n_windows, "nothing is scored twice"
    assert compressor.n_remembered_parts == 2


async def test_a_prompt_that_cannot_be_scored_stays_whole_and_says_why() -> None:
    scorer = Rarity()
    compressor, ids = made(scorer=scorer), TEXTS.encode(text_of(500))
    scorer.failing = True
    found = await compressor.compress(ids, [], [])
    assert (found.outcome, found.ids) == ("failed", ids)
    assert "group x is BACKOFF" in found.reason
    scorer.failing = False
    assert (await compressor.compress(ids, [], [])).outcome == "compressed"
    assert compressor.statistics.outcomes == {"compressed": 1, "short": 0, "nothing": 0, "failed": 1}
    assert compressor.statistics.n_tokens == len(ids)


async def test_the_curve_decides_by_the_length_of_the_prompt() -> None:
    ids = TEXTS.encode(text_of(700))
    curve = ((len(ids), 0.5), (len(ids) + 1000, 0.1))
    found = await made(0.9, curve=curve).compress(ids, [], [])
    assert abs(found.n_kept - 0.5 * len(ids)) <= CHUNK_TOKENS
    assert made(0.9, curve=curve).settings.min_share == pytest.approx(0.1)


class Letters(Tokenizer):
    """A tokenizer that splits text into single bytes: another one than the model's."""

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        return [self._bytes.index(bytes([byte])) for byte in text.encode()]


async def test_a_scoring_model_with_another_tokenizer_finds_the_same_places() -> None:
    class Harbor(Rarity):
        async def score(self, tokens: Sequence[int], n_query: int) -> Sequence[float]:
            text = TEXTS.decode(tokens)
            at = text.find("harbor")
            return [float(at <= i < at + 40) if at >= 0 else 0.0 for i in range(len(tokens))]

    own = Letters.from_gguf(METADATA)
    settings = CompressionSettings(threshold=0, keep_ratio=0.1)
    ids = TEXTS.encode(f"{text_of(300)} the harbor holds 73935 {text_of(300, 5)}")
    found = await Compressor(settings, Windows(TEXTS, Harbor(4096), own)).compress(ids, [], [])
    assert "harbor holds 73935" in TEXTS.decode(found.ids)


# ---- scores of another tokenizer


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=60)


@given(lengths, lengths)
def test_places_follow_the_text(of, target):
    found = align_scores(list(range(len(of))), of, target)
    assert len(found) == len(target)
    assert found == sorted(found)
    total, wanted = sum(target), []
    for i, length in enumerate(target):
        middle = (sum(target[:i]) + length / 2) / total * sum(of)
        wanted.append(next(j for j in range(len(of)) if sum(of[: j + 1]) >= middle - 1e-9))
    assert all(abs(a - b) <= 1 for a, b in zip(found, wanted, strict=True))
