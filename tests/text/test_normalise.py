"""Lines that agents change every turn: which they are, what becomes of them, and what that gains."""

from __future__ import annotations

import copy

import pytest

from lucevisor.kv.tokens import TokenBuffer
from lucevisor.text.normalise import FIXED, MOVED, Normalise, normalise_prompt
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer
from tests.text.vocabularies import demo_metadata

RULES = "\n".join(f"Rule {i}: answer shortly, name the module, and say when you do not know." for i in range(40))
ANSWERS = ["os.path.join puts path components together.", "It returns text.", "No."]


def agent(turn: int) -> list[dict[str, object]]:
    """What a coding agent sends in its n-th turn: a header and a time that change, and a conversation that grows."""
    system = (
        f"x-anthropic-billing-header: cc_version=2.0.{turn}; cch={turn * 7919:05x}\n"
        f"You help with Python.\n{RULES}\n<env>\nWorking directory: /src\n"
        f"Today's date: 2025-11-2{turn} 10:0{turn}\n</env>\nBe kind."
    )
    chat: list[dict[str, object]] = [{"role": "system", "content": system}]
    for i in range(turn + 1):
        chat.append({"role": "user", "content": f"Question {i}: what does os.path.join do?"})
        if i < turn:
            chat.append({"role": "assistant", "content": ANSWERS[i]})
    return chat


@pytest.mark.parametrize(
    "line",
    [
        "Today's date: 2025-11-21",
        "Today\u2019s date is Friday, 21 November 2025.",
        "- **Current date**: 2025-11-21",
        "  Current time: 10:31",
        "> the current date and time = 2025-11-21T10:31",
        "Local time is now: 7 pm",
        "Today is 21.11.2025",
        "CURRENT DATETIME: 2025-11-21",
    ],
)
def test_a_line_with_a_date_is_fixed_or_moved(line: str) -> None:
    chat = [{"role": "system", "content": f"One\n{line}\nTwo"}, {"role": "user", "content": "hi"}]
    fixed = str(normalise_prompt(chat, "fix")[0]["content"]).split("\n")
    assert (fixed[0], fixed[2]) == ("One", "Two")
    assert fixed[1].endswith(f" {FIXED}")
    assert not any(letter.isdigit() for letter in fixed[1])
    moved = normalise_prompt(chat, "move")
    assert str(moved[0]["content"]).split("\n")[1].endswith(f" {MOVED}")
    assert moved[1] == {"role": "user", "content": f"hi\n\n{line.strip()}"}


@pytest.mark.parametrize(
    "line",
    [
        "Dates are written like 2025-11-21.",
        "Today we fix 3 bugs.",
        "Current time complexity: O(n**2)",
        "Today's date: unknown",
        "The answer to x-anthropic-billing-header: 5 is no.",
        "current date formats: 3",
    ],
)
@pytest.mark.parametrize("mode", ["fix", "move"])
def test_other_lines_stay(line: str, mode: Normalise) -> None:
    chat = [{"role": "system", "content": line}, {"role": "user", "content": "hi"}]
    assert normalise_prompt(chat, mode) == chat


@pytest.mark.parametrize("mode", ["fix", "move"])
def test_only_the_opening_is_touched_and_the_given_messages_stay(mode: Normalise) -> None:
    line = "Today's date: 2025-11-21"
    chat: list[dict[str, object]] = [
        {"role": "developer", "content": [{"type": "text", "text": line}, {"type": "image_url"}]},
        {"role": "user", "content": line},
        {"role": "system", "content": line},
        {"role": "user", "content": [{"type": "text", "text": line}]},
    ]
    before = copy.deepcopy(chat)
    result = normalise_prompt(chat, mode)
    assert chat == before
    assert result[1:3] == chat[1:3]
    parts = result[0]["content"]
    assert isinstance(parts, list)
    assert parts[0]["text"] != line
    assert parts[1] == {"type": "image_url"}
    assert result[3]["content"] == [{"type": "text", "text": line}] * (2 if mode == "move" else 1)


def test_a_date_stays_where_there_is_no_message_to_move_it_to() -> None:
    line = {"role": "system", "content": "Today's date: 2025-11-21"}
    for chat in ([line], [line, {"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]):
        assert normalise_prompt(chat, "move") == chat


def test_strange_content_is_left_to_others() -> None:
    chat = [{"role": "system", "content": 5}, {"role": "system"}, {"role": "user", "content": None}]
    assert [m.get("content") for m in normalise_prompt(chat, "fix")] == [5, None, None]


def test_off_changes_nothing() -> None:
    assert normalise_prompt(agent(2), "off") == agent(2)


@pytest.mark.parametrize(("mode", "least"), [("off", 0.0), ("fix", 0.97), ("move", 0.9)])
def test_the_gain_for_an_agent_that_changes_its_header_every_turn(mode: Normalise, least: float) -> None:
    """Share of the last turn's prompt that the next turn has in common with it, up to the end of a chat turn."""
    tokenizer, template = Tokenizer.from_gguf(demo_metadata()), ChatTemplate.from_gguf(demo_metadata())
    assert template is not None
    for turn in range(2):
        one, two = (
            template.render(normalise_prompt(agent(n), mode), enable_thinking=False).encoded(tokenizer)
            for n in (turn, turn + 1)
        )
        n_common = TokenBuffer(one.ids).n_common(TokenBuffer(two.ids), len(one.ids))
        reusable = max((end for end in one.turn_ends if end <= n_common), default=0)
        if mode == "off":
            assert n_common < 30
            assert reusable == 0
        else:
            assert reusable / len(one.ids) >= least
            text = tokenizer.decode(one.ids, skip_special=False)
            assert "cc_version" not in text
            assert ("2025-11-2" in text) == (mode == "move")
