"""What Open WebUI, Continue, Zed and Copilot send and read, in their order, after their public sources."""

from __future__ import annotations

import json

from tests.api.scripted_model import MODEL, ids_of, say

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
TITLE = '### Task:\nGenerate a concise title, as { "title": "your title" }.\n<chat_history>\nUSER: Hi\n</chat_history>'


async def lines(client, path, body):
    """The objects of a stream of lines."""
    async with client.session.post(client.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_open_webui_with_an_ollama_connection(client):
    client.rig.stage.script = say("Hello!")
    _, version = await client.ask("/api/version")
    assert [int(part) for part in version["version"].split(".")] >= [0, 1, 16]
    _, tags = await client.ask("/api/tags")
    known = {model["model"]: model for model in tags["models"]}
    _, loaded = await client.ask("/api/ps")
    assert {model["name"] for model in loaded["models"]} == {model["name"] for model in known.values()}
    assert all(model["expires_at"] for model in loaded["models"])
    chosen = MODEL if ":" in MODEL else f"{MODEL}:latest"  # it adds the tag where there is none
    assert chosen in known
    body = {"model": chosen, "messages": [{"role": "user", "content": "Hi"}], "options": {}, "stream": True}
    parts = await lines(client, "/api/chat", body)
    assert "".join(part["message"]["content"] for part in parts) == "Hello!"
    assert parts[-1]["done"]
    assert parts[-1]["eval_count"] > 0
    task = {
        "model": chosen,
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "options": {"num_predict": 1000},
    }
    status, answer = await client.ask("/api/chat", task)
    assert (status, answer["message"]["content"]) == (200, "Hello!")
    assert (await client.ask("/api/generate", {"model": chosen, "keep_alive": 0, "prompt": ""}))[0] == 200  # unloads


async def test_open_webui_with_an_openai_connection(client):
    client.rig.stage.script = say("Hello!")
    _, models = await client.ask("/v1/models")
    [chosen] = [model["id"] for model in models["data"]]
    body = {"model": chosen, "messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}}
    chunks = [json.loads(event) for event in (await client.events("/v1/chat/completions", body))[:-1]]
    assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == "Hello!"
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids_of("Hello!")) + 1
    task = {
        "model": chosen,
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    status, answer = await client.ask("/v1/chat/completions", task)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello!")


async def test_continue_with_an_ollama_provider(client):
    client.rig.stage.script = say("Hello!")
    _, tags = await client.ask("/api/tags")
    [chosen] = [model["name"] for model in tags["models"]]  # AUTODETECT
    _, shown = await client.ask("/api/show", {"name": chosen})
    assert all(len(line.split()) == 2 for line in shown["parameters"].splitlines())
    options = {
        "num_predict": 64,
        "num_ctx": 8192,
        "temperature": 0,
        "stop": ["</s>"],
        "use_mmap": True,
        "num_thread": 4,
    }
    body = {"model": chosen, "options": options, "keep_alive": 1800, "stream": True}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "read_file", "arguments": {"path": "a.py"}}}],
    }
    history = [{"role": "user", "content": "Read a.py"}, called, {"role": "tool", "content": "x = 1"}]
    parts = await lines(client, "/api/chat", {**body, "messages": history})
    assert "".join(part["message"]["content"] for part in parts) == "Hello!"
    client.rig.stage.script = say(CALL)
    parts = await lines(client, "/api/chat", {**body, "messages": history[:1], "tools": [TOOL], "think": False})
    [call] = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert call["function"]["arguments"] == {"path": "a.py"}
    client.rig.stage.script = say(" world")
    parts = await lines(client, "/api/generate", {**body, "prompt": "Hello", "raw": True})
    assert "".join(part["response"] for part in parts) == " world"


async def test_copilot_with_an_ollama_endpoint(client):
    client.rig.stage.script = say("Hello!")
    _, version = await client.ask("/api/version")
    assert [int(part) for part in version["version"].split(".")] >= [0, 6, 4]
    _, tags = await client.ask("/api/tags")
    [chosen] = [model["model"] for model in tags["models"]]
    _, shown = await client.ask("/api/show", {"model": chosen})
    facts = shown["model_info"]
    assert facts[f"{facts['general.architecture']}.context_length"] == 512
    assert "tools" in shown["capabilities"]
    body = {
        "model": chosen, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.1, "top_p": 1, "n": 1, "stream": True, "stream_options": {"include_usage": True},
        "tools": [TOOL],
    }  # fmt: skip
    chunks = [json.loads(event) for event in (await client.events("/v1/chat/completions", body))[:-1]]
    assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == "Hello!"


async def test_zed_with_an_openai_compatible_provider(client):
    client.rig.stage.script = say(CALL)
    asked = {"role": "user", "content": [{"type": "text", "text": "Read"}, {"type": "text", "text": " a.py"}]}
    body = {
        "model": MODEL, "messages": [{"role": "system", "content": "You are an agent."}, asked], "stream": True,
        "stream_options": {"include_usage": True}, "max_completion_tokens": 64, "temperature": 1.0, "tools": [TOOL],
        "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "thread-1",
    }  # fmt: skip
    chunks = [json.loads(event) for event in (await client.events("/v1/chat/completions", body))[:-1]]
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert all(isinstance(call["index"], int) for call in calls)
    assert "".join(call["function"].get("arguments") or "" for call in calls) == '{"path": "a.py"}'
    called = {
        "id": calls[0]["id"],
        "type": "function",
        "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
    }
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "x = 1", "tool_call_id": calls[0]["id"]},
    ]
    client.rig.stage.script = say("Done.")
    chunks = [json.loads(event) for event in (await client.events("/v1/chat/completions", body))[:-1]]
    assert "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]) == "Done."


async def test_zed_with_an_ollama_provider(client):
    client.rig.stage.script = say("Hello!")
    _, tags = await client.ask("/api/tags")
    [model] = tags["models"]
    assert {"name", "modified_at", "size", "digest", "details"} <= set(model)
    _, shown = await client.ask("/api/show", {"model": model["name"]})
    assert {"tools", "thinking"} <= set(shown["capabilities"])
    body = {
        "model": model["name"], "messages": [{"role": "user", "content": "Hi"}], "stream": True, "keep_alive": -1,
        "options": {"num_ctx": 16384, "num_predict": None, "stop": ["<|im_end|>"], "temperature": 1.0, "top_p": None},
        "tools": [TOOL], "think": False,
    }  # fmt: skip
    parts = await lines(client, "/api/chat", body)
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    assert "".join(part["message"]["content"] for part in parts) == "Hello!"
    assert parts[-1]["prompt_eval_count"] > 0
