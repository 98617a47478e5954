"""POST /v1/completions over a real socket: every form of prompt, shapes, logprobs, echo."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.api.scripted_model import MODEL, OPENAI_SAMPLING, dice, ids_of, say, tokenizer
from tests.waiting import until

PLAIN = "/v1/completions"


@pytest.fixture
def client(shared_client):
    return shared_client


class TestWhole:
    async def test_the_shape(self, client):
        client.rig.stage.script = say(" world")
        status, answer = await client.ask(PLAIN, {"prompt": "Hello", "model": MODEL})
        assert status == 200
        assert answer.pop("id").startswith("cmpl-")
        assert isinstance(answer.pop("created"), int)
        del answer["timings"]
        n, n_prompt = len(ids_of(" world")) + 1, len(ids_of("Hello"))
        assert answer == {
            "object": "text_completion",
            "model": MODEL,
            "system_fingerprint": "fp_test",
            "choices": [{"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n,
                "total_tokens": n + n_prompt,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 0,
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
                "lucevisor": {"sampling": OPENAI_SAMPLING},
            },
        }

    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ("Hi there", [ids_of("Hi there")]),
            (["Hi", "there"], [ids_of("Hi"), ids_of("there")]),
            ([5, 6, 8184], [[5, 6, 8184]]),
            ([[5, 6], [7]], [[5, 6], [7]]),
            ("<|im_start|>user", [ids_of("<|im_start|>user")]),
        ],
    )
    async def test_every_form_of_prompt(self, client, prompt, expected):
        _, answer = await client.ask(PLAIN, {"prompt": prompt, "max_tokens": 1})
        assert sorted(seen.prompt for seen in client.rig.stage.opened) == sorted(expected)
        assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))

    async def test_prompts_times_choices(self, client):
        client.rig.stage.script = lambda seen: (seen.prompt[0], [(seen.prompt[0], -0.5)])
        _, answer = await client.ask(
            PLAIN, {"prompt": [[300], [400]], "n": 2, "max_tokens": 1, "return_token_ids": True}
        )
        assert [c["token_ids"] for c in answer["choices"]] == [[300], [300], [400], [400]]
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["usage"]["completion_tokens"] == 4

    async def test_tags_are_plain_text(self, client):
        text = "<think>a</think><tool_call>{}</tool_call>"
        client.rig.stage.script = say(tokenizer().encode(text))
        _, answer = await client.ask(PLAIN, {"prompt": "x"})
        assert answer["choices"][0]["text"] == text

    async def test_logprobs(self, client):
        client.rig.stage.script = dice
        _, answer = await client.ask(PLAIN, {"prompt": "x", "logprobs": 2, "max_tokens": 3, "seed": 4})
        told = answer["choices"][0]["logprobs"]
        assert "".join(told["tokens"]) == answer["choices"][0]["text"]
        for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
            assert answer["choices"][0]["text"][offset:].startswith(token)
        for token, value, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
            assert top[token] == value
            assert 2 <= len(top) <= 3

    async def test_echo(self, client):
        client.rig.stage.script = say(" b")
        _, answer = await client.ask(PLAIN, {"prompt": ["a", "c"], "echo": True})
        assert [c["text"] for c in answer["choices"]] == ["a b", "c b"]
        _, answer = await client.ask(PLAIN, {"prompt": ids_of("Hello"), "echo": True})
        assert answer["choices"][0]["text"] == "Hello b"

    async def test_echo_with_logprobs(self, client):
        client.rig.stage.script = say(" b")
        prompt = "Once upon a time"
        body = {"prompt": [prompt, prompt, "Hello"], "echo": True, "logprobs": 1, "n": 2}
        for _ in range(2):  # a cached prefix has no log-probabilities: the prompt is computed again
            _, answer = await client.ask(PLAIN, body)
            assert [c["text"] for c in answer["choices"]] == [prompt + " b"] * 4 + ["Hello b"] * 2
            for choice in answer["choices"]:
                told = choice["logprobs"]
                assert "".join(told["tokens"]) == choice["text"]
                assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(len(told["tokens"]))]
                n_prompt = len(ids_of(choice["text"].removesuffix(" b")))
                assert told["token_logprobs"] == [None, *[-0.5] * (n_prompt - 1), -0.25]
                assert told["top_logprobs"][0] is None
                assert told["top_logprobs"][1:n_prompt] == [{t: -0.5} for t in told["tokens"][1:n_prompt]]

    async def test_a_prompt_that_is_scored_is_never_compressed(self, start):
        class Refusing:
            settings = SimpleNamespace(min_share=0.5)

            async def compress(self, *prompt):
                raise AssertionError("a scored prompt was compressed")

        client = await start()
        client.rig.context.compressor = Refusing()
        body = {"prompt": "Once upon a time", "echo": True, "logprobs": 0, "max_tokens": 1}
        status, answer = await client.ask(PLAIN, body)
        assert status == 200
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(ids_of("Once upon a time")) + 1

    async def test_too_many_logprobs_of_a_prompt(self, client, monkeypatch):
        monkeypatch.setattr("lucevisor.api.dialects.openai_completions.MAX_PROMPT_LOGPROBS", 10)
        status, answer = await client.ask(PLAIN, {"prompt": ids_of("Hello") * 4, "echo": True, "logprobs": 2})
        assert (status, answer["error"]["param"]) == (400, "logprobs")

    @pytest.mark.parametrize("prompt", [{"prompt": "Hello there"}, {"prompt_token_ids": ids_of("Hello there")}])
    async def test_nothing_but_the_prompt(self, client, prompt):
        body = {**prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
        _, answer = await client.ask(PLAIN, body)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("Hello there", "length", [])
        assert choice["prompt_token_ids"] == ids_of("Hello there")
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids_of("Hello there"))
        assert answer["usage"]["completion_tokens"] == 0


class TestStream:
    async def test_it_adds_up_to_the_whole(self, client):
        client.rig.stage.script = say("one 🎉 two", end=False)
        body = {"prompt": "x", "max_tokens": 9, "logprobs": 1, "return_token_ids": True, "echo": False}
        _, whole = await client.ask(PLAIN, body)
        events = await client.events(PLAIN, body | {"stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        assert {c["object"] for c in chunks} == {"text_completion"}
        choices = [c["choices"][0] for c in chunks[:-1]]
        assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
        assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
        assert choices[-1]["finish_reason"] == "length"
        assert chunks[-1]["usage"] == whole["usage"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [value for c in choices if c["logprobs"] for value in c["logprobs"][name]]
            assert told == whole["choices"][0]["logprobs"][name]

    async def test_echo_comes_first(self, client):
        client.rig.stage.script = say(" b")
        events = await client.events(PLAIN, {"prompt": ["a", "c"], "echo": True})
        chunks = [json.loads(e)["choices"][0] for e in events[:-1]]
        for index, text in ((0, "a b"), (1, "c b")):
            assert "".join(c["text"] for c in chunks if c["index"] == index) == text


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt[0]"),
            ({"prompt": ["a", ""]}, "prompt[1]"),
            ({"prompt": ["a", 5]}, "prompt[1]"),
            ({"prompt": [5, "a"]}, "prompt[1]"),
            ({"prompt": [5, [6]]}, "prompt[1]"),
            ({"prompt": [8192]}, "prompt[0]"),
            ({"prompt": [-1]}, "prompt[0]"),
            ({"prompt": [[1], [2, 10**20]]}, "prompt[1][1]"),
            ({"prompt": None}, "prompt"),
            ({"prompt": {}}, "prompt"),
            ({"prompt": [True]}, "prompt[0]"),
            ({"prompt": "x", "logprobs": 21}, "logprobs"),
            ({"prompt": "x", "logprobs": 1, "echo": True, "stream": True}, "stream"),
            ({"prompt": "x", "best_of": 2}, "best_of"),
            ({"prompt": "x", "suffix": "y"}, "suffix"),
            ({"prompt": "x", "messages": [{}]}, "messages"),
            ({"prompt": ["x"] * 65, "n": 2}, "n"),
            ({"prompt": [1] * 600}, "prompt"),
        ],
    )
    async def test_400_names_the_parameter(self, client, fields, param):
        status, answer = await client.ask(PLAIN, fields)
        assert (status, answer["error"]["param"]) == (400, param)
        await until(lambda: client.rig.n_busy == 0)


class TestParametersOfOtherServers:
    async def test_a_stop_token_ends_the_answer(self, client):
        client.rig.stage.script = say(" one two three")
        stop = ids_of(" one two three")[1]
        _, answer = await client.ask(PLAIN, {"prompt": "Hello", "stop_token_ids": [stop], "return_token_ids": True})
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"][0] == ids_of(" one two three")[0]
        assert len(choice["token_ids"]) <= 2
        assert answer["usage"]["completion_tokens"] == 2

    async def test_a_stop_token_outside_the_vocabulary_is_refused(self, client):
        status, answer = await client.ask(PLAIN, {"prompt": "Hello", "stop_token_ids": [1, 10**9]})
        assert status == 400
        assert answer["error"]["param"] == "stop_token_ids[1]"
