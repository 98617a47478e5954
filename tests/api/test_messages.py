"""Messages and tools: what is passed on, and what is refused by name."""

from __future__ import annotations

import pytest

from lucevisor.api.dialects.openai_chat import check_messages, check_tools
from lucevisor.api.errors import ApiError
from lucevisor.api.schemas import AllowedTools, NamedFunction, ToolChoice

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def refused(*messages):
    with pytest.raises(ApiError) as caught:
        check_messages(list(messages))
    assert caught.value.status == 400
    return caught.value.param


class TestMessages:
    def test_a_conversation_with_tools_passes_as_it_is(self):
        conversation = [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}], "name": "ann"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ]
        assert check_messages(conversation) == conversation

    def test_null_fields_of_a_message_that_came_from_us_go(self):
        sent = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [CALL]}
        assert check_messages([sent]) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ({"content": "x"}, "messages[0].role"),
            ({"role": "robot", "content": "x"}, "messages[0].role"),
            ({"role": "user"}, "messages[0].content"),
            ({"role": "user", "content": None}, "messages[0].content"),
            ({"role": "user", "content": 5}, "messages[0].content"),
            ({"role": "user", "content": []}, "messages[0].content"),
            ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
            ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].image_url.url"),
            ({"role": "user", "content": [{"type": "video_url"}]}, "messages[0].content[0].type"),
            ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
            ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
            ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]},
                "messages[0].tool_calls[0].function.arguments",
            ),
            ({"role": "assistant", "tool_calls": [CALL | {"type": "other"}]}, "messages[0].tool_calls[0].type"),
            ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].custom"),
            ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
            ({"role": "assistant", "content": "x", "function_call": {}}, "messages[0].function_call"),
        ],
    )
    def test_what_is_wrong_is_named(self, message, param):
        assert refused(message) == param

    def test_the_index_is_that_of_the_message(self):
        assert refused({"role": "user", "content": "x"}, {"role": "user"}) == "messages[1].content"

    def test_none_at_all(self):
        assert refused() == "messages"


class TestTools:
    def test_tools_pass_without_their_nulls(self):
        sent = {"type": "function", "function": {**TOOL["function"], "strict": None}}
        assert check_tools([sent], None) == ([TOOL], None)
        assert check_tools([TOOL], "auto") == ([TOOL], "auto")

    def test_none_offers_no_tool(self):
        assert check_tools([TOOL], "none") == ([], "none")
        assert check_tools([], "none") == ([], "none")

    def test_custom_tools_are_functions_of_one_text(self):
        grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
        custom = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": grammar}}
        tools, choice = check_tools([TOOL, custom], ToolChoice("custom", custom=NamedFunction("patch")))
        assert choice == ToolChoice("function", NamedFunction("patch"))
        assert tools[0] == TOOL
        assert tools[1]["function"] == {
            "name": "patch",
            "description": "Edits.\n\nThe input must follow this lark grammar:\nstart: X",
            "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
        }

    @pytest.mark.parametrize("mode", ["auto", "required"])
    @pytest.mark.parametrize("allowed", [TOOL, {"type": "function", "name": "add"}], ids=["nested", "flat"])
    def test_only_allowed_tools_are_offered(self, mode, allowed):
        other = {"type": "function", "function": {"name": "other"}}
        choice = ToolChoice("allowed_tools", allowed_tools=AllowedTools(mode, [allowed]))
        assert check_tools([other, TOOL], choice) == ([TOOL], mode)

    @pytest.mark.parametrize(
        ("tool", "param"),
        [
            ({}, "tools[0].type"),
            ({"type": "web_search"}, "tools[0].type"),
            ({"type": "custom"}, "tools[0].custom"),
            ({"type": "custom", "custom": {"name": ""}}, "tools[0].custom.name"),
            ({"type": "function"}, "tools[0].function"),
            ({"type": "function", "function": {}}, "tools[0].function.name"),
            ({"type": "function", "function": {"name": ""}}, "tools[0].function.name"),
            ({"type": "function", "function": {"name": "f", "strict": 1}}, "tools[0].function.strict"),
            ({"type": "function", "function": {"name": "f", "parameters": "x"}}, "tools[0].function.parameters"),
        ],
    )
    def test_what_is_wrong_is_named(self, tool, param):
        with pytest.raises(ApiError) as caught:
            check_tools([tool], None)
        assert (caught.value.status, caught.value.param) == (400, param)

    @pytest.mark.parametrize(
        ("choice", "param"),
        [
            ("any", "tool_choice"),
            (ToolChoice("custom"), "tool_choice.type"),
            (ToolChoice("function"), "tool_choice.type"),
            (ToolChoice("function", NamedFunction("other")), "tool_choice.function.name"),
            (ToolChoice("custom", custom=NamedFunction("other")), "tool_choice.custom.name"),
            (ToolChoice("allowed_tools"), "tool_choice.type"),
            (
                ToolChoice("allowed_tools", allowed_tools=AllowedTools("auto", [{"type": "function"}])),
                "tool_choice.allowed_tools.tools[0]",
            ),
        ],
    )
    def test_choices_that_cannot_be_kept(self, choice, param):
        with pytest.raises(ApiError) as caught:
            check_tools([TOOL], choice)
        assert caught.value.param == param

    def test_a_call_without_tools(self):
        assert check_tools([], "auto") == ([], "auto")
        with pytest.raises(ApiError) as caught:
            check_tools([], "required")
        assert caught.value.param == "tool_choice"
