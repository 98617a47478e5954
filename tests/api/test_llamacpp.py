"""llama.cpp's own paths over a real socket: /completion, /infill, the paths without /v1, lists of logit_bias."""

from __future__ import annotations

import json

import pytest

from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.vocabulary import TYPES_KEY, TokenType
from tests.api.scripted_model import MODEL, Rig, ids_of, metadata, say, tokenizer

PLAIN = "/completion"


@pytest.fixture
def client(shared_client):
    return shared_client


def with_fim() -> Tokenizer:
    """The demo's tokenizer with tokens for gaps."""
    tokens, types = list(metadata()["tokenizer.ggml.tokens"]), list(metadata()[TYPES_KEY])
    for token_id, name in zip(FIM.values(), FIM, strict=True):
        tokens[token_id], types[token_id] = name, int(TokenType.CONTROL)
    merges = [m for m in metadata()["tokenizer.ggml.merges"] if set(m.split(" ")) <= {*tokens}]
    merges = [m for m in merges if m.replace(" ", "") in {*tokens}]
    return Tokenizer.from_gguf(
        {**metadata(), "tokenizer.ggml.tokens": tokens, TYPES_KEY: types, "tokenizer.ggml.merges": merges}
    )


FIM = {"<|fim_prefix|>": 8001, "<|fim_suffix|>": 8002, "<|fim_middle|>": 8003}


async def test_the_object(client):
    client.rig.stage.script = say(" world\n")
    status, answer = await client.ask(
        PLAIN, {"prompt": "Hello", "n_predict": 9, "temperature": 0, "cache_prompt": True}
    )
    assert status == 200
    n, n_prompt = len(ids_of(" world\n")) + 1, len(ids_of("Hello"))
    timings, settings = answer.pop("timings"), answer.pop("generation_settings")
    assert answer == {
        "index": 0, "content": " world\n", "tokens": [], "id_slot": -1, "stop": True, "model": MODEL,
        "tokens_predicted": n, "tokens_evaluated": n_prompt, "tokens_cached": n + n_prompt, "prompt": "Hello",
        "has_new_line": True, "truncated": False, "stop_type": "eos", "stopping_word": "",
    }  # fmt: skip
    assert (timings["prompt_n"], timings["predicted_n"], timings["cache_n"]) == (n_prompt, n, 0)
    assert (settings["temperature"], settings["n_predict"]) == (0, 9)


@pytest.mark.parametrize(
    ("more", "stop_type", "word", "content"),
    [
        ({"n_predict": 2}, "limit", "", "one two"),
        ({"n_predict": -1, "stop": ["two", "x"]}, "word", "two", "one "),
        ({"n_predict": -1}, "eos", "", "one two three"),
    ],
)
async def test_a_stream_adds_up_to_the_object(client, more, stop_type, word, content):
    client.rig.stage.script = say("one two three")
    _, whole = await client.ask(PLAIN, {"prompt": "Count", "return_tokens": True, **more})
    assert (whole["stop_type"], whole["stopping_word"], whole["content"]) == (stop_type, word, content)
    events = [json.loads(one) for one in await client.events(PLAIN, {"prompt": "Count", "return_tokens": True, **more})]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == content
    last = events[-1]
    told = [name for name in whole if name not in ("content", "tokens", "timings", "generation_settings")]
    assert {name: last[name] for name in told} == {name: whole[name] for name in told}
    ids = [token_id for event in events for token_id in event["tokens"]]
    assert ids == whole["tokens"][: len(ids)]
    assert len(whole["tokens"]) == whole["tokens_predicted"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi there", [ids_of("Hi there")]),
        ([5, 6], [[5, 6]]),
        ([5, "Hi", 6, "<|im_end|>"], [[5, *ids_of("Hi"), 6, *ids_of("<|im_end|>")]]),
        (["Hi"], [ids_of("Hi")]),
        (["Hi", [5, "Hi"], {"prompt_string": "x"}], [ids_of("Hi"), [5, *ids_of("Hi")], ids_of("x")]),
        ({"prompt_string": "Hi"}, [ids_of("Hi")]),
    ],
)
async def test_forms_of_prompts(client, prompt, expected):
    client.rig.stage.script = say("x")
    _, answer = await client.ask(PLAIN, {"prompt": prompt, "n_predict": 1})
    assert sorted(seen.prompt for seen in client.rig.stage.opened) == sorted(expected)
    answers = answer if len(expected) > 1 else [answer]
    assert [one["tokens_evaluated"] for one in answers] == list(map(len, expected))


async def test_probabilities(client):
    client.rig.stage.script = say("Hello!")
    _, answer = await client.ask(PLAIN, {"prompt": "x", "n_probs": 2})
    probabilities = answer["completion_probabilities"]
    assert [one["id"] for one in probabilities] == ids_of("Hello!")
    assert "".join(one["token"] for one in probabilities) == "Hello!"
    assert {(one["logprob"], len(one["top_logprobs"])) for one in probabilities} == {(-0.25, 2)}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PLAIN, {}, "prompt"),
        (PLAIN, {"prompt": []}, "prompt"),
        (PLAIN, {"prompt": {}}, "prompt.prompt_string"),
        (PLAIN, {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data"),
        (PLAIN, {"prompt": [1, 2.5]}, "prompt[1]"),
        (PLAIN, {"prompt": ["a", [9_000_000]]}, "prompt[1][0]"),
        (PLAIN, {"prompt": "x", "temprature": 1}, "temprature"),
        (PLAIN, {"prompt": "x", "temperature": "warm"}, "temperature"),
        (PLAIN, {"prompt": "word " * 600}, "prompt"),
        ("/infill", {"input_prefix": "def f(", "input_suffix": "):"}, "input_suffix"),
        ("/infill", {"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
    ],
)
async def test_refusals(client, path, body, param):
    status, answer = await client.ask(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_gap_is_filled(start):
    own = with_fim()
    client = await start(Rig(tokenizer=own))
    client.rig.stage.script = say("a")
    body = {"input_prefix": "def f(", "input_suffix": "):", "prompt": "x, ", "n_predict": 3}
    status, answer = await client.ask("/infill", body)
    assert (status, answer["content"]) == (200, "a")
    [seen] = client.rig.stage.opened
    expected = [FIM["<|fim_prefix|>"], *own.encode("def f(x, "), FIM["<|fim_suffix|>"], *own.encode("):")]
    assert seen.prompt == [*expected, FIM["<|fim_middle|>"]]
    await client.ask("/infill", {**body, "input_extra": [{"filename": "a.py", "text": "import os\n"}]})
    assert own.decode(client.rig.stage.opened[1].prompt[: -len(seen.prompt)]).endswith("import os\n")
    ollama = {"prompt": "def f(", "suffix": "):", "stream": False}
    _, answer = await client.ask("/api/generate", ollama)
    assert answer["response"] == "a"
    assert client.rig.stage.opened[2].prompt[-1] == FIM["<|fim_middle|>"]
    openai = {"prompt": "def f(", "suffix": "):", "max_tokens": 3, "echo": True}
    _, answer = await client.ask("/v1/completions", openai)
    assert answer["choices"][0]["text"] == "def f(a"
    assert answer["usage"]["prompt_tokens"] == len(client.rig.stage.opened[3].prompt)
    assert client.rig.stage.opened[3].prompt == client.rig.stage.opened[2].prompt
    for more in ({"prompt": ["a", "b"]}, {"prompt": [1, 2]}):
        assert (await client.ask("/v1/completions", {**openai, **more}))[1]["error"]["param"] == "suffix"
    status, answer = await client.ask("/v1/completions", {**openai, "logprobs": 1})
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    _, shown = await client.ask("/api/show", {"model": MODEL})
    assert "insert" in shown["capabilities"]


async def test_a_model_without_tokens_for_gaps(client):
    status, answer = await client.ask("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert status == 400
    assert "no fill-in-the-middle tokens" in answer["error"]["message"]
    status, answer = await client.ask("/api/generate", {"prompt": "a", "suffix": "b"})
    assert (status, answer["error"].partition(":")[0]) == (400, "suffix")
    status, answer = await client.ask("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (status, answer["error"]["param"]) == (400, "suffix")
    client.rig.stage.script = say("x")
    assert (await client.ask("/v1/completions", {"prompt": "a", "suffix": ""}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_at_all(client, stream):
    client.rig.stage.script = say("Hello!")
    body = {"prompt": "Hi", "n_predict": 0, "n_cmpl": 2}
    if stream:
        answers = [json.loads(one) for one in await client.events(PLAIN, body)]
    else:
        _, answers = await client.ask(PLAIN, body)
    assert [(one["content"], one["tokens_predicted"], one["stop_type"]) for one in answers] == [("", 0, "limit")] * 2
    assert {(one["tokens_evaluated"], one["generation_settings"]["n_predict"]) for one in answers} == {(1, 0)}


async def test_paths_without_v1(client):
    client.rig.stage.script = say("Hello!")
    _, answer = await client.ask("/responses", {"input": "Hi"})
    assert answer["output"][-1]["content"][0]["text"] == "Hello!"
    assert await client.ask("/v1/health") == await client.ask("/health")
    _, answer = await client.ask("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert answer["choices"][0]["message"]["content"] == "Hello!"
    assert (await client.ask("/completions", {"prompt": "Hi"}))[1]["content"] == "Hello!"
    assert await client.ask("/models") == await client.ask("/v1/models")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[5, 1.5], [6, False]], {5: 1.5, 6: -100.0}),
        ([["Hello!", -2]], dict.fromkeys(ids_of("Hello!"), -2.0)),
        ([["5", 2]], {5: 2.0}),
        ({"5": False, "6": 1}, {5: -100.0, 6: 1.0}),
        ([], {}),
    ],
)
@pytest.mark.parametrize("path", [PLAIN, "/v1/completions"])
async def test_biases(client, path, given, expected):
    client.rig.stage.script = say("x")
    status, answer = await client.ask(path, {"prompt": "Hi", "logit_bias": given})
    assert status == 200, answer
    assert client.rig.stage.opened[0].sampling.logit_bias == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([[5, True]], "logit_bias[0]"),
        ([[tokenizer().n_vocab, 1]], "logit_bias[0]"),
        ([[5]], "logit_bias[0]"),
        ([[5, 101]], "logit_bias[0][1]"),
        ({"Hello": 1}, "logit_bias.Hello"),
    ],
)
async def test_biases_that_are_none(client, given, param):
    status, answer = await client.ask(PLAIN, {"prompt": "Hi", "logit_bias": given})
    assert (status, answer["error"]["param"]) == (400, param)


# ---- /tokenize, /detokenize and /apply-template


async def test_there_and_back(client):
    text = "Hello, wörld 🎉 <|im_end|>"
    status, answer = await client.ask("/tokenize", {"content": text})
    assert (status, answer) == (200, {"tokens": ids_of(text), "count": len(ids_of(text))})
    assert (await client.ask("/tokenize", {"prompt": text}))[1] == answer
    assert (await client.ask("/detokenize", {"tokens": answer["tokens"]}))[1] == {"content": text}


async def test_the_prompt_of_a_chat_request_is_what_the_model_gets(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "Hi é"}], "tools": [tool], "enable_thinking": False}
    status, answer = await client.ask("/apply-template", body)
    assert status == 200
    assert answer["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    await client.ask("/v1/chat/completions", body)
    assert client.rig.stage.opened[-1].prompt == ids_of(answer["prompt"])


async def test_a_template_that_is_not_there_or_refuses(client, start):
    status, answer = await client.ask("/apply-template", {"messages": []})
    assert (status, answer["error"]["param"]) == (400, "messages")
    bare = await start(Rig(template=None))
    status, answer = await bare.ask("/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert (status, answer["error"]["code"]) == (400, "no_chat_template")


async def test_letters_only(client):
    _, answer = await client.ask("/tokenize", {"content": "<|im_end|>", "parse_special": False})
    assert answer["tokens"] == tokenizer().encode("<|im_end|>") != ids_of("<|im_end|>")


async def test_pieces(client):
    _, answer = await client.ask("/tokenize", {"content": "Hello", "with_pieces": True, "add_special": True})
    assert answer["tokens"] == [{"id": i, "piece": "Hello"} for i in ids_of("Hello")]


async def test_a_long_text_is_read_in_a_preprocessing_worker(client):
    text = "word " * 40_000
    _, answer = await client.ask("/tokenize", {"content": text})
    assert answer["count"] == len(tokenizer().encode(text))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [8192]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_refusals_of_text_routes(client, path, body, param):
    status, answer = await client.ask(path, body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param
