"""Whole prompts: what is kept, what never goes, what a growing chat keeps of its beginning, and what failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.compression.compressor import (
    ANCHOR_TOKENS,
    CHUNK_TOKENS,
    HEAD_CHUNKS,
    TAIL_CHUNKS,
    CompressionSettings,
    Compressor,
    anchor_chunks,
    chunk_scores,
    chunks_of,
    keep_ratio_at,
    select,
)
from lucevisor.compression.windows import (
    MIN_PART_TOKENS,
    QUERY_TOKENS,
    QUESTION_TOKENS,
    PromptPart,
    WindowScorer,
    align_scores,
    last_words_end,
    parts_of,
    roles_of_turns,
)
from lucevisor.errors import ScoringError
from lucevisor.model.gguf_files import open_model
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
METADATA = open_model([ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"]).metadata
TEXTS = Tokenizer.from_gguf(METADATA)
TEMPLATE = ChatTemplate.from_gguf(METADATA)
assert TEMPLATE is not None
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
    return Compressor(settings, WindowScorer(TEXTS, scorer or Rarity()))


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
    prompt = TEMPLATE.render(messages).encoded(TEXTS)
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
    found = await Compressor(settings, WindowScorer(TEXTS, Harbor(4096), own)).compress(ids, [], [])
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


# ---- parts of a prompt that may be shortened


LONG = "The quick brown fox jumps over the lazy dog. " * 40
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]}


def encoded(messages, tools=()):
    prompt = TEMPLATE.render(messages, tools=tools).encoded(TEXTS)
    return prompt.ids, prompt.turn_ends, [message["role"] for message in messages]


def shown(ids, parts: list[PromptPart]) -> list[str]:
    return [TEXTS.decode(ids[part.start : part.stop], skip_special=False) for part in parts]


def test_a_first_question_is_all_that_may_be_shortened_of_its_prompt():
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "Read this. " + LONG}]
    ids, ends, roles = encoded(messages, [TOOL])
    [text] = shown(ids, parts_of(ids, ends, roles, TEXTS))
    assert text.strip() == ("Read this. " + LONG).strip()


def test_what_tools_returned_may_be_shortened_and_what_the_assistant_said_may_not():
    messages = [
        {"role": "user", "content": "Read it."},
        CALL,
        {"role": "tool", "content": "A" + LONG},
        {"role": "assistant", "content": "B" + LONG},
        {"role": "user", "content": "C" + LONG},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "D" + LONG},
    ]
    ids, ends, roles = encoded(messages, [TOOL])
    found = shown(ids, parts_of(ids, ends, roles, TEXTS))
    assert [text.strip()[0] for text in found] == ["A", "C"], "the last two turns stay whole"
    assert all(text.strip()[1:].strip() == LONG.strip() for text in found)


def test_a_raw_prompt_is_one_part_unless_it_has_turns():
    ids = TEXTS.encode(LONG)
    assert parts_of(ids, [], [], TEXTS) == [PromptPart(0, len(ids))]
    rendered, ends, _ = encoded([{"role": "user", "content": LONG}])
    assert parts_of(rendered, ends, [], TEXTS) == []
    assert parts_of(rendered, ends, ["user", "user", "user"], TEXTS) == [], "turns that do not match the messages"


@pytest.mark.parametrize("last", ["What now?", "Why?", LONG + "Tell me, please.\n"])
@pytest.mark.parametrize(
    "earlier", [[], [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]]
)
def test_the_last_words_of_a_chat_end_before_what_the_template_adds(earlier, last):
    ids, _, _ = encoded([*earlier, {"role": "user", "content": last}])
    assert len(ids) > last_words_end(ids, TEXTS)
    assert TEXTS.decode(ids[: last_words_end(ids, TEXTS)]).rstrip().endswith(last.rstrip())


@given(
    words=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 30), min_size=8, max_size=8),
)
def test_parts_are_long_lie_in_one_turn_and_hold_no_marker(words, sizes):
    messages = [{"role": role, "content": "word " * (20 * size)} for role, size in zip(words, sizes, strict=False)]
    ids, ends, roles = encoded(messages)
    done = 0
    for part in parts_of(ids, ends, roles, TEXTS):
        assert part.start >= done
        done = part.stop
        assert len(part) >= MIN_PART_TOKENS
        assert not any(TEXTS.is_marker(token) for token in ids[part.start : part.stop])
        assert sum(end > part.start for end in ends) == sum(end >= part.stop for end in ends)


@pytest.mark.parametrize(
    ("roles", "n_turns", "found"),
    [
        (["user"], 1, ["user"]),
        (["user"], 2, ["system", "user"]),  # the template adds a system turn
        (["system", "system", "user"], 2, ["system", "user"]),
        (["user", "assistant", "tool", "tool", "user"], 4, ["user", "assistant", "tool", "user"]),
        (["user", "assistant", "tool", "tool", "user"], 3, ["user", "assistant", "user"]),
        (["system", "user", "assistant", "tool", "tool"], 4, ["system", "user", "assistant", "tool"]),
        (["user", "assistant", "tool", "tool"], 4, ["user", "assistant", "tool", "tool"]),
        (["user"], 3, None),
    ],
)
def test_roles_of_turns(roles, n_turns, found):
    assert roles_of_turns(roles, n_turns) == found


# ---- chunks that stay


scores_of = st.lists(st.floats(0, 1), min_size=1, max_size=1200)
shares = st.floats(0, 1, exclude_min=True)


@given(scores=scores_of, ratio=shares, anchors=st.sets(st.integers(0, 40)))
def test_as_many_tokens_stay_as_asked_give_or_take_a_chunk(scores, ratio, anchors):
    ranges = select(scores, ratio, {chunk for chunk in anchors if chunk < len(chunks_of(len(scores)))})
    n_kept = sum(stop - start for start, stop in ranges)
    assert n_kept - ratio * len(scores) > -CHUNK_TOKENS
    assert n_kept <= max(ratio * len(scores), CHUNK_TOKENS)
    flat = [edge for both in ranges for edge in both]
    assert flat == sorted(set(flat)), "ascending, and adjacent chunks are one range"
    assert flat[0] >= 0
    assert flat[-1] == len(scores), "the end is always kept"
    assert all(start == 0 or (len(scores) - start) % CHUNK_TOKENS == 0 for start, _ in ranges)


@given(scores=scores_of, ratio=shares)
def test_a_chunk_that_goes_is_no_better_than_one_that_was_chosen_by_its_score(scores, ratio):
    bounds, means = chunks_of(len(scores)), chunk_scores(scores)
    ranges = select(scores, ratio)
    kept = {i for i, (a, b) in enumerate(bounds) if any(low <= a and b <= high for low, high in ranges)}
    n, n_kept = len(bounds), max(CHUNK_TOKENS, int(len(scores) * ratio)) // CHUNK_TOKENS
    by_place = set(range(min(HEAD_CHUNKS, n_kept // 8))) | set(range(n - max(1, min(TAIL_CHUNKS, n_kept // 4)), n))
    short = {0} if len(scores) % CHUNK_TOKENS else set()  # fits where a whole chunk does not
    chosen = [means[chunk] for chunk in kept - by_place - short]
    gone = [means[chunk] for chunk in set(range(n)) - kept - short]
    assert not chosen or not gone or min(chosen) >= max(gone)


@given(data=st.data(), tokens=st.lists(st.integers(0, 5), max_size=400))
def test_anchors_are_the_chunks_around_a_repeated_run(data, tokens):
    question = data.draw(st.lists(st.integers(0, 5), max_size=12))
    runs = {tuple(question[i : i + ANCHOR_TOKENS]) for i in range(len(question) - ANCHOR_TOKENS + 1)}
    n = data.draw(st.integers(0, len(tokens)))
    places = {run: [i for i in range(n - 3) if tuple(tokens[i : i + 4]) == run] for run in runs}
    bounds = chunks_of(len(tokens))

    def chunk_of(at):
        return next(i for i, (start, stop) in enumerate(bounds) if start <= at < stop)

    near = {
        chunk
        for found in places.values()
        if len(found) <= 8
        for at in found
        for chunk in range(len(bounds))
        if chunk_of(at) - 2 <= chunk <= chunk_of(at + 3) + 2
    }
    assert anchor_chunks(tokens, question, n) == near


@given(
    n=st.integers(1, 10**6),
    points=st.dictionaries(st.integers(1, 10**6), shares, min_size=1, max_size=5).map(lambda x: sorted(x.items())),
)
def test_the_curve_goes_through_its_points_and_stays_between_them(n, points):
    found = keep_ratio_at(n, 0.5, points)
    assert min(share for _, share in points) - 1e-12 <= found <= max(share for _, share in points) + 1e-12
    for tokens, share in points:
        assert keep_ratio_at(tokens, 0.5, points) == pytest.approx(share)
    assert keep_ratio_at(n, 0.5, ()) == 0.5
