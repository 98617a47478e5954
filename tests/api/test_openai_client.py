"""The unmodified `openai` client against the server on uvloop: results parse into its types, errors raise its own."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.api.conftest import script
from tests.api.scripted_model import MODEL, Rig, ids_of, say

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def server(live):
    return live()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def test_chat_stream_with_usage(client, server):
    script(server, say("Hello, wörld 🎉!"))
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, wörld 🎉!"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len(ids_of("Hello, wörld 🎉!")) + 1


def test_tools(client, server):
    script(server, say(CALL))
    answer = client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert answer.choices[0].finish_reason == "tool_calls"
    script(server, say("Two."))
    history = [*HI, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    again = client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])
    assert again.choices[0].message.content == "Two."


def test_streamed_tools_with_the_clients_own_accumulator(client, server):
    script(server, say("Wait.\n" + CALL))
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.content == "Wait."
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert final.choices[0].finish_reason == "tool_calls"


async def test_async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def one():
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(*(one() for _ in range(6))) == ["Hello!"] * 6


class TestErrors:
    def test_bad_request(self, client):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HI, temperature=5)
        assert caught.value.param == "temperature"
        assert caught.value.type == "invalid_request_error"
        assert caught.value.code == "invalid_value"
        assert caught.value.request_id

    def test_a_retry_after_a_shard_came_back(self, live):
        from lucevisor.api.contexts import ApiSettings

        server = live(lambda: Rig(settings=ApiSettings(retry_after_s=1)))
        server.do(Rig.lose)
        server.do(lambda rig: asyncio.get_running_loop().call_later(0.3, rig.attach))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as client:
            assert client.chat.completions.create(model=MODEL, messages=HI).choices[0].message.content == "Hello!"

    @pytest.mark.parametrize("n", [1, 2])
    def test_an_error_in_a_stream_is_raised(self, client, server, n):
        script(server, say("word ", end=False), step_s=0.02)
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True, n=n)
        seen = [next(stream) for _ in range(4)]
        server.do(Rig.lose)
        with pytest.raises(openai.APIError, match="group left was killed") as caught:
            seen += list(stream)
        assert caught.value.code == "shard_lost"
        assert not any(c.choices[0].finish_reason for c in seen)
