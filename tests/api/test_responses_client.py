"""The unmodified `openai` client against /v1/responses: types, accumulator, errors, stored conversations."""

from __future__ import annotations

import json
import urllib.request

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lucevisor.api.dialects.openai_responses import ResponsesFormatter
from lucevisor.api.keys import ApiKeys
from lucevisor.api.output import UsageTotals
from lucevisor.api.prepared import ResponseOptions
from lucevisor.api.response_store import ResponseStore, StoredResponse, with_stored
from lucevisor.config import ApiKey
from tests.api.conftest import Live, prompt_of, script
from tests.api.output_texts import CALL, CONTEXT, chunked, deltas_of, prepared, texts
from tests.api.scripted_model import MODEL, Rig, ids_of, say

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
HIGH = {"effort": "high"}
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def ask(client, given="Hi", **more):
    return client.responses.create(model=MODEL, input=given, **more)


def comparable(response):
    """A response without what differs from one to the next, the same for a message and its parsed form."""
    told = json.loads(json.dumps(response.to_dict()))
    for name in ("id", "created_at", "completed_at"):
        told.pop(name)
    for item in told["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return told


class TestWhole:
    def test_text(self, client, server):
        script(server, say("Hello, wörld 🎉!"))
        answer = ask(client, instructions="Be brief.", metadata={"topic": "greeting"}, temperature=0.5)
        assert answer.id.startswith("resp_")
        assert (answer.object, answer.status, answer.model) == ("response", "completed", MODEL)
        assert answer.output_text == "Hello, wörld 🎉!"
        assert [item.type for item in answer.output] == ["message"]
        assert answer.output[0].status == "completed"
        assert answer.usage.output_tokens == len(ids_of("Hello, wörld 🎉!")) + 1
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"topic": "greeting"}, 0.5)
        assert (answer.tool_choice, answer.tools, answer.error) == ("auto", [], None)
        assert answer.completed_at >= answer.created_at
        assert prompt_of(server).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
        Response.model_validate(answer.to_dict())

    def test_what_is_asked_comes_back_complete(self, client, server):
        """Open Responses requires each of these fields, null or not."""
        script(server, say("Hi."))
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.25}
        tools = [{"type": "function", "name": "f"}, ADD]
        answer = ask(client, tools=tools, tool_choice="none", max_tool_calls=3, extra_body=penalties).to_dict()
        assert (answer["presence_penalty"], answer["frequency_penalty"], answer["max_tool_calls"]) == (0.5, -0.25, 3)
        bare = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
        assert answer["tools"] == [bare, ADD]
        sampling = server.do(lambda rig: rig.stage.opened[-1].sampling)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
        script(server, say('{"a": 1}'))
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"}
        answer = ask(client, text=text).to_dict()
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": False, "description": None}
        assert answer["text"] == {"format": form, "verbosity": "low"}
        null = ("max_tool_calls", "max_output_tokens", "safety_identifier", "prompt_cache_key", "instructions", "error")
        assert [answer[name] for name in null] == [None] * len(null)
        assert (answer["presence_penalty"], answer["frequency_penalty"], answer["top_logprobs"]) == (0, 0, 0)

    def test_an_answer_that_is_cut(self, client, server):
        script(server, say("one two three", end=False))
        answer = ask(client, max_output_tokens=2)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[0].status == "incomplete"

    def test_messages_of_all_kinds(self, client, server):
        script(server, say("Yes."))
        ask(
            client,
            [
                {"role": "developer", "content": "Be kind."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A?"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "B."}]},
                {"role": "user", "content": "C?"},
            ],
            instructions="Be brief.",
        )
        prompt = prompt_of(server)
        assert "system\nBe brief.\n\nBe kind.<|im_end|>" in prompt
        assert "user\nA?<|im_end|>" in prompt
        assert "B.<|im_end|>\n<|im_start|>user\nC?<|im_end|>" in prompt

    def test_reasoning(self, client, server):
        script(server, say("Hm.\n</think>\n\nYes."))
        answer = ask(client, reasoning=HIGH)
        thought, message = answer.output
        assert [part.text for part in thought.content] == ["Hm."]
        assert (thought.summary, thought.encrypted_content, answer.reasoning.effort) == ([], None, "high")
        assert message.content[0].text == "Yes."
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        summarised = ask(client, reasoning={**HIGH, "summary": "auto"}, include=["reasoning.encrypted_content"])
        thought = summarised.output[0]
        assert [part.text for part in thought.summary] == ["Hm."]
        assert thought.content == []
        assert thought.encrypted_content

    def test_logprobs(self, client, server):
        script(server, say("Hello"))
        answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
        logprobs = answer.output[0].content[0].logprobs
        assert "".join(entry.token for entry in logprobs) == "Hello"
        assert len(logprobs[0].top_logprobs) == 2

    def test_fields_without_effect_are_named(self, client):
        answer = client.responses.with_raw_response.create(
            model=MODEL, input="Hi", truncation="auto", text={"verbosity": "low"}, prompt_cache_key="x",
            tools=[ADD, {"type": "web_search", "external_web_access": False}],
            extra_body={"client_metadata": {"a": "b"}},
        )  # fmt: skip
        assert answer.headers["x-lucevisor-ignored"] == (
            "client_metadata, prompt_cache_key, text.verbosity, tools[1], truncation"
        )


class TestTools:
    def test_a_conversation_without_the_store(self, client, server):
        script(server, say("Hm.\n</think>\n\nLet me add.\n" + CALL + "\n" + CALL))
        more = {"tools": [ADD], "store": False, "include": ["reasoning.encrypted_content"]}
        first = ask(client, reasoning={**HIGH, "summary": "auto"}, **more)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        calls = first.output[2:]
        assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1}')] * 2
        assert calls[0].call_id != calls[1].call_id
        history = [
            {"role": "user", "content": "Hi"},
            *[item.to_dict() for item in first.output],
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "two"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "three"}],
            },
        ]
        del history[1]["summary"][0]  # the encoded form carries it too
        script(server, say("Fine.\n</think>\n\nTwo."))
        second = ask(client, history, reasoning=HIGH, **more)
        assert second.output_text == "Two."
        prompt = prompt_of(server)
        assert "<think>\nHm.\n</think>\n\nLet me add.\n<tool_call>" in prompt
        assert prompt.count('{"name": "add", "arguments": {"a": 1}}') == 2
        assert prompt.index("<tool_response>\ntwo\n") < prompt.index("<tool_response>\nthree\n")

    def test_namespaces(self, client, server):
        spaces = [{"type": "namespace", "name": "maths", "description": "Numbers.", "tools": [ADD]}]
        script(server, say(CALL.replace('"add"', '"maths.add"')))
        answer = client.responses.create(model=MODEL, input="Hi", tools=spaces, store=False)
        (call,) = answer.output
        assert (call.namespace, call.name, call.arguments) == ("maths", "add", '{"a": 1}')
        assert '"name": "maths.add"' in prompt_of(server)
        ask(client, [{"role": "user", "content": "Hi"}, call.to_dict()], tools=spaces, store=False)
        assert '<tool_call>\n{"name": "maths.add", "arguments": {"a": 1}}' in prompt_of(server)

    @pytest.mark.parametrize("stream", [False, True])
    def test_custom_tools(self, client, server, stream):
        grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
        tool = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar}
        patch = '*** Begin Patch\n+a "b"\n*** End Patch'
        call = {"name": "apply_patch", "arguments": {"input": patch}}
        script(server, say(f"<tool_call>\n{json.dumps(call)}\n</tool_call>"))
        more = {"model": MODEL, "input": "Hi", "tools": [tool], "store": True}
        if stream:
            with client.responses.stream(**more) as events:
                kinds = [event.type for event in events]
                answer = events.get_final_response()
            assert "response.custom_tool_call_input.delta" in kinds
            assert "response.custom_tool_call_input.done" in kinds
        else:
            answer = client.responses.create(**more)
        (call,) = answer.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", patch)
        prompt = prompt_of(server)
        assert "Edits files." in prompt
        assert "must follow this lark grammar" in prompt
        script(server, say("Done."))
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "patched"}
        ask(client, [{"role": "user", "content": "Hi"}, call.to_dict(), output], tools=[tool], store=False)
        assert "<tool_response>\npatched" in prompt_of(server)
        assert "*** End Patch" in prompt_of(server)
        again = ask(client, [output], previous_response_id=answer.id, tools=[tool])
        assert again.output_text == "Done."

    def test_other_arguments_of_a_custom_tool_are_its_input(self, client, server):
        script(server, say(CALL.replace("add", "patch")))
        (call,) = ask(client, tools=[{"type": "custom", "name": "patch"}]).output
        assert call.input == '{"a": 1}'

    @pytest.mark.parametrize("value", ['"\\ud800"', "1e999"])
    def test_values_of_a_custom_tool_that_utf_8_or_a_double_cannot_hold(self, client, server, value):
        arguments = f'{{"input": {value}}}'
        script(server, say(f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'))
        (call,) = ask(client, tools=[{"type": "custom", "name": "patch"}]).output
        assert call.input == arguments

    def test_references_to_items(self, client, server):
        script(server, say("hm\n</think>\n\nBlue is the word."))
        first = ask(client, "Which word?", reasoning=HIGH)
        items = [{"type": "item_reference", "id": item.id} for item in first.output]
        script(server, say("Yes."))
        second = ask(client, [{"role": "user", "content": "Which word?"}, *items, {"role": "user", "content": "Sure?"}])
        assert "Blue is the word." in prompt_of(server)
        ask(client, "Really?", previous_response_id=second.id)
        assert prompt_of(server).index("Blue is the word.") < prompt_of(server).index("Really?")
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as caught:
            ask(client, items)
        assert (caught.value.code, caught.value.param) == ("item_not_found", "input[0].id")

    def test_choices(self, client, server):
        script(server, say("No."))
        ask(client, tools=[ADD], tool_choice="none")
        assert "add" not in prompt_of(server)
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
        ask(client, tools=[ADD, {**ADD, "name": "sub"}], tool_choice=allowed)
        assert '"sub"' in prompt_of(server)
        assert '"add"' not in prompt_of(server)
        assert ask(client, tool_choice="auto").tool_choice == "auto"

    def test_one_call_at_a_time(self, client, server):
        script(server, say(CALL + "\n" + CALL, end=False))
        assert len(ask(client, tools=[ADD], parallel_tool_calls=False).output) == 1


class TestStored:
    def test_a_conversation_by_ids(self, client, server):
        script(server, say("Hm.\n</think>\n\n" + CALL))
        first = ask(client, "What is it?", tools=[ADD], reasoning=HIGH, instructions="Be brief.")
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "two"}
        script(server, say("It is two."))
        second = ask(client, [output], previous_response_id=first.id, tools=[ADD])
        assert second.previous_response_id == first.id
        prompt = prompt_of(server)
        assert "Be brief." not in prompt  # instructions are for one response
        assert "user\nWhat is it?<|im_end|>" in prompt
        assert "<think>\nHm.\n</think>\n\n<tool_call>" in prompt
        assert "<tool_response>\ntwo\n</tool_response>" in prompt
        ask(client, "Sure?", previous_response_id=second.id)
        assert "It is two.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>" in prompt_of(server)

    def test_get_and_delete(self, client, server):
        script(server, say("Hello!"))
        with client.responses.stream(model=MODEL, input="Hi") as stream:
            streamed = stream.get_final_response()
        for first in (ask(client), streamed):
            assert comparable(client.responses.retrieve(first.id)) == comparable(first)
            client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError, match=first.id):
                client.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError) as caught:
                ask(client, previous_response_id=first.id)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")

    def test_counting_tokens(self, client, server):
        first = ask(client, "Hi", store=True)
        more = {"instructions": "Be brief.", "tools": [ADD], "previous_response_id": first.id}
        counted = client.responses.input_tokens.count(model=MODEL, input="And?", tool_choice="required", **more)
        answer = ask(client, "And?", **more)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
        more["tools"] = [{**ADD, "strict": True}]
        assert (
            client.responses.input_tokens.count(model=MODEL, input="And?", **more).input_tokens == counted.input_tokens
        )
        assert client.responses.input_tokens.count(model=MODEL, input="word " * 2000).input_tokens > 2000
        with pytest.raises(openai.NotFoundError):
            client.responses.input_tokens.count(model=MODEL, input="x", previous_response_id="resp_0")

    def test_what_a_client_makes_up_is_not_stored(self, client):
        made_up = {"stored_responses": {"resp_1": [[]]}}
        with pytest.raises(openai.NotFoundError):
            ask(client, previous_response_id="resp_1", extra_body=made_up)

    def test_not_stored_if_not_wanted(self, client):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ask(client, store=False).id)

    def test_another_key_finds_nothing(self):
        one = Live(lambda: Rig(keys=ApiKeys([ApiKey("ann"), ApiKey("bob")])))
        try:
            with openai.OpenAI(base_url=one.url + "/v1", api_key="ann", max_retries=0) as ann:
                first = ask(ann)
                assert ask(ann, previous_response_id=first.id).status == "completed"
                bob = ann.with_options(api_key="bob")
                with pytest.raises(openai.NotFoundError):
                    bob.responses.retrieve(first.id)
                with pytest.raises(openai.NotFoundError):
                    ask(bob, previous_response_id=first.id)
        finally:
            one.close()


class TestStream:
    def test_the_documented_order(self, client, server):
        script(server, say("Hm.\n</think>\n\nYes.\n" + CALL))
        for summary in (None, "auto"):
            stream = ask(client, stream=True, tools=[ADD], reasoning={**HIGH, "summary": summary})
            events = list(stream)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            order = [event.type.removeprefix("response.") for event in events]
            order = [name for i, name in enumerate(order) if order[i - 1 : i] != [name]]
            text, part = ("reasoning_text", "content_part")
            if summary:
                text, part = ("reasoning_summary_text", "reasoning_summary_part")
            assert order == [
                "created", "in_progress",
                "output_item.added", f"{part}.added", f"{text}.delta", f"{text}.done", f"{part}.done",
                "output_item.done",
                "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
                "output_item.done",
                "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
                "output_item.done",
                "completed",
            ]  # fmt: skip
            added = [event for event in events if event.type == "response.output_item.added"]
            assert [event.output_index for event in added] == [0, 1, 2]
            assert [event.item.status for event in added] == ["in_progress"] * 3
            assert events[0].response.status == "in_progress"
            assert events[0].response.output == []

    @pytest.mark.parametrize(
        ("text", "more"),
        [
            ("Hello, wörld 🎉!", {}),
            ("Hm.\n</think>\n\nYes.\n" + CALL + "\n" + CALL, {"reasoning": HIGH, "tools": [ADD]}),
            ("Hm.\n</think>\n\nYes.", {"reasoning": {**HIGH, "summary": "auto"}}),
            ("one two three", {"max_output_tokens": 2}),
            ("Hello", {"top_logprobs": 1}),
        ],
    )
    def test_the_client_adds_up_what_is_sent_whole(self, client, server, text, more):
        script(server, say(text))
        seen = ""
        with client.responses.stream(model=MODEL, input="Hi", **more) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    seen += event.delta
            complete = event.type == "response.completed"
            final = stream.get_final_response() if complete else event.response  # it gathers complete ones only
        assert final.output_text == seen
        assert comparable(final) == comparable(ask(client, **more))

    def test_events_have_names_and_no_done(self, server):
        script(server, say("Hi."))
        body = json.dumps({"model": MODEL, "input": "Hi", "stream": True}).encode()
        request = urllib.request.Request(server.url + "/v1/responses", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            parts = reply.read().decode().split("\n\n")
        assert parts.pop() == ""
        for part in parts:
            name, _, data = part.removeprefix("event: ").partition("\ndata: ")
            assert json.loads(data)["type"] == name
        assert name == "response.completed"

    def test_a_failure_on_the_way(self, client, server):
        script(server, say("word ", end=False), step_s=0.02)
        stream = ask(client, stream=True)
        seen = [next(stream) for _ in range(6)]
        server.do(Rig.lose)
        seen += list(stream)
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.error.message == "group left was killed; send the request again"
        server.do(Rig.attach)


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input[0].type"),
            ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
            ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
            ({"input": [{"type": "function_call", "name": "x", "call_id": "c"}]}, "input[0].arguments"),
            ({"input": [{"type": "function_call_output", "call_id": "c", "output": 1}]}, "input[0].output"),
            ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA="}]}, "input[0].encrypted_content"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
            ({"tools": [{**ADD, "name": ""}]}, "tools[0].name"),
            ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
            ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
            ({"tool_choice": "sometimes"}, "tool_choice"),
            ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"temperature": 3}, "temperature"),
            ({"background": True}, "background"),
            ({"conversation": "c"}, "conversation"),
            ({"metadata": {"a": 1}}, "metadata[...]"),
            ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
            ({"extra_body": {"messages": [{}]}}, "messages"),
            ({"extra_body": {"tempratur": 1}}, "tempratur"),
            ({"extra_body": {"stored_responses": 1}}, "stored_responses"),
        ],
    )
    def test_a_bad_request_names_the_field(self, client, fields, param):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": MODEL, "input": "Hi", **fields})
        assert caught.value.param == param
        assert caught.value.message

    def test_a_prompt_that_is_too_long(self, client):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "word " * 600)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@given(texts, st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_any_chunking_adds_up_to_the_same_response(text, sizes, thinks, summary):
    totals = UsageTotals(prompt=9, cached=4, generated=5, reasoning=2)
    echo = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}
    options = ResponseOptions(
        echo=json.dumps(echo).encode(), items=b"[]", previous_id=None, store=False, summary=summary, encrypted=True,
        namespaces={}, custom=["patch"],
    )  # fmt: skip

    def formatter():
        made = ResponsesFormatter(prepared(response=options), CONTEXT, lambda *_: None)
        made.unique_id, made.response_id, made.created_s = "1", "resp_1", 1
        return made

    stream = formatter()
    events = [
        *stream.start(0),
        *(e for d in deltas_of(chunked(text, sizes), thinks=thinks) for e in stream.delta(0, d)),
        *stream.end(totals),
    ]
    whole = json.loads(msgspec.json.encode(formatter().full([deltas_of([text], thinks=thinks)], totals)))
    state = ResponseStreamState(input_tools=[], text_format=openai.Omit())
    told = {"text": {}, "items": []}
    for event in msgspec.json.decode(msgspec.json.encode(events)):
        typed = EVENT.validate_python(event)
        state.handle_event(typed)
        if event["type"] == "response.output_item.done":
            told["items"].append(event["item"])
        elif event["type"].endswith(".delta"):
            key = event["output_index"]
            told["text"][key] = told["text"].get(key, "") + event["delta"]
    assert events[-1]["type"] == "response.completed"
    assert told["items"] == whole["output"]
    for index, item in enumerate(whole["output"]):
        parts_of = item.get("content") or item.get("summary") or [{"text": item.get("arguments")}]
        assert told["text"][index] == parts_of[0]["text"]
    told_whole = json.loads(msgspec.json.encode(events[-1]["response"]))
    assert told_whole | {"completed_at": 0} == whole | {"completed_at": 0}


# ---- stored responses


names = st.sampled_from([f"resp_{i:x}" for i in range(8)])
keys = st.sampled_from(["", "ann"])

operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete"]), names, keys, st.integers(0, 60)), max_size=40
)


@given(operations)
@settings(max_examples=200)
def test_bounds_and_keys(todo):
    store, kept = ResponseStore(3, 100), {}
    for what, name, key, size in todo:
        if what == "put":
            if name in kept:
                continue  # ids are unique
            response = StoredResponse(b"x" * size, (b"y" * size,), key)
            store.put(name, response)
            if 2 * size <= 100:
                kept[name] = response
                while len(kept) > 3 or sum(r.n_bytes for r in kept.values()) > 100:
                    del kept[next(iter(kept))]
        elif what == "get":
            found = store.get(name, key)
            if found is None:
                assert name not in kept or kept[name].key_id != key
            else:
                assert found is kept[name]
                kept[name] = kept.pop(name)  # the most recently used
        else:
            mine = name in kept and kept[name].key_id == key
            assert store.delete(name, key) is mine
            if mine:
                del kept[name]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.text(max_size=20), st.sampled_from(["", " ", "\n\t"]))
@settings(max_examples=100)
async def test_a_reference_is_found_in_parts(sizes, text, blanks):
    store = ResponseStore(4, 1000)
    stored = StoredResponse(b"{}", (b'[{"role":"user","content":"A"}]', b"[]"), "")
    store.put("resp_ab", stored)
    store.put("resp_cd", StoredResponse(b"{}", (b"[]",), "another"))
    body = {"input": text, "previous_response_id": "resp_ab", "metadata": {"previous_response_id": "resp_cd"}}
    raw = (blanks + json.dumps(body, indent=len(blanks) or None)).encode()
    parts = chunked(raw, [max(2, size) for size in sizes])
    found = await store.named_in(parts, "")
    assert found == {"resp_ab": stored}
    before = sum(map(len, parts))
    added = with_stored(parts, found)
    amended = b"".join(parts)
    assert len(amended) == before + added
    told = {"stored_responses": {"resp_ab": [[{"role": "user", "content": "A"}], []]}, **body}
    if raw.startswith(b"{"):
        assert json.loads(amended) == told
    else:
        assert json.loads(amended) in (told, body)
