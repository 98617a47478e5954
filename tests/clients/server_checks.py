"""Checks that Ollama, llama.cpp and vLLM make of their own servers, rebuilt here as requests to a running one.

    python -m tests.clients.server_checks http://127.0.0.1:8080

Prints those that are answered otherwise; docs/clients.md says why.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

ASK = [{"role": "user", "content": "Why is the sky blue?"}]
TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": TOOL_SCHEMA}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
GREEDY = {"num_predict": 8, "temperature": 0, "seed": 1}
Answer = tuple[int, Any]


class Server:
    """The server under test; `model` is the one that it serves."""

    def __init__(self, url: str) -> None:
        self.url = url
        while self.get("/ready")[0] != 200:
            time.sleep(1)
        self.model: str = self.get("/v1/models")[1]["data"][0]["id"]

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return self._send(urllib.request.Request(self.url + path, headers=headers, method=method))

    def post(self, path: str, body: object, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._send(
            urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        )

    def _send(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                status, text, kind = answer.status, answer.read().decode(), answer.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            status, text, kind = error.code, error.read().decode(), error.headers.get("Content-Type", "")
        if "ndjson" in kind:
            return status, [json.loads(line) for line in text.splitlines()]
        if "event-stream" in kind:
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            return status, [json.loads(line) for line in lines if line != "[DONE]"]
        return status, json.loads(text) if "json" in kind and text else text


def ollama_final(last: dict[str, Any], *, context: bool) -> bool:
    durations = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    counted = all(last[name] > 0 for name in (*durations, "prompt_eval_count", "eval_count"))
    return bool(
        counted and last["done"] and last["done_reason"] and last["model"] and (last.get("context") or not context)
    )


def generate(s: Server, **more: Any) -> Answer:
    return s.post("/api/generate", {"model": s.model, "prompt": "Why is the sky blue?", "options": GREEDY, **more})


def chat(s: Server, **more: Any) -> Answer:
    return s.post("/api/chat", {"model": s.model, "messages": ASK, "options": GREEDY, **more})


def v1(s: Server, **more: Any) -> Answer:
    body = {"model": s.model, "messages": ASK, "max_tokens": 8, "temperature": 0, "seed": 1, **more}
    return s.post("/v1/chat/completions", body)


def completion(s: Server, **more: Any) -> Answer:
    return s.post(
        "/completion", {"prompt": "I believe the meaning of life is", "n_predict": 8, "temperature": 0, **more}
    )


def messages(s: Server, path: str = "/v1/messages", **more: Any) -> Answer:
    return s.post(path, {"model": s.model, "max_tokens": 16, "temperature": 0, "messages": ASK, **more})


def respond(s: Server, **more: Any) -> Answer:
    return s.post("/v1/responses", {"model": s.model, "input": "Hi", "max_output_tokens": 16, "temperature": 0, **more})


def ok(answer: Answer) -> bool:
    return answer[0] == 200


def bad(answer: Answer) -> bool:
    return answer[0] == 400 and "error" in answer[1]


def events(answer: Answer) -> list[str]:
    return [event["type"] for event in answer[1]]


def numbered(answer: Answer) -> bool:
    return [event["sequence_number"] for event in answer[1]] == list(range(len(answer[1])))


def details(model: dict[str, Any]) -> bool:
    return all(model["details"][name] for name in ("format", "family", "parameter_size", "quantization_level"))


RESULT = [
    {"role": "user", "content": "What's the weather?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}]},
]


def result(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [*RESULT, {"role": "user", "content": list(parts)}]


TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny"}
TOOLS = [{"name": "weather", "description": "Get the weather", "input_schema": TOOL_SCHEMA}]
FLAT = {"type": "function", "name": "weather", "parameters": TOOL_SCHEMA}
BLOCKS = {
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
}
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")

CHECKS: dict[str, Callable[[Server], bool]] = {
    # Ollama: its API tests, its OpenAI and Anthropic layers
    "ollama: generate streams and tells counts": lambda s: ollama_final(generate(s)[1][-1], context=True),
    "ollama: generate whole": lambda s: ollama_final(generate(s, stream=False)[1], context=True),
    "ollama: chat streams and tells counts": lambda s: ollama_final(chat(s)[1][-1], context=False),
    "ollama: chat whole": lambda s: ollama_final(chat(s, stream=False)[1], context=False),
    "ollama: every line names model and time": lambda s: all(x["model"] and x["created_at"] for x in chat(s)[1]),
    "ollama: list": lambda s: details(s.get("/api/tags")[1]["models"][0]),
    "ollama: ps": lambda s: (
        details(s.get("/api/ps")[1]["models"][0]) and s.get("/api/ps")[1]["models"][0]["expires_at"] > "2"
    ),
    "ollama: show has parameters, template, model_info": lambda s: all(
        s.post("/api/show", {"name": s.model})[1][name]
        for name in ("parameters", "template", "model_info", "capabilities")
    ),
    "ollama: show has modelfile": lambda s: bool(s.post("/api/show", {"name": s.model})[1]["modelfile"]),
    "ollama: show has license": lambda s: bool(s.post("/api/show", {"name": s.model})[1].get("license")),
    "ollama: show of a model that is not there is a 404": lambda s: s.post("/api/show", {"model": "nope"})[0] == 404,
    "ollama: embed": lambda s: ok(s.post("/api/embed", {"model": s.model, "input": "why"})),
    "ollama: generate logprobs": lambda s: (
        len(generate(s, stream=False, logprobs=True, top_logprobs=3)[1]["logprobs"][0]["top_logprobs"]) == 3
    ),
    "ollama: chat logprobs": lambda s: "bytes" in chat(s, stream=False, logprobs=True)[1]["logprobs"][0],
    "ollama: top_logprobs out of range is a 400": lambda s: bad(chat(s, stream=False, logprobs=True, top_logprobs=21)),
    "ollama: generate without a prompt loads": lambda s: (
        s.post("/api/generate", {"model": s.model})[1]["done_reason"] == "load"
    ),
    "ollama: keep_alive 0 unloads": lambda s: (
        s.post("/api/generate", {"model": s.model, "keep_alive": 0})[1]["done_reason"] == "unload"
    ),
    "ollama: missing body is a 400": lambda s: bad(s.post("/api/generate", b"")),
    "ollama: missing model is a 400": lambda s: s.post("/api/generate", {"prompt": "x"})[0] == 400,
    "ollama: unknown model is a 404": lambda s: s.post("/api/chat", {"model": "nope", "messages": ASK})[0] == 404,
    "ollama: format of a schema": lambda s: (
        "city"
        in json.loads(
            chat(s, stream=False, format=TOOL_SCHEMA, options={**GREEDY, "num_predict": 200})[1]["message"]["content"]
        )
    ),
    "ollama: an invalid format is a 400": lambda s: bad(chat(s, stream=False, format="xml")),
    "ollama: raw": lambda s: ok(generate(s, raw=True, stream=False)),
    "ollama: raw with system is a 400": lambda s: bad(generate(s, raw=True, system="x", stream=False)),
    "ollama: think": lambda s: bool(
        chat(s, stream=False, think=True, options={**GREEDY, "num_predict": 64})[1]["message"]["thinking"]
    ),
    "ollama: think false": lambda s: "thinking" not in chat(s, stream=False, think=False)[1]["message"],
    "ollama: think of an unknown level is a 400": lambda s: bad(chat(s, stream=False, think="ultra")),
    "ollama: tools": lambda s: ok(chat(s, stream=False, tools=[FUNCTION])),
    "ollama: history with arguments as an object": lambda s: ok(
        chat(
            s,
            stream=False,
            messages=[
                *ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
                },
                {"role": "tool", "tool_name": "weather", "content": "22"},
            ],
        )
    ),
    "ollama: a prompt beyond the context is cut": lambda s: ok(generate(s, prompt="word " * 40_000, stream=False)),
    "ollama: truncate false, a prompt beyond the context is a 400": lambda s: bad(
        generate(s, prompt="word " * 40_000, stream=False, truncate=False)
    ),
    "ollama: images without vision are a 400": lambda s: bad(generate(s, images=["aGk="], stream=False)),
    "ollama: version": lambda s: s.get("/api/version")[1]["version"].count(".") == 2,
    "ollama: HEAD /": lambda s: ok(s.get("/", "HEAD")),
    "ollama: HEAD of /api/tags and /api/version": lambda s: (
        ok(s.get("/api/tags", "HEAD")) and ok(s.get("/api/version", "HEAD"))
    ),
    "ollama: /v1/models lists ids with a tag": lambda s: ":" in s.get("/v1/models")[1]["data"][0]["id"],
    "ollama: /v1/models/NAME": lambda s: s.get(f"/v1/models/{s.model}")[1]["object"] == "model",
    "ollama: /v1 streamed usage": lambda s: (
        set(USAGE) <= set(v1(s, stream=True, stream_options={"include_usage": True})[1][-1]["usage"])
    ),
    "ollama: /v1 reasoning_effort ultra": lambda s: ok(v1(s, reasoning_effort="ultra")),
    "ollama: /v1 reasoning_effort of nonsense is a 400": lambda s: bad(v1(s, reasoning_effort="extreme")),
    "ollama: /v1 content of null in a call": lambda s: ok(
        v1(
            s,
            messages=[
                *ASK,
                {"role": "assistant", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": "22"},
            ],
        )
    ),
    "ollama: /v1 tool result by name": lambda s: ok(
        v1(
            s,
            messages=[
                *ASK,
                {"role": "assistant", "tool_calls": [CALLED]},
                {"role": "tool", "name": "weather", "content": "22"},
            ],
        )
    ),
    "ollama: /v1 an empty list of messages is a 400": lambda s: bad(v1(s, messages=[])),
    "ollama: /v1 streamed chunks have one of content and reasoning": lambda s: all(
        not (c["delta"].get("content") and c["delta"].get("reasoning_content"))
        for e in v1(s, stream=True, max_tokens=64, reasoning_effort="high")[1]
        for c in e["choices"]
    ),
    "ollama: /v1/embeddings": lambda s: ok(s.post("/v1/embeddings", {"model": s.model, "input": "x"})),
    "ollama: zstd body": lambda s: ok(
        s.post(
            "/v1/chat/completions",
            bytes.fromhex("28b52ffd200109000 07b".replace(" ", "")),
            **{"Content-Encoding": "zstd"},
        )
    ),
    "ollama: pull, create, copy, delete": lambda s: ok(s.post("/api/pull", {"model": "x"})),
    # llama.cpp: tools/server/tests
    "llama.cpp: props": lambda s: (
        s.get("/props")[1]["model_path"].endswith(".gguf") and s.get("/props")[1]["total_slots"] > 0
    ),
    "llama.cpp: slots, as many as props says": lambda s: len(s.get("/slots")[1]) == s.get("/props")[1]["total_slots"],
    "llama.cpp: a slot has n_ctx and no params": lambda s: (
        s.get("/slots")[1][0]["n_ctx"] > 0 and "params" not in s.get("/slots")[1][0]
    ),
    "llama.cpp: POST /slots/0?action=save": lambda s: ok(s.post("/slots/0?action=save", {"filename": "x"})),
    "llama.cpp: models": lambda s: len(s.get("/models")[1]["data"]) == 1,
    "llama.cpp: /v1/health": lambda s: ok(s.get("/v1/health")),
    "llama.cpp: tokenize and back": lambda s: (
        s.post("/detokenize", {"tokens": s.post("/tokenize", {"content": "What is it ?"})[1]["tokens"]})[1][
            "content"
        ].strip()
        == "What is it ?"
    ),
    "llama.cpp: pieces": lambda s: all(
        t["piece"] and t["id"] >= 0 for t in s.post("/tokenize", {"content": "媽 🤗", "with_pieces": True})[1]["tokens"]
    ),
    "llama.cpp: apply-template": lambda s: "sky" in s.post("/apply-template", {"messages": ASK})[1]["prompt"],
    "llama.cpp: infill of wrong extras is a 400": lambda s: all(
        bad(s.post("/infill", {"input_extra": [x], "input_prefix": "a", "input_suffix": "b"}))
        for x in ({}, {"filename": "ok"}, {"filename": 1, "text": "a"})
    ),
    "llama.cpp: completion": lambda s: completion(s)[1]["tokens_predicted"] == 8,
    "llama.cpp: completion streamed": lambda s: (
        "".join(e["content"] for e in completion(s, stream=True)[1]) == completion(s)[1]["content"]
    ),
    "llama.cpp: n_predict 0 reads the prompt": lambda s: completion(s, n_predict=0)[1]["content"] == "",
    "llama.cpp: several prompts": lambda s: len(completion(s, prompt=["a", "b"])[1]) == 2,
    "llama.cpp: n_cmpl": lambda s: len(completion(s, n_cmpl=2)[1]) == 2,
    "llama.cpp: response_fields": lambda s: (
        set(completion(s, response_fields=["content", "generation_settings/n_predict"])[1]) == {"content", "n_predict"}
    ),
    "llama.cpp: return_progress": lambda s: any(
        "prompt_progress" in e for e in completion(s, stream=True, return_progress=True)[1]
    ),
    "llama.cpp: n_probs": lambda s: len(completion(s, n_probs=4)[1]["completion_probabilities"]) == 8,
    "llama.cpp: post_sampling_probs": lambda s: (
        "prob" in completion(s, n_probs=2, post_sampling_probs=True)[1]["completion_probabilities"][0]
    ),
    "llama.cpp: logit_bias forbids": lambda s: ok(completion(s, logit_bias=[["life", False], [5, -1.0]])),
    "llama.cpp: timings": lambda s: completion(s)[1]["timings"]["predicted_per_second"] > 0,
    "llama.cpp: grammar": lambda s: completion(s, grammar='root ::= "yes"')[1]["content"] == "yes",
    "llama.cpp: a broken grammar is a 400": lambda s: bad(completion(s, grammar="root ::= (")),
    "llama.cpp: json_schema": lambda s: (
        completion(s, json_schema={"const": "foo"}, n_predict=20)[1]["content"] == '"foo"'
    ),
    "llama.cpp: chat response_format with a plain schema": lambda s: (
        '"foo"'
        in v1(s, response_format={"type": "json_object", "schema": {"const": "foo"}}, max_tokens=20)[1]["choices"][0][
            "message"
        ]["content"]
    ),
    "llama.cpp: chat format of numbers is a 400": lambda s: bad(
        v1(s, response_format={"type": "json_object", "schema": {"type": 123}})
    ),
    "llama.cpp: chat json_schema 0 is a 400": lambda s: bad(
        v1(s, response_format={"type": "json_schema", "json_schema": 0})
    ),
    "llama.cpp: chat timings": lambda s: v1(s)[1]["timings"]["decode_s"] >= 0,
    "llama.cpp: a chat that exceeds the context is a 400": lambda s: bad(
        v1(s, messages=[{"role": "user", "content": "word " * 40_000}])
    ),
    "llama.cpp: its error names n_ctx and n_prompt_tokens": lambda s: (
        "n_ctx" in v1(s, messages=[{"role": "user", "content": "word " * 40_000}])[1]["error"]
    ),
    "llama.cpp: messages": lambda s: (
        messages(s)[1]["content"][0]["type"] == "text" and messages(s)[1]["usage"]["cache_read_input_tokens"] >= 0
    ),
    "llama.cpp: messages streamed": lambda s: set(events(messages(s, stream=True))) >= BLOCKS,
    "llama.cpp: messages without max_tokens": lambda s: ok(s.post("/v1/messages", {"model": s.model, "messages": ASK})),
    "llama.cpp: messages, missing messages is a 400": lambda s: (
        s.post("/v1/messages", {"model": s.model, "max_tokens": 5})[0] == 400
    ),
    "llama.cpp: tool result": lambda s: messages(s, messages=result(TOOL_RESULT))[1]["content"][0]["type"] == "text",
    "llama.cpp: text before a tool result": lambda s: ok(
        messages(s, messages=result({"type": "text", "text": "Here:"}, TOOL_RESULT))
    ),
    "llama.cpp: tool result of an error": lambda s: ok(messages(s, messages=result({**TOOL_RESULT, "is_error": True}))),
    "llama.cpp: tool result in parts": lambda s: ok(
        messages(s, messages=result({**TOOL_RESULT, "content": [{"type": "text", "text": "Sunny"}]}))
    ),
    "llama.cpp: tool_choice of a tool": lambda s: (
        messages(s, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=200)[1]["stop_reason"]
        == "tool_use"
    ),
    "llama.cpp: system in parts": lambda s: ok(
        messages(s, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    ),
    "llama.cpp: count_tokens": lambda s: (
        s.post("/v1/messages/count_tokens", {"model": s.model, "messages": ASK})[1]["input_tokens"] > 0
    ),
    "llama.cpp: stop_sequences": lambda s: (
        messages(s, stop_sequences=[" "])[1]["stop_reason"] in ("stop_sequence", "max_tokens", "end_turn")
    ),
    "llama.cpp: thinking": lambda s: ok(
        messages(s, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048)
    ),
    "llama.cpp: responses, a const": lambda s: (
        respond(s, text={"format": {"type": "json_schema", "name": "t", "schema": {"const": "foo"}}})[1]["output"][-1][
            "content"
        ][0]["text"]
        == '"foo"'
    ),
    "llama.cpp: responses, json_schema without a schema is a 400": lambda s: bad(
        respond(s, text={"format": {"type": "json_schema", "name": "t"}})
    ),
    "llama.cpp: /responses without /v1": lambda s: ok(s.post("/responses", {"input": "Hi", "max_output_tokens": 16})),
    "llama.cpp: model names of any kind": lambda s: ok(v1(s, model="gpt-3.5-turbo")),
    "llama.cpp: public paths need no key": lambda s: ok(s.get("/health")) and ok(s.get("/models")),
    "llama.cpp: embeddings, reranking, LoRA": lambda s: ok(s.get("/lora-adapters")),
    "llama.cpp: reasoning_format none leaves thinking in content": lambda s: (
        "<think>"
        in v1(s, reasoning_format="none", reasoning_effort="high", max_tokens=64)[1]["choices"][0]["message"]["content"]
    ),
    # vLLM: tests/entrypoints
    "vllm: responses stored and read": lambda s: (
        s.get(f"/v1/responses/{respond(s)[1]['id']}")[1]["status"] in ("completed", "incomplete")
    ),
    "vllm: a response that is not stored is a 404": lambda s: s.get("/v1/responses/resp_nope")[0] == 404,
    "vllm: cancel of a response that is done": lambda s: (
        s.post(f"/v1/responses/{respond(s)[1]['id']}/cancel", {})[0] in (200, 400)
    ),
    "vllm: background": lambda s: ok(respond(s, background=True)),
    "vllm: responses with instructions": lambda s: (
        respond(s, instructions="Be brief.")[1]["instructions"] == "Be brief."
    ),
    "vllm: responses, previous_response_id": lambda s: ok(respond(s, previous_response_id=respond(s)[1]["id"])),
    "vllm: previous_response_id of nonsense is a 404": lambda s: respond(s, previous_response_id="resp_nope")[0] == 404,
    "vllm: responses, store false cannot be continued": lambda s: (
        respond(s, previous_response_id=respond(s, store=False)[1]["id"])[0] == 404
    ),
    "vllm: responses, logprobs": lambda s: (
        len(
            respond(s, include=["message.output_text.logprobs"], top_logprobs=2)[1]["output"][-1]["content"][0][
                "logprobs"
            ][0]["top_logprobs"]
        )
        == 2
    ),
    "vllm: responses, tools streamed": lambda s: (
        "response.function_call_arguments.done"
        in events(respond(s, stream=True, tools=[FLAT], tool_choice="required", max_output_tokens=200))
    ),
    "vllm: responses, a named tool": lambda s: (
        respond(s, tools=[FLAT], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=200)[1][
            "output"
        ][-1]["name"]
        == "weather"
    ),
    "vllm: responses, max_tool_calls": lambda s: ok(respond(s, max_tool_calls=1)),
    "vllm: responses, truncation auto": lambda s: ok(respond(s, truncation="auto")),
    "vllm: responses, an item of reasoning in the input": lambda s: ok(
        respond(
            s,
            input=[
                {"role": "user", "content": "Hi"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm"}],
                },
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Go on"},
            ],
        )
    ),
    "vllm: responses, events are numbered": lambda s: numbered(respond(s, stream=True)),
    "vllm: tokenize of messages": lambda s: ok(s.post("/tokenize", {"messages": ASK})),
    "vllm: tokenize tells count and max_model_len": lambda s: (
        {"count", "max_model_len", "tokens"} <= set(s.post("/tokenize", {"prompt": "Hi"})[1])
    ),
    "vllm: detokenize tells prompt": lambda s: "prompt" in s.post("/detokenize", {"tokens": [5]})[1],
    "vllm: /version": lambda s: ok(s.get("/version")),
    "vllm: /ping": lambda s: ok(s.get("/ping")),
    "vllm: /load": lambda s: ok(s.get("/load")),
    "vllm: metrics": lambda s: ok(s.get("/metrics")),
    "vllm: a body that is no object is a 400": lambda s: all(
        bad(s.post("/v1/chat/completions", x)) for x in (b"[]", b"1", b'"x"', b"null")
    ),
    "vllm: an empty prompt list is a 400": lambda s: bad(s.post("/v1/completions", {"prompt": []})),
    "vllm: tool_choice null": lambda s: ok(v1(s, tool_choice=None, tools=[FUNCTION])),
    "vllm: tool_choice required": lambda s: (
        v1(s, tools=[FUNCTION], tool_choice="required", max_tokens=200)[1]["choices"][0]["finish_reason"]
        == "tool_calls"
    ),
    "vllm: an empty tools list with tool_choice auto": lambda s: ok(v1(s, tools=[], tool_choice="auto")),
    "vllm: stop_token_ids beyond the vocabulary is a 400": lambda s: bad(v1(s, stop_token_ids=[10**9])),
    "vllm: logit_bias beyond the vocabulary is a 400": lambda s: bad(v1(s, logit_bias={str(10**8): 1.0})),
    "vllm: thinking_token_budget": lambda s: ok(v1(s, thinking_token_budget=4)),
    "vllm: a negative thinking_token_budget is a 400": lambda s: bad(v1(s, thinking_token_budget=-2)),
    "vllm: return_token_ids": lambda s: len(v1(s, return_token_ids=True)[1]["choices"][0]["token_ids"]) > 0,
    "vllm: prompt_tokens_details": lambda s: "cached_tokens" in v1(s)[1]["usage"]["prompt_tokens_details"],
    "vllm: messages, system in the middle": lambda s: ok(
        messages(s, messages=[*ASK, {"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}, *ASK])
    ),
    "vllm: messages, an empty content is a 400": lambda s: messages(s, messages=[{"role": "user"}])[0] == 400,
    "vllm: messages, an unknown block is a 400": lambda s: (
        messages(s, messages=[{"role": "user", "content": [{"type": "nonsense"}]}])[0] == 400
    ),
    "vllm: messages, redacted thinking in the history": lambda s: ok(
        messages(
            s,
            messages=[
                *ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}],
                },
                *ASK,
            ],
        )
    ),
    "vllm: chat in batches": lambda s: ok(s.post("/v1/chat/completions/batch", {"messages": [ASK, ASK]})),
    "vllm: prompt_embeds": lambda s: ok(s.post("/v1/completions", {"prompt_embeds": "x"})),
    "vllm: truncate_prompt_tokens": lambda s: v1(s, truncate_prompt_tokens=4)[1]["usage"]["prompt_tokens"] == 4,
}


def main(url: str) -> int:
    """Print the checks that fail; return how many."""
    server, n_failed = Server(url), 0
    for name, check in CHECKS.items():
        try:
            why = None if check(server) else "is answered otherwise"
        except Exception as error:  # an answer of another form fails in many ways
            why = f"{type(error).__name__}: {error}"[:200]
        if why is not None:
            n_failed += 1
            print(f"{name}: {why}", flush=True)
    print(f"{len(CHECKS) - n_failed} of {len(CHECKS)} as there")
    return n_failed


if __name__ == "__main__":
    main(sys.argv[1])
