"""Lines that agents change every turn: which they are, what becomes of them, and what that gains."""

from __future__ import annotations

import copy

import pytest

from lucevisor.text.normalise import FIXED, MOVED, Normalise, normalise_prompt


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
    chat = [{"role": "system", "content": "Today's date: 2025-11-21"}, {"role": "user", "content": "hi"}]
    assert normalise_prompt(chat, "off") == chat
