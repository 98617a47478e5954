"""A thinking budget ends reasoning in time, once, wherever drafts and tokens come from, and touches nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.grammar import matcher
from lucevisor.text.grammar.matcher import GrammarCompiler
from lucevisor.text.reasoning import CHANNEL, THINK, ReasoningBudget
from lucevisor.text.tokenizer import Tokenizer
from tests.text.vocabularies import demo_metadata

TOKENIZER = Tokenizer.from_gguf(demo_metadata())
(THE,) = TOKENIZER.encode(" the")
WORDS = ["Hm", " so", "\n", "é", "🎉", "</think>", "<think>", "</th", "ink>", " the", "\n\n"]
IDS = [TOKENIZER.encode(word, parse_special=True) for word in WORDS]


def allowed(rows, index, n_bytes):
    row = int.from_bytes(rows[index * n_bytes : (index + 1) * n_bytes], "little")
    return None if row.bit_count() > 1 else row.bit_length() - 1


def run(budget, model, n, n_drafts=0):
    """Generate `n` tokens: what is forced, else what `model` says at a position, which drafts foresee."""
    output, taken = [], 0
    while len(output) < n:
        drafts = [model(len(output) + i) for i in range(n_drafts)]
        rows = budget.masks(taken, output[taken:], drafts)
        taken = len(output)
        for index in range(1 + len(drafts)):
            only = allowed(rows, index, budget.row_bytes)
            output.append(model(len(output)) if only is None else only)
            if index == len(drafts) or output[-1] != drafts[index]:
                break
    return output[:n]


def say(ids):
    """A model that says these tokens, then a word again and again."""
    return lambda position: ids[position] if position < len(ids) else THE


def read(ids):
    return TOKENIZER.decode(ids, skip_special=False)


def test_reasoning_is_closed_and_the_answer_is_free():
    output = run(ReasoningBudget(5, THINK, TOKENIZER, inside=True), say([]), 15)
    assert read(output).startswith(" the" * 5 + "\n</think>\n\n the the")


def test_reasoning_that_ends_in_time_is_left_alone():
    wish = TOKENIZER.encode(" the the</think>\n\n" + " the" * 9, parse_special=True)
    assert run(ReasoningBudget(5, THINK, TOKENIZER, inside=True), say(wish), len(wish)) == wish


def test_an_answer_without_reasoning_is_left_alone():
    wish = TOKENIZER.encode(" the" * 9 + "<think> the the the", parse_special=True)
    assert run(ReasoningBudget(1, THINK, TOKENIZER, inside=False), say(wish), len(wish)) == wish


@pytest.mark.parametrize(("tags", "text"), [(THINK, "\n<think>"), (CHANNEL, " the<|channel>")])
def test_reasoning_that_the_model_opens(tags, text):
    wish = TOKENIZER.encode(text, parse_special=True)
    output = run(ReasoningBudget(2, tags, TOKENIZER, inside=False), say(wish), 40)
    assert read(output).startswith(f"{text} the the\n{tags.close}\n\n the the the")


def test_a_budget_of_none():
    assert read(run(ReasoningBudget(0, THINK, TOKENIZER, inside=True), say([]), 6)).startswith("\n</think>\n\n the")


def test_a_character_is_completed():
    ids = TOKENIZER.encode("🎉🎉🎉")
    assert len(ids) > 6  # several tokens a character
    for n in range(len(ids)):
        text = read(run(ReasoningBudget(n, THINK, TOKENIZER, inside=True), lambda i, ids=ids: ids[i % len(ids)], 48))
        thought, closed, _ = text.partition("\n</think>\n\n")
        assert closed
        assert "\ufffd" not in thought


@given(st.integers(0, 12), st.lists(st.sampled_from(IDS), max_size=25), st.booleans(), st.integers(1, 5))
@settings(max_examples=100)
def test_drafts_change_nothing_and_reasoning_ends(n, words, inside, n_drafts):
    wish = [token for word in words for token in word]
    plain = run(ReasoningBudget(n, THINK, TOKENIZER, inside=inside), say(wish), 60)
    assert run(ReasoningBudget(n, THINK, TOKENIZER, inside=inside), say(wish), 60, n_drafts) == plain
    if inside:
        n_thought = next(i for i in range(60) if "</think>" in read(plain[: i + 1]))
        assert n_thought <= n + 3 + len(TOKENIZER.encode("\n</think>", parse_special=True))
    else:
        assert plain[: len(wish)] == wish or read(wish).lstrip().startswith("<think>")


@given(st.integers(0, 6), st.lists(st.sampled_from(IDS), max_size=12), st.lists(st.sampled_from(IDS), max_size=6))
@settings(max_examples=100)
def test_the_number_of_valid_drafts_is_that_of_the_masks(n, words, more):
    tokens = [token for word in words for token in word]
    drafts = [token for word in more for token in word]
    rows = ReasoningBudget(n, THINK, TOKENIZER, inside=True).masks(0, tokens, drafts)
    budget = ReasoningBudget(n, THINK, TOKENIZER, inside=True)
    n_valid = budget.n_valid(0, tokens, drafts)
    assert budget.n_tokens == len(tokens)
    for index, draft in enumerate(drafts[: n_valid + 1]):
        only = allowed(rows, index, budget.row_bytes)
        assert (only in (None, draft)) == (index < n_valid)


def test_a_grammar_inside_that_is_not_asked_about_drafts_misses_no_token(monkeypatch):
    """Looking at drafts took it long once, so it says 0 and takes nothing; the masks bring it up to date."""
    monkeypatch.setattr(matcher, "_SLOW_S", -1.0)
    compiled = GrammarCompiler(TOKENIZER).compile('{"grammars": [{"lark_grammar": "start: /a+b/"}]}')
    budget = ReasoningBudget(5, THINK, TOKENIZER, inside=False, inner=compiled.matcher())
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    output = []
    for _ in range(4):
        start = budget.n_tokens
        budget.n_valid(start, output[start:], [b])
        start = budget.n_tokens
        row = budget.masks(start, output[start:], [])
        assert row[a // 8] >> (a % 8) & 1
        output.append(a)
    assert budget.n_tokens == 3
