"""Which parts of a prompt may be shortened: user and tool turns, not their markers, nor the last turns of a chat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.compression.parts import (
    MIN_PART_TOKENS,
    PromptPart,
    last_words_end,
    parts_of,
    roles_of_turns,
)
from lucevisor.model.gguf_files import open_model
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer
from tests.e2e.process import ROOT

DEMO_MODEL = ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
LONG = "The quick brown fox jumps over the lazy dog. " * 40
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]}


@pytest.fixture(scope="module")
def texts():
    return Tokenizer.from_gguf(open_model([DEMO_MODEL]).metadata)


@pytest.fixture(scope="module")
def template():
    found = ChatTemplate.from_gguf(open_model([DEMO_MODEL]).metadata)
    assert found is not None
    return found


def encoded(template, texts, messages, tools=()):
    prompt = template.render(messages, tools=tools).encoded(texts)
    return prompt.ids, prompt.turn_ends, [message["role"] for message in messages]


def shown(texts, ids, parts: list[PromptPart]) -> list[str]:
    return [texts.decode(ids[part.start : part.stop], skip_special=False) for part in parts]


def test_a_first_question_is_all_that_may_be_shortened_of_its_prompt(template, texts):
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "Read this. " + LONG}]
    ids, ends, roles = encoded(template, texts, messages, [TOOL])
    [text] = shown(texts, ids, parts_of(ids, ends, roles, texts))
    assert text.strip() == ("Read this. " + LONG).strip()


def test_what_tools_returned_may_be_shortened_and_what_the_assistant_said_may_not(template, texts):
    messages = [
        {"role": "user", "content": "Read it."},
        CALL,
        {"role": "tool", "content": "A" + LONG},
        {"role": "assistant", "content": "B" + LONG},
        {"role": "user", "content": "C" + LONG},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "D" + LONG},
    ]
    ids, ends, roles = encoded(template, texts, messages, [TOOL])
    found = shown(texts, ids, parts_of(ids, ends, roles, texts))
    assert [text.strip()[0] for text in found] == ["A", "C"], "the last two turns stay whole"
    assert all(text.strip()[1:].strip() == LONG.strip() for text in found)


def test_a_raw_prompt_is_one_part_unless_it_has_turns(template, texts):
    ids = texts.encode(LONG)
    assert parts_of(ids, [], [], texts) == [PromptPart(0, len(ids))]
    rendered, ends, _ = encoded(template, texts, [{"role": "user", "content": LONG}])
    assert parts_of(rendered, ends, [], texts) == []
    assert parts_of(rendered, ends, ["user", "user", "user"], texts) == [], "turns that do not match the messages"


@pytest.mark.parametrize("last", ["What now?", "Why?", LONG + "Tell me, please.\n"])
@pytest.mark.parametrize(
    "earlier", [[], [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]]
)
def test_the_last_words_of_a_chat_end_before_what_the_template_adds(template, texts, earlier, last):
    ids, _, _ = encoded(template, texts, [*earlier, {"role": "user", "content": last}])
    assert len(ids) > last_words_end(ids, texts)
    assert texts.decode(ids[: last_words_end(ids, texts)]).rstrip().endswith(last.rstrip())


@given(
    words=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 30), min_size=8, max_size=8),
)
def test_parts_are_long_lie_in_one_turn_and_hold_no_marker(words, sizes):
    texts, template = _cached()
    messages = [{"role": role, "content": "word " * (20 * size)} for role, size in zip(words, sizes, strict=False)]
    ids, ends, roles = encoded(template, texts, messages)
    done = 0
    for part in parts_of(ids, ends, roles, texts):
        assert part.start >= done
        done = part.stop
        assert len(part) >= MIN_PART_TOKENS
        assert not any(texts.is_marker(token) for token in ids[part.start : part.stop])
        assert sum(end > part.start for end in ends) == sum(end >= part.stop for end in ends)


_MADE: list = []


def _cached():
    if not _MADE:
        metadata = open_model([DEMO_MODEL]).metadata
        _MADE.extend((Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata)))
    return _MADE


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
