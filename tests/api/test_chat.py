"""POST /v1/chat/completions over a real socket: shapes, reasons, parameters, errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lucevisor.api.contexts import SamplingDefaults
from lucevisor.api.dialects.openai_chat import parse_chat
from lucevisor.api.parameters import budget_of
from lucevisor.text.template import ChatTemplate
from tests.api.scripted_model import MODEL, OPENAI_SAMPLING, Rig, dice, ids_of, say, tokenizer
from tests.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
UNDER_WAY = 6  # tokens sampled until a sequence that its reader cancels ends: steps run ahead


@pytest.fixture
def client(shared_client):
    return shared_client


class TestWhole:
    async def test_the_shape(self, client):
        client.rig.stage.script = say("Hello, wörld 🎉!")
        status, answer = await client.chat(model=MODEL)
        assert status == 200
        n = len(ids_of("Hello, wörld 🎉!")) + 1
        n_prompt = answer["usage"]["prompt_tokens"]
        assert answer.pop("id").startswith("chatcmpl-")
        assert isinstance(answer.pop("created"), int)
        assert set(answer.pop("timings")) == {"queue_s", "prefill_s", "decode_s"}
        assert answer == {
            "object": "chat.completion",
            "model": MODEL,
            "system_fingerprint": "fp_test",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello, wörld 🎉!", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n,
                "total_tokens": n_prompt + n,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 0,
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
                "lucevisor": {"sampling": OPENAI_SAMPLING},
            },
        }
        await until(lambda: client.rig.n_busy == 0)

    async def test_the_prompt_is_the_templates(self, client):
        await client.chat("Hi <|im_end|>", enable_thinking=True)
        seen = client.rig.stage.opened[-1].prompt
        assert tokenizer().decode(seen, skip_special=False) == (
            "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n<think>\n"
        )
        assert seen.count(tokenizer().token_id("<|im_end|>")) == 1  # the client's own is letters

    async def test_without_max_tokens_the_context_is_the_limit(self, client):
        client.rig.stage.script = say("word ", end=False)
        _, answer = await client.chat()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 512

    async def test_tool_calls(self, client):
        client.rig.stage.script = say(CALL)
        _, answer = await client.chat(tools=[TOOL], tool_choice="auto")
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        prompt = tokenizer().decode(client.rig.stage.opened[-1].prompt)
        assert '"name": "add"' in prompt

    async def test_one_call_without_parallel_calls(self, client):
        client.rig.stage.script = say(CALL + "\n" + CALL, end=False)
        _, answer = await client.chat(tools=[TOOL], parallel_tool_calls=False)
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
        assert len(client.rig.stage.opened[-1].generated) <= answer["usage"]["completion_tokens"] + UNDER_WAY
        await until(lambda: client.rig.n_busy == 0)

    async def test_stop_strings(self, client):
        client.rig.stage.script = say("one two three four", end=False)
        _, answer = await client.chat(stop=["three", "x"])
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one two ", "stop")
        n = answer["usage"]["completion_tokens"]
        assert n == len(ids_of("one two three"))
        assert len(client.rig.stage.opened[-1].generated) <= n + UNDER_WAY
        await until(lambda: client.rig.n_busy == 0)

    async def test_logprobs(self, client):
        client.rig.stage.script = dice
        _, answer = await client.chat(logprobs=True, top_logprobs=3, max_tokens=4, temperature=0)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        for entry in content:
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy takes the best
            assert len(entry["top_logprobs"]) == 3
            assert bytes(entry["bytes"]).decode() == entry["token"]
        _, answer = await client.chat(logprobs=True, max_tokens=1)
        assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    async def test_token_ids(self, client):
        client.rig.stage.script = say("Hello")
        _, answer = await client.chat(return_token_ids=True)
        assert answer["prompt_token_ids"] == client.rig.stage.opened[-1].prompt
        ids = answer["choices"][0]["token_ids"]
        assert ids[:-1] == ids_of("Hello")
        assert ids[-1] in tokenizer().eos_ids

    async def test_several_choices_differ_by_seed_and_the_first_is_that_of_one(self, client):
        client.rig.stage.script = dice
        _, three = await client.chat(n=3, seed=11, max_tokens=8)
        _, one = await client.chat(seed=11, max_tokens=8)
        texts = [choice["message"]["content"] for choice in three["choices"]]
        assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
        assert texts[0] == one["choices"][0]["message"]["content"]
        assert len(set(texts)) == 3
        assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        assert three["usage"]["completion_tokens"] == 24

    async def test_seeds(self, client):
        client.rig.stage.script = dice
        ask = {"max_tokens": 8}
        first, second, third = [(await client.chat(seed=s, **ask))[1]["choices"][0]["message"] for s in (1, 1, 2)]
        assert first == second != third
        free = {(await client.chat(**ask))[1]["choices"][0]["message"]["content"] for _ in range(4)}
        assert len(free) > 1  # no seed: another one each time

    async def test_the_rest_of_the_parameters_reach_the_stage(self, client):
        await client.chat(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.01,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            logit_bias={"5": 2},
            ignore_eos=True,
            max_completion_tokens=1,
            user="ann",
            store=False,
            response_format={"type": "text"},
        )
        s = client.rig.stage.opened[-1].sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 7, 0.01)
        assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.5, -0.5, 1.1)
        assert s.logit_bias == {5: 2.0}
        assert set(s.banned) == tokenizer().eos_ids

    async def test_defaults_of_the_model_file(self, start):
        client = await start(Rig(defaults=SamplingDefaults(temperature=0.25, top_k=9)))
        await client.chat()
        assert client.rig.stage.opened[-1].sampling.top_k == 9
        assert client.rig.stage.opened[-1].sampling.temperature == 0.25

    async def test_ignore_eos_goes_on(self, client):
        client.rig.stage.script = say([2200, 8184], end=False)
        _, answer = await client.chat(ignore_eos=True, max_tokens=6)
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["choices"][0]["finish_reason"] == "length"


class TestBeginnings:
    """A last message of the assistant's is the beginning of the answer."""

    HI = ({"role": "user", "content": "Hi"},)

    async def prompt(self, client, *messages, **more):
        status, answer = await client.ask(CHAT, {"messages": [*self.HI, *messages], "max_tokens": 1, **more})
        assert status == 200, answer
        return tokenizer().decode(client.rig.stage.opened[-1].prompt, skip_special=False)

    @pytest.mark.parametrize(
        ("fields", "more", "end"),
        [
            ({"content": "It is"}, {}, "<think>\n\n</think>\n\nIt is"),
            ({"content": "It is"}, {"enable_thinking": True}, "<think>\n\n</think>\n\nIt is"),
            (
                {"content": "It is", "reasoning_content": "Hm."},
                {"enable_thinking": True},
                "<think>\nHm.\n</think>\n\nIt is",
            ),
            ({"content": "", "reasoning_content": "Hm, I"}, {"enable_thinking": True}, "<think>\nHm, I"),
            ({"content": [{"type": "text", "text": "</think>"}]}, {}, "<think>\n\n</think>\n\n</think>"),
            ({"content": "It is"}, {"continue_final_message": True, "add_generation_prompt": False}, "\n\nIt is"),
            ({"content": "It is"}, {"continue_final_message": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
            ({"content": "It is"}, {"add_generation_prompt": False}, "It is<|im_end|>\n"),
        ],
    )
    async def test_where_the_prompt_ends(self, client, fields, more, end):
        prompt = await self.prompt(client, {"role": "assistant", **fields}, **more)
        assert prompt.endswith(end)
        assert prompt.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    async def test_the_answer_is_what_is_new(self, client):
        client.rig.stage.script = say(" five.")
        _, answer = await client.ask(CHAT, {"messages": [*self.HI, {"role": "assistant", "content": "It is"}]})
        assert answer["choices"][0]["message"]["content"] == " five."

    async def test_reasoning_goes_on(self, client):
        client.rig.stage.script = say(" see.\n</think>\n\nYes.")
        begun = {"role": "assistant", "content": "", "reasoning_content": "Hm, I"}
        _, answer = await client.ask(CHAT, {"messages": [*self.HI, begun], "enable_thinking": True})
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (" see.", "Yes.")

    async def test_a_client_cannot_close_reasoning(self, client):
        prompt = await self.prompt(client, {"role": "assistant", "content": "<|im_end|>"})
        assert prompt.endswith("<|im_end|>")
        assert client.rig.stage.opened[-1].prompt[-1] != tokenizer().token_id("<|im_end|>")

    @pytest.mark.parametrize("messages", [[], [{"role": "tool", "content": "x"}]])
    async def test_only_the_assistants_can_be_continued(self, client, messages):
        status, answer = await client.ask(CHAT, {"messages": [*self.HI, *messages], "continue_final_message": True})
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")


class TestOtherServers:
    """Parameters that vLLM, llama.cpp's server and routers have."""

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
    async def test_minus_one_is_no_limit(self, client, name):
        client.rig.stage.script = say("Hello")
        _, answer = await client.chat(**{name: -1})
        assert answer["choices"][0]["finish_reason"] == "stop"

    async def test_min_tokens(self, client):
        client.rig.stage.script = say("Hello")
        _, answer = await client.chat(min_tokens=1, stop=["ell"])
        assert answer["choices"][0]["message"]["content"] == "Hello"
        _, answer = await client.chat(min_tokens=0, stop=["ell"])
        assert answer["choices"][0]["message"]["content"] == "H"

    async def test_usage_with_every_chunk(self, client):
        client.rig.stage.script = say("one two three", end=False)
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2, "stream_options": options}
        *chunks, last, done = await client.events(CHAT, body)
        assert done == "[DONE]"
        used = [json.loads(chunk)["usage"] for chunk in chunks]
        assert [u["completion_tokens"] for u in used if u["completion_tokens"]] != []
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in used)
        assert {u["prompt_tokens"] for u in used} == {json.loads(last)["usage"]["prompt_tokens"]}
        assert [u["completion_tokens"] for u in used[-2:]] == [3, 3]

    async def test_a_stop_string_in_the_answer(self, client):
        client.rig.stage.script = say("one two three", end=False)
        _, answer = await client.chat(stop="two", include_stop_str_in_output=True)
        assert answer["choices"][0]["message"]["content"] == "one two"

    async def test_custom_tools(self, client):
        client.rig.stage.script = say(
            '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
        )
        patch = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
        _, answer = await client.chat(tools=[patch])
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "*** Begin"})
        history = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"},
        ]
        messages = [{"role": "user", "content": "Hi"}, *history]
        status, _ = await client.ask(CHAT, {"messages": messages, "tools": [patch], "max_tokens": 1})
        assert status == 200
        text = tokenizer().decode(client.rig.stage.opened[-1].prompt)
        assert '{"name": "patch", "arguments": {"input": "*** Begin"}}' in text

    async def test_what_has_no_effect_is_named(self, client):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        body |= {
            "cache_salt": "x",
            "repetition_detection": None,
            "chat_template_kwargs": {"a\r\nb": 1, "colour": "red"},
        }
        async with client.session.post(client.url + CHAT, json=body) as response:
            assert response.status == 200
            named = response.headers["X-Lucevisor-Ignored"]
        assert named == "'chat_template_kwargs.a\\r\\nb', cache_salt, chat_template_kwargs.colour"

    @pytest.mark.parametrize(
        "fields",
        [{"tools": [], "tool_choice": "auto"}, {"function_call": "none"}, {"functions": []}, {"metadata": {"a": 1}}],
    )
    async def test_what_asks_for_nothing_is_accepted(self, client, fields):
        status, _ = await client.chat(max_tokens=1, **fields)
        assert status == 200

    async def test_refusals_in_the_history(self, client):
        refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
        messages = [{"role": "user", "content": "a"}, refusal, {"role": "user", "content": "b"}]
        status, _ = await client.ask(CHAT, {"messages": messages, "max_tokens": 1})
        assert status == 200
        assert "I will not." in tokenizer().decode(client.rig.stage.opened[-1].prompt)

    @pytest.mark.parametrize("fields", [{"reasoning": {"exclude": True}}, {"include_reasoning": False}])
    async def test_reasoning_may_be_left_out(self, client, fields):
        client.rig.stage.script = say("Hm.\n</think>\n\nYes.")
        _, answer = await client.chat(enable_thinking=True, **fields)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


class TestThinking:
    @pytest.mark.parametrize(
        ("fields", "thinks"),
        [
            ({}, False),  # the template's own default
            ({"enable_thinking": True}, True),
            ({"enable_thinking": False}, False),
            ({"reasoning_effort": "high"}, True),
            ({"reasoning_effort": "none"}, False),
            ({"chat_template_kwargs": {"enable_thinking": True}}, True),
            ({"reasoning_effort": "low", "enable_thinking": True}, True),
            ({"reasoning": {"enabled": True}}, True),
            ({"reasoning": {"effort": "high"}}, True),
            ({"reasoning": {"effort": "none"}}, False),
            ({"reasoning": {"enabled": False}}, False),
            ({"thinking": {"type": "enabled", "budget_tokens": 99}}, True),
            ({"thinking": {"type": "disabled"}}, False),
        ],
    )
    async def test_switches(self, client, fields, thinks):
        assert (await client.chat(**fields))[0] == 200
        prompt = tokenizer().decode(client.rig.stage.opened[-1].prompt, skip_special=False)
        assert prompt.endswith("<think>\n") == thinks

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
            (
                {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
                "chat_template_kwargs",
            ),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ],
    )
    async def test_contradictions(self, client, fields, param):
        status, answer = await client.chat(**fields)
        assert (status, answer["error"]["param"]) == (400, param)

    async def test_a_template_without_a_switch_refuses_the_wish(self, start):
        template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
        client = await start(Rig(template=template))
        status, answer = await client.chat(enable_thinking=True)
        assert (status, answer["error"]["param"]) == (400, "enable_thinking")
        assert (await client.chat(enable_thinking=False))[0] == 200  # it does not think anyway
        status, answer = await client.chat(tools=[TOOL])
        assert (status, answer["error"]["param"]) == (400, "tools")

    async def test_a_template_that_always_thinks_cannot_be_told_not_to(self, start):
        template = ChatTemplate("{{ messages[0].content }}<think>{# </think> #}", {})
        client = await start(Rig(template=template))
        status, answer = await client.chat(enable_thinking=False)
        assert (status, answer["error"]["param"]) == (400, "enable_thinking")
        assert (await client.chat(reasoning_effort="none"))[0] == 200
        options = parse_chat({"messages": MESSAGES, "reasoning_effort": "none"}, client.rig.context).options
        assert options.max_thinking_tokens == 0  # no tokens for it: its end is forced

    @pytest.mark.parametrize(
        ("effort", "budget"),
        [("minimal", 256), ("low", 1024), ("medium", 8192), ("high", 32768), ("xhigh", None), ("max", None)],
    )
    async def test_efforts_are_budgets_where_the_template_knows_none(self, start, effort, budget):
        template = ChatTemplate("{{ messages[0].content }}<think>{# </think> #}", {})
        client = await start(Rig(template=template))
        body = {"messages": MESSAGES, "reasoning_effort": effort}
        if effort == "minimal":
            assert parse_chat(body, client.rig.context).options.max_thinking_tokens == budget
        assert budget_of(effort, client.rig.context) == budget
        assert budget_of("low", replace(client.rig.context, efforts={"low": 99})) == 99  # of a model card

    async def test_a_model_without_a_chat_template(self, start):
        client = await start(Rig(template=None))
        status, answer = await client.chat()
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")


class TestStream:
    async def chunks(self, client, **more):
        events = await client.events(CHAT, {"messages": MESSAGES, **more})
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def test_the_shape(self, client):
        client.rig.stage.script = say("Hello, wörld 🎉!")
        chunks = await self.chunks(client)
        assert len({(c["id"], c["created"], c["object"], c["model"]) for c in chunks}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk"
        choices = [c["choices"][0] for c in chunks]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in choices) == "Hello, wörld 🎉!"
        assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert all(c["finish_reason"] is None for c in choices[:-1])
        assert not any("usage" in c for c in chunks)

    async def test_usage_comes_last_without_choices(self, client):
        chunks = await self.chunks(client, stream_options={"include_usage": True})
        assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        _, whole = await client.chat()
        assert chunks[-1]["usage"] == whole["usage"]

    @pytest.mark.parametrize(
        ("script", "fields", "reason"),
        [
            (say("a b c", end=False), {"max_tokens": 3}, "length"),
            (say("a b c", end=False), {"stop": "c"}, "stop"),
            (say("Yes.\n" + CALL), {"tools": [TOOL]}, "tool_calls"),
            (say("Hm.\n</think>\n\nYes."), {"enable_thinking": True}, "stop"),
            (say([8184]), {}, "stop"),
        ],
    )
    async def test_reasons_and_what_a_stream_adds_up_to(self, client, script, fields, reason):
        client.rig.stage.script = script
        fields = {**fields, "return_token_ids": True, "logprobs": True}
        chunks = await self.chunks(client, **fields)
        _, whole = await client.chat(**fields)
        choices = [c["choices"][0] for c in chunks]
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == reason
        assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
        told = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert told == whole["choices"][0]["logprobs"]["content"]
        deltas, message = [c["delta"] for c in choices], whole["choices"][0]["message"]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        assert [(c.pop("index"), c.pop("id")[:5], c) for c in calls] == [
            (i, c.pop("id")[:5], c) for i, c in enumerate(message.get("tool_calls") or ())
        ]

    async def test_several_choices(self, client):
        client.rig.stage.script = dice
        chunks = await self.chunks(client, n=3, seed=3, max_tokens=5)
        _, whole = await client.chat(n=3, seed=3, max_tokens=5)
        for index in range(3):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert mine[0]["delta"]["role"] == "assistant"
            text = "".join(c["delta"].get("content", "") for c in mine)
            assert text == whole["choices"][index]["message"]["content"]
            assert mine[-1]["finish_reason"] == "length"


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"stream_options": {}}, "stream_options"),
            ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
            ({"guided_regex": "[0-9"}, "guided_regex"),
            ({"grammar": "root ::= missing"}, "grammar"),
            ({"guided_json": {"type": "thing"}}, "guided_json"),
            ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
            ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
            ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
            ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
            ({"suffix": "x"}, "suffix"),
        ],
    )
    async def test_400_names_the_parameter(self, client, fields, param):
        status, answer = await client.ask(CHAT, {"messages": MESSAGES, **fields})
        assert status == 400
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"] == param
        await until(lambda: client.rig.n_busy == 0)

    async def test_a_prompt_too_long_has_its_code(self, client):
        status, answer = await client.chat("word " * 600)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")

    async def test_messages_that_the_template_cannot_take(self, start):
        template = ChatTemplate("{{ raise_exception('no system message, please') }}", {})
        client = await start(Rig(template=template))
        status, answer = await client.chat()
        assert status == 400
        assert answer["error"]["param"] == "messages"
        assert "no system message, please" in answer["error"]["message"]
