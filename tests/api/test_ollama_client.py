"""The unmodified `ollama` client against the server: chat, generate, tools, thinking, formats, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.api.conftest import Live, decoded, prompt_of, script
from tests.api.scripted_model import MODEL, say, tokenizer

HI = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def http(method: str, url: str, **options: Any) -> httpx.Response:
    return httpx.request(method, url, timeout=120, **options)


def add(a: int) -> int:
    """Add.

    Args:
      a: a number
    """
    return a + 1


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=120) as one:
        yield one


def test_chat(server, client):
    script(server, say("Hello!"))
    answer = client.chat(MODEL, HI)
    assert (answer.model, answer.message.role, answer.message.content) == (MODEL, "assistant", "Hello!")
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == 3
    assert answer.prompt_eval_count
    assert answer.total_duration == answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert answer.load_duration >= 0  # started at once
    assert min(answer.prompt_eval_duration, answer.eval_duration) > 0
    assert "Hi" in prompt_of(server)


def test_chat_streamed(server, client):
    script(server, say("one two three"))
    parts = list(client.chat(MODEL + ":latest", HI, stream=True))
    assert "".join(part.message.content for part in parts) == "one two three"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    assert parts[-1].eval_count
    assert parts[0].eval_count is None


def test_a_stream_is_the_default_and_has_a_line_an_object(server):
    script(server, say("one two"))
    answer = http("POST", server.url + "/api/chat", json={"model": MODEL, "messages": HI})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "one two"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(server, client, stream):
    script(server, lambda seen: say("Two." if "<tool_response>" in decoded(seen) else "I add. " + CALL)(seen))
    answer = client.chat(MODEL, HI, tools=[add], stream=stream)
    parts = list(answer) if stream else [answer]
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1})
    assert parts[-1].done_reason == "stop"
    asked = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    again = client.chat(MODEL, [*HI, asked, {"role": "tool", "tool_name": "add", "content": "2"}], tools=[add])
    assert again.message.content == "Two."


@pytest.mark.parametrize("stream", [False, True])
def test_thinking(server, client, stream):
    script(server, say("hm\n</think>\n\nYes."))
    answer = client.chat(MODEL, HI, think=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts) == "Yes."
    script(server, say("Yes."))
    assert client.chat(MODEL, HI, think=False).message.content == "Yes."
    assert prompt_of(server).rstrip().endswith("</think>")


def test_options_reach_the_sampler(server, client):
    script(server, say("one two three", end=False))
    options = {"seed": 7, "temperature": 0.5, "top_k": 3, "repeat_penalty": 1.5, "num_predict": 2, "mirostat": 2,
               "num_ctx": 4096, "stop": ["zebra"]}  # fmt: skip
    answer = client.chat(MODEL, HI, options=options)
    assert (answer.done_reason, answer.eval_count) == ("length", 2)
    sampling = server.do(lambda rig: rig.stage.opened[-1].sampling)
    assert (sampling.seed, sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (7, 0.5, 3, 1.5)
    assert sampling.mirostat.version == 2


def test_whole_numbers_and_nulls_as_other_languages_write_them(server):
    script(server, say("one two three", end=False))
    call = {"function": {"name": "add", "arguments": {}}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    options = {"num_predict": 2.0, "top_k": 3.0, "seed": 7.0, "num_ctx": 4096.0, "stop": None, "use_mmap": True}
    body = {"model": MODEL, "messages": messages, "options": options, "stream": False, "format": None, "tools": None}
    answer = http("POST", server.url + "/api/chat", json=body).json()
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 2)
    assert server.do(lambda rig: rig.stage.opened[-1].sampling.top_k) == 3
    refused = http("POST", server.url + "/api/chat", json={**body, "options": {"num_predict": 2.5}})
    assert (refused.status_code, "options.num_predict" in refused.text) == (400, True)


def test_what_has_no_effect_is_named(server):
    script(server, say("x"))
    body = {"model": MODEL, "messages": HI, "keep_alive": "5m", "options": {"num_ctx": 8, "num_predict": -1}}
    answer = http("POST", server.url + "/api/chat", json=body)
    assert answer.headers["X-Lucevisor-Ignored"] == "options.num_ctx"


def test_logprobs(server, client):
    script(server, say("Hello!"))
    answer = client.chat(MODEL, HI, logprobs=True, top_logprobs=2)
    assert "".join(one.token for one in answer.logprobs) == "Hello!"
    assert {len(one.top_logprobs) for one in answer.logprobs} == {2}
    parts = list(client.generate(MODEL, "Hi", logprobs=True, stream=True))
    assert sum(len(part.logprobs or ()) for part in parts) == 2


def test_generate(server, client):
    script(server, say("Hello!"))
    answer = client.generate(MODEL, "Who?", system="Be brief.")
    assert (answer.response, answer.done, answer.done_reason) == ("Hello!", True, "stop")
    assert "Be brief." in prompt_of(server)
    assert "<|im_start|>user\nWho?" in prompt_of(server)
    assert "".join(part.response for part in client.generate(MODEL, "Who?", stream=True)) == "Hello!"


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_of_an_answer_continues_it(server, client, stream):
    def answered(prompt, **more):
        answer = client.generate(MODEL, prompt, stream=stream, **more)
        return list(answer)[-1] if stream else answer

    script(server, say("Ann."))
    first = answered("Who?", template="")
    so_far = prompt_of(server) + "Ann.<|endoftext|>"
    assert tokenizer().decode(first.context, skip_special=False) == so_far
    second = answered("And who else?", context=first.context)
    assert prompt_of(server).startswith(so_far + "<|im_start|>user\nAnd who else?<|im_end|>")
    assert second.prompt_eval_count > first.prompt_eval_count
    assert second.context[: len(first.context)] == first.context
    assert answered("x", raw=True).context is None


def test_a_raw_prompt_has_no_template(server, client):
    script(server, say("<think> time"))
    answer = client.generate(MODEL, "Once upon a", raw=True, options={"temperature": 0})
    assert answer.response == "<think> time"
    assert prompt_of(server) == "Once upon a"


@pytest.mark.parametrize(("ask", "reason"), [({}, "load"), ({"keep_alive": 0}, "unload")])
def test_without_a_prompt_the_model_is_only_asked_for(client, ask, reason):
    answer = client.generate(MODEL, "", **ask)
    assert (answer.response, answer.done, answer.done_reason) == ("", True, reason)
    assert client.chat(MODEL, [], **ask).done_reason == reason


def test_what_is_there(client, server):
    [model] = client.list().models
    assert (model.model, model.details.format, model.details.family) == (MODEL + ":latest", "gguf", "qwen35")
    assert model.details.parameter_size == "22.40M"
    assert re.fullmatch("[0-9a-f]{64}", model.digest)  # Ollama's command line cuts it at 12
    [running] = client.ps().models
    assert (running.model, running.digest) == (model.model, model.digest)
    assert running.expires_at  # Open WebUI reads it
    shown = client.show(MODEL)
    assert {"completion", "tools", "thinking"} == set(shown.capabilities)
    assert "{%" in shown.template
    told = {"general.basename": "lucevisor-demo", "general.parameter_count": 22_400_000, "qwen35.context_length": 512}
    assert told.items() <= shown.modelinfo.items()
    older = http("POST", server.url + "/api/show", json={"name": model.model}).json()  # as Continue asks
    assert older["parameters"]
    assert all(len(line.split()) == 2 for line in older["parameters"].splitlines())


def test_the_name_in_the_lists_is_one_in_all_apis(client, server):
    """Open WebUI adds the tag and looks for that name in the list; editors send it to /v1."""
    [model] = client.list().models
    body = {"model": model.model, "max_tokens": 1, "messages": HI, "prompt": "x", "input": "x"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        names = {"prompt"} if path in ("/v1/completions", "/tokenize") else {"messages", "max_tokens"}
        names = {"model", *({"input"} if path == "/v1/responses" else names)}
        answer = http("POST", server.url + path, json={name: body[name] for name in names})
        assert answer.status_code == 200, answer.text
    assert http("GET", f"{server.url}/v1/models/{model.model}").json()["id"] == MODEL
    assert http("GET", f"{server.url}/v1/models/{MODEL}:other").status_code == 404


def test_ollamas_own_clients_find_it_running_and_browsers_the_status_page(server):
    for agent in ("ollama/0.14.0 (amd64 linux) Go/go1.24", "ollama-python/0.6.3"):
        answer = http("GET", server.url, headers={"User-Agent": agent})
        assert (answer.status_code, answer.text) == (200, "Ollama is running")
        assert http("HEAD", server.url, headers={"User-Agent": agent}).status_code == 200
    assert "<html" in http("GET", server.url, headers={"User-Agent": "Mozilla/5.0"}).text


def test_version(server):
    told = http("GET", server.url + "/api/version").json()["version"]
    assert tuple(map(int, told.split("."))) >= (0, 13, 4)  # what codex asks for, and editors less


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "other"}, "the model .*other.* does not exist here"),
        ({"format": "yaml"}, "format: .*yaml.* is not a format"),
        ({"format": {"type": "nonsense"}}, "^format"),  # compiled
        ({"options": {"temperature": 9}}, "options.temperature: 9"),
        ({"options": {"temprature": 1}}, "temprature.*did you mean temperature"),
        ({"think": "much"}, "think: .*much.* is not a level"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            r"messages\[0\].images\[0\]: is an image, and",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "boss", "content": "x"}]}, r"messages\[0\].role"),
    ],
)
def test_refusals_have_ollamas_shape(server, more, words):
    body = {"model": MODEL, "messages": HI} | more
    answer = http("POST", server.url + "/api/chat", json=body)
    assert answer.status_code == (404 if "model" in more else 400)
    assert list(answer.json()) == ["error"]
    assert re.search(words, answer.json()["error"])


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_curl_needs_no_header_and_a_page_of_another_origin_does(server, kind):
    body = json.dumps({"model": MODEL, "messages": HI, "stream": False})
    curl = http("POST", server.url + "/api/chat", content=body, headers={"Content-Type": kind})
    assert curl.json()["done"]
    page = {"Content-Type": kind, "Origin": "https://example.org"}
    refused = http("POST", server.url + "/api/chat", content=body, headers=page)
    assert (refused.status_code, "send the body as application/json" in refused.json()["error"]) == (400, True)
