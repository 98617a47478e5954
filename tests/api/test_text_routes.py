"""/tokenize, /detokenize and /apply-template."""

from __future__ import annotations

import pytest

from tests.api.scripted_model import Rig, ids_of, tokenizer


@pytest.fixture
def client(shared_client):
    return shared_client


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
async def test_refusals(client, path, body, param):
    status, answer = await client.ask(path, body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param
