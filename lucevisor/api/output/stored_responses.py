"""The JSON of a stored response of the Responses API: its events once more, and pages of its input items.

Pure.  Invariant: the events of a stored response add up to it, as those of its first stream did, but each text comes in
one delta, and reasoning in the part that the response has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

_Json = dict[str, Any]
_CALLS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items without parts, and the field that holds their text."""


@dataclass(frozen=True, slots=True)
class Page:
    """Which items of a list a client asks for: at most `limit`, those behind `after` in its order."""

    limit: int
    after: str | None
    ascending: bool


def replay(response: _Json) -> list[_Json]:
    """Return the events of a finished response, numbered."""
    begun = {**response, "status": "in_progress", "completed_at": None, "incomplete_details": None, "usage": None}
    begun["output"] = []
    events: list[_Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        text, kind = _CALLS.get(item["type"]), item["type"]
        blank: dict[str, object] = {"summary": [], "content": [], "encrypted_content": None, text or "": ""}
        empty = {name: value for name, value in blank.items() if name in item}
        opened = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        if text:
            events.append({"type": f"response.{kind}_{text}.delta", **place, "delta": item[text]})
            events.append({"type": f"response.{kind}_{text}.done", **place, text: item[text]})
        for name in ("summary", "content"):
            for number, part in enumerate(item.get(name) or ()):
                events += _part_events({**place, f"{name}_index": number}, name, part)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _part_events(place: _Json, name: str, part: _Json) -> Iterator[_Json]:
    prefix = "reasoning_summary_part" if name == "summary" else "content_part"
    kind = "reasoning_summary_text" if name == "summary" else part["type"]
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if more else {})}
    yield {"type": f"response.{prefix}.added", **place, "part": empty}
    yield {"type": f"response.{kind}.delta", **place, "delta": part["text"], **more}
    yield {"type": f"response.{kind}.done", **place, "text": part["text"], **more}
    yield {"type": f"response.{prefix}.done", **place, "part": part}


def input_items(response_id: str, turns: Sequence[Sequence[_Json]], page: Page) -> _Json:
    """Return a page of the items that a response answers, `turns` without its own output."""
    unique = response_id.rpartition("_")[2]
    items = [_complete(item, f"msg_{unique}i{n}") for n, item in enumerate(item for turn in turns for item in turn)]
    if not page.ascending:
        items.reverse()
    start = next((n + 1 for n, item in enumerate(items) if item["id"] == page.after), 0)
    found = items[start : start + page.limit]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": start + page.limit < len(items),
    }


def _complete(item: _Json, item_id: str) -> _Json:
    """Return an item as clients read it, though they may send it shorter: with id, type, status and parts."""
    told = {"id": item_id, "type": "message", "status": "completed", **item}
    if told["type"] == "message" and isinstance(text := told["content"], str):
        kind = "output_text" if told["role"] == "assistant" else "input_text"
        annotated: _Json = {"annotations": []} if kind == "output_text" else {}
        told["content"] = [{"type": kind, "text": text, **annotated}]
    return told
