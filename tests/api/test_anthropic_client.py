"""The unmodified `anthropic` client against the server: its types, its accumulator, its errors."""

from __future__ import annotations

import json
import urllib.request

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lucevisor.api.dialects.anthropic import MessageFormatter
from lucevisor.api.keys import ApiKeys
from lucevisor.api.output import UsageTotals
from lucevisor.config import ApiKey
from tests.api.conftest import Live, decoded, prompt_of, script
from tests.api.output_texts import CALL, CONTEXT, chunked, deltas_of, prepared, texts
from tests.api.scripted_model import MODEL, Rig, ids_of, say

HI = [{"role": "user", "content": "Hi"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
THINK = {"type": "enabled", "budget_tokens": 32}
EVENT = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as one:
        yield one


def ask(client, messages=HI, **more):
    return client.messages.create(**{"model": MODEL, "max_tokens": 64, "messages": messages, **more})


def streamed(client, messages=HI, **more):
    """Stream; return the raw events' types and the final message that the client adds up."""
    with client.messages.stream(**{"model": MODEL, "max_tokens": 64, "messages": messages, **more}) as stream:
        types = [event.type for event in stream]
        return types, stream.get_final_message()


def same(first, second):
    """Whether two messages differ in their ids only."""
    told = [message.model_dump(exclude={"id"}) for message in (first, second)]
    for one in told:
        for block in one["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
    return told[0] == told[1]


class TestWhole:
    def test_text(self, client, server):
        script(server, say("Hello, wörld 🎉!"))
        answer = ask(client)
        assert answer.id.startswith("msg_")
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
        assert [block.model_dump(exclude_none=True) for block in answer.content] == [
            {"type": "text", "text": "Hello, wörld 🎉!"}
        ]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert answer.usage.output_tokens == len(ids_of("Hello, wörld 🎉!")) + 1
        assert answer.usage.input_tokens == client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
        assert answer._request_id

    def test_stop_reasons(self, client, server):
        script(server, say("one two three", end=False))
        assert ask(client, max_tokens=2).stop_reason == "max_tokens"
        assert ask(client, max_tokens=4096).stop_reason == "model_context_window_exceeded"
        answer = ask(client, stop_sequences=["nothing", "three"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "three")
        assert answer.content[0].text == "one two "

    def test_system_prompt_in_blocks(self, client, server):
        script(server, say("Yes."))
        system = [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ]
        ask(client, system=system)
        assert prompt_of(server).startswith("<|im_start|>system\nBe brief.\nBe kind.<|im_end|>")
        ask(client, system="Be brief.")
        assert prompt_of(server).startswith("<|im_start|>system\nBe brief.<|im_end|>")

    def test_sampling(self, client, server):
        ask(client, metadata={"user_id": "ann"}, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
        seen = server.do(lambda rig: rig.stage.opened[-1].sampling)
        assert (seen.temperature, seen.top_p, seen.top_k) == (0.5, 0.9, 7)

    def test_thinking(self, client, server):
        script(server, say("Hm.\n</think>\n\nYes."))
        answer = ask(client, thinking=THINK)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("Hm.", "Yes.")
        assert answer.content[0].signature
        assert answer.usage.output_tokens_details.thinking_tokens > 0
        hidden = ask(client, thinking={"type": "adaptive", "display": "omitted"})
        assert (hidden.content[0].thinking, hidden.content[1].text) == ("", "Yes.")
        assert hidden.content[0].signature

    def test_thinking_is_off_unless_requested(self, client, server):
        script(server, say("Yes."))
        ask(client)
        assert prompt_of(server).endswith("</think>\n\n")
        ask(client, thinking={"type": "disabled"})
        assert prompt_of(server).endswith("</think>\n\n")

    def test_a_conversation_with_tools(self, client, server):
        script(server, say("Hm.\n</think>\n\nLet me add.\n" + CALL + "\n" + CALL))
        first = ask(client, tools=[ADD], thinking=THINK)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        uses = [block for block in first.content if block.type == "tool_use"]
        assert [(use.name, use.input) for use in uses] == [("add", {"a": 1})] * 2
        assert uses[0].id != uses[1].id
        results = [
            {"type": "tool_result", "tool_use_id": uses[0].id, "content": "two"},
            {
                "type": "tool_result",
                "tool_use_id": uses[1].id,
                "content": [{"type": "text", "text": "no such number"}],
                "is_error": True,
            },
            {"type": "text", "text": "Go on."},
        ]
        history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        script(server, say("Two."))
        second = ask(client, history, tools=[ADD])
        assert second.content[0].text == "Two."
        prompt = prompt_of(server)
        assert "Let me add." in prompt
        assert prompt.count('{"name": "add", "arguments": {"a": 1}}') == 2
        assert "<tool_response>\ntwo\n</tool_response>" in prompt
        assert "<tool_response>\nThe tool failed:\nno such number\n</tool_response>" in prompt
        assert prompt.index("no such number") < prompt.index("Go on.")
        assert "unsigned" not in prompt

    def test_the_clients_tool_runner(self, client, server):
        """It asks for a thread on the server first, and does without."""

        @anthropic.beta_tool
        def add(a: int) -> str:
            """Adds."""
            return f"{a} and more"

        script(server, lambda seen: say("Two." if "<tool_response>" in decoded(seen) else CALL)(seen))
        runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=64, messages=HI, tools=[add])
        assert [message.content[-1].type for message in runner] == ["tool_use", "text"]
        assert "<tool_response>\n1 and more\n" in prompt_of(server)

    def test_one_call_at_a_time(self, client, server):
        script(server, say(CALL + "\n" + CALL, end=False))
        answer = ask(client, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in answer.content] == ["tool_use"]

    def test_tool_choice_none_offers_none(self, client, server):
        script(server, say("No."))
        ask(client, tools=[ADD], tool_choice={"type": "none"})
        assert "add" not in prompt_of(server)

    def test_what_constrains_the_answer_does_not_count(self, client):
        tools = [{**ADD, "strict": True}]  # the template shows all of a tool
        plain = client.messages.count_tokens(model=MODEL, messages=HI, tools=tools)
        assert plain.input_tokens == ask(client, tools=tools).usage.input_tokens
        constrained = client.messages.count_tokens(
            model=MODEL, messages=HI, tools=tools, tool_choice={"type": "any"},
            output_config={"format": {"type": "json_schema", "schema": {"type": "no such type"}}},
        )  # fmt: skip
        assert constrained.input_tokens == plain.input_tokens

    def test_tokens_beyond_the_context_are_counted(self, client):
        long = [{"role": "user", "content": "word " * 4000}]
        assert client.messages.count_tokens(model=MODEL, messages=long, tools=[ADD], system="x").input_tokens > 4000

    def test_models(self, client):
        (one,) = client.models.list()
        assert (one.id, one.max_input_tokens, one.created_at.year) == (MODEL, 512, 2023)
        assert client.models.retrieve(MODEL).capabilities.thinking.supported


class TestStream:
    def test_the_documented_order(self, client, server):
        script(server, say("Hm.\n</think>\n\nYes.\n" + CALL))
        stream = ask(client, thinking=THINK, tools=[ADD], stream=True)
        events = list(stream)
        order = []
        for event in events:
            kind = event.delta.type if event.type == "content_block_delta" else event.type
            if order[-1:] != [kind]:
                order.append(kind)
        block = ["content_block_start", "content_block_stop"]
        assert order == [
            "message_start",
            block[0], "thinking_delta", "signature_delta", block[1],
            block[0], "text_delta", block[1],
            block[0], "input_json_delta", block[1],
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert [e.index for e in events if e.type == "content_block_start"] == [0, 1, 2]
        assert events[0].message.content == []
        assert events[0].message.stop_reason is None
        assert events[0].message.usage.input_tokens > 0
        assert events[-2].delta.stop_reason == "tool_use"

    @pytest.mark.parametrize(
        ("text", "more"),
        [
            ("Hello, wörld 🎉!", {}),
            ("Hm.\n</think>\n\nYes.\n" + CALL + "\n" + CALL, {"thinking": THINK, "tools": [ADD]}),
            ("Hm.\n</think>\n\nYes.", {"thinking": {"type": "adaptive", "display": "omitted"}}),
            ("one two three", {"stop_sequences": ["three"]}),
            ("one two three", {"max_tokens": 2}),
        ],
    )
    def test_the_client_adds_up_what_is_sent_whole(self, client, server, text, more):
        script(server, say(text))
        types, final = streamed(client, **more)
        assert types[0] == "message_start"
        assert types[-1] == "message_stop"
        assert same(final, ask(client, **more))

    def test_pings_and_names(self, server):
        script(server, say("Hi."))
        body = json.dumps({"model": MODEL, "max_tokens": 8, "messages": HI, "stream": True}).encode()
        request = urllib.request.Request(
            server.url + "/v1/messages?beta=true", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            parts = reply.read().decode().split("\n\n")
        assert parts[1] == 'event: ping\ndata: {"type":"ping"}'
        assert parts[-2] == 'event: message_stop\ndata: {"type":"message_stop"}'
        assert parts[-1] == ""
        for part in parts[:-1]:
            name, _, data = part.removeprefix("event: ").partition("\ndata: ")
            assert json.loads(data)["type"] == name

    def test_a_failure_on_the_way(self, client, server):
        script(server, say("word ", end=False), step_s=0.02)
        stream = ask(client, stream=True, max_tokens=400)
        seen = [next(stream) for _ in range(4)]
        server.do(Rig.lose)
        with pytest.raises(anthropic.APIStatusError, match="group left was killed") as caught:
            seen += list(stream)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        assert seen[-1].type == "content_block_delta"
        server.do(Rig.attach)


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user"}]}, "messages.0.content"),
            ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
            ({"messages": [{"role": "user", "content": [1]}]}, "messages.0.content"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
            ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
            (
                {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1}]}]},
                "messages.0.content.0.tool_use_id",
            ),
            (
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}],
                        }
                    ]
                },
                "messages.0.content.0.content.0.type",
            ),
            (
                {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, *HI]},
                "messages.0.content.0.type",
            ),
            ({"system": [{"type": "text"}]}, "system.0.text"),
            ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
            ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
            ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"stop_sequences": [""]}, "stop_sequences.0"),
            ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
            ({"extra_body": {"temperature": 3}}, "temperature"),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
            ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "thinking.budget_tokens"),
            ({"extra_body": {"tempratur": 1}}, "tempratur"),
            ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
            ({"extra_body": {"stop": "x"}}, "stop"),
        ],
    )
    def test_a_bad_request_names_the_field(self, client, fields, name):
        with pytest.raises(anthropic.BadRequestError) as caught:
            ask(client, **fields)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.body["error"]["message"].startswith(f"{name}: ")
        assert caught.value.body["request_id"] == caught.value.request_id

    def test_a_prompt_that_is_too_long(self, client):
        numbers = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"  # as the claude agent reads them
        with pytest.raises(anthropic.BadRequestError, match=numbers):
            ask(client, [{"role": "user", "content": "word " * 600}])

    def test_another_model(self, client):
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask(client, model="claude-17")
        assert caught.value.body["error"]["type"] == "not_found_error"

    def test_keys(self):
        one = Live(lambda: Rig(keys=ApiKeys([ApiKey("right")])))
        try:
            for given in ({"api_key": "right"}, {"auth_token": "right", "api_key": None}):
                with anthropic.Anthropic(base_url=one.url, max_retries=0, **given) as client:
                    assert ask(client).content[0].text == "Hello!"
            with (
                anthropic.Anthropic(base_url=one.url, max_retries=0, api_key="wrong") as client,
                pytest.raises(anthropic.AuthenticationError) as caught,
            ):
                ask(client)
            assert caught.value.body["error"]["type"] == "authentication_error"
        finally:
            one.close()

    def test_fields_without_effect_are_named(self, client):
        answer = client.messages.with_raw_response.create(
            model=MODEL, max_tokens=64, messages=HI, thinking=THINK, service_tier="auto",
            extra_body={"context_management": {"edits": []}, "brand_new": 1}, extra_headers={"anthropic-beta": "x"},
        )  # fmt: skip
        assert answer.headers["x-lucevisor-ignored"] == ("brand_new, context_management, service_tier")


@given(texts, st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_any_chunking_adds_up_to_the_same_message(text, sizes, thinks, shows):
    totals = UsageTotals(prompt=9, cached=4, generated=5, reasoning=2)

    def formatter():
        made = MessageFormatter(prepared(max_tokens=5, show_reasoning=shows), CONTEXT)
        made.unique_id, made.response_id = "1", "msg_1"
        return made

    stream = formatter()
    events = [
        *stream.start(0),
        *(e for d in deltas_of(chunked(text, sizes), thinks=thinks) for e in stream.delta(0, d)),
        *stream.end(totals),
    ]
    message = None
    for event in json.loads(json.dumps(events)):
        if event["type"] != "ping":
            message = accumulate_event(event=EVENT.validate_python(event), current_snapshot=message, json_bufs={})
    whole = json.loads(msgspec.json.encode(formatter().full([deltas_of([text], thinks=thinks)], totals)))
    told = message.model_dump(exclude_none=True)
    assert told == {k: v for k, v in whole.items() if v is not None}
