"""Long bodies are read as short ones are, in processes whose memory, time and number are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lucevisor.api.app_state import BUFFERED_BODIES
from lucevisor.api.bodies import INLINE_BYTES
from lucevisor.api.contexts import ApiSettings, ServedModels
from lucevisor.api.dialects.llamacpp import parse_detokenize, parse_tokenize
from lucevisor.api.dialects.openai_chat import parse_apply_template, parse_chat
from lucevisor.api.dialects.openai_completions import parse_completion
from lucevisor.api.errors import ApiError
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.preprocessing import SHORT_BYTES, Preprocessor
from lucevisor.api.schemas import decode_object
from tests.api.scripted_model import Rig, metadata
from tests.waiting import until, wait_until

PARSERS = {
    "chat": parse_chat,
    "completion": parse_completion,
    "apply_template": parse_apply_template,
    "tokenize": parse_tokenize,
    "detokenize": parse_detokenize,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LARGE_NUMBERS = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30, "default": -(10**400)}}}
BODIES = [
    ("chat", {"messages": [{"role": "user", "content": "Hi é 🎉 <|im_end|>"}]}),
    ("chat", {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "tools": [TOOL]}),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "seed": -5,
            "temperature": 0.5,
            "top_k": 3,
            "logit_bias": {"7": -100, "9": 1.5},
            "stop": ["a", "b"],
            "n": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 9,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": False,
            "enable_thinking": True,
        },
    ),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "b"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": LARGE_NUMBERS}}],
        },
    ),
    ("chat", {"messages": [], "temprature": 1}),
    ("chat", {"messages": [{"role": "user", "content": "Hi " * 600}]}),
    ("completion", {"prompt": "Once upon", "echo": True, "seed": 1}),
    ("completion", {"prompt": [[1, 2, 3], [4]], "n": 2, "seed": 1, "return_token_ids": True}),
    ("completion", {"prompt": [1, 8192]}),
    ("completion", {"prompt": [5] * 600}),
    ("apply_template", {"messages": [{"role": "user", "content": "Hi é"}], "enable_thinking": True}),
    ("apply_template", {"messages": []}),
    ("tokenize", {"content": "Hello é <|im_end|>", "with_pieces": True}),
    ("tokenize", {}),
    ("detokenize", {"tokens": [1, 2, 3, 8184]}),
    ("detokenize", {"tokens": [-1]}),
    ("chat", b"{" * 10_000),
]


def outcome(read: object) -> object:
    """What was read, without the seed that is drawn when none is given."""
    if isinstance(read, ApiError):
        return read.status, read.message, read.code, read.param, read.headers
    if isinstance(read, PreparedRequest):
        fields = {name: getattr(read.options, name) for name in read.options.__struct_fields__ if name != "sampling"}
        sampling = read.options.sampling
        return fields, read.prompts, [getattr(sampling, n) for n in sampling.__struct_fields__ if n != "seed"]
    return b"".join(read) if isinstance(read, list) else read


@pytest.fixture
async def preprocessor():
    made = Preprocessor(metadata())
    yield made
    await made.close()


async def test_a_process_reads_as_the_server_does(preprocessor):
    context = Rig(attach=False).context
    for name, fields in BODIES:
        parser = PARSERS[name]
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        try:
            here = parser(decode_object(body), context)
        except ApiError as error:
            here = error
        try:
            there, model = await preprocessor.parse(parser, [body[:7], body[7:], b" " * 5000], ServedModels([context]))
            assert model == context.model.name
        except ApiError as error:
            there = error
        assert outcome(there) == outcome(here), fields
        if isinstance(fields, dict) and "seed" in fields:
            assert there.options.sampling == here.options.sampling


async def test_a_schema_that_is_nested_too_deep_to_be_sent_back_is_refused(preprocessor):
    schema: dict[str, object] = {"type": "object"}
    for _ in range(300):
        schema = {"allOf": [schema]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    context = Rig(attach=False).context
    context.max_context = 4096
    with pytest.raises(ApiError, match="nested too deep") as refused:
        await preprocessor.parse(PARSERS["chat"], [json.dumps(body).encode()], ServedModels([context]))
    assert refused.value.status == 400


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it is being reaped
            if "--multiprocessing-fork" in child.cmdline():
                found.append(child)
    return found


async def test_no_process_before_a_long_body_and_neither_process_nor_descriptor_after_the_end(start):
    n_open = []
    for _ in range(2):
        client = await start()
        await client.chat()
        assert not children()
        assert (await client.chat(user="x" * INLINE_BYTES))[0] == 200
        (process,) = children()
        await client.session.close()
        await client.runner.cleanup()
        assert not process.is_running()
        n_open.append(len(os.listdir("/proc/self/fd")))
    assert n_open[1] <= n_open[0]


async def ask_and_kill(client: Any, n: int) -> tuple[int, Any]:
    """Ask, and kill the workers that get the body, ``n`` one after the other."""
    (process,) = children()
    process.suspend()
    asked = await asked_while_busy(client)
    process.kill()
    killed = {process.pid}
    while len(killed) < n:
        await until(lambda: [child for child in children() if child.pid not in killed])
        process = next(child for child in children() if child.pid not in killed)
        process.kill()
        killed.add(process.pid)
    return await asked


async def asked_while_busy(client: Any, n_bytes: int = INLINE_BYTES) -> asyncio.Task[tuple[int, Any]]:
    """Ask; return when the server has the body."""
    bodies = client.runner.app[BUFFERED_BODIES]
    before = bodies.n_bytes
    asked = asyncio.create_task(client.chat(user="x" * n_bytes))
    await until(lambda: bodies.n_bytes >= before + n_bytes)
    return asked


async def test_a_process_that_is_killed_costs_no_request_and_a_second_one_this_request(start):
    client = await start()
    await client.chat(user="x" * INLINE_BYTES)
    assert (await ask_and_kill(client, 1))[0] == 200
    status, answer = await ask_and_kill(client, 2)
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert "prepared this request ended with SIGKILL; try again later" in answer["error"]["message"]
    assert (await client.chat(user="x" * INLINE_BYTES))[0] == 200

    # One that is killed while it sends its result, of a megabyte, more than the pipe holds.
    text = {"content": "word " * 40_000, "with_pieces": True}
    expected = await client.ask("/tokenize", text)
    assert expected[0] == 200
    (process,) = children()
    killed = asyncio.create_task(asyncio.to_thread(kill_at_first_write, process, n_written(process)))
    assert await client.ask("/tokenize", text) == expected
    await killed


def n_written(process: psutil.Process) -> int:
    fields = Path(f"/proc/{process.pid}/io").read_text().split()
    return int(fields[fields.index("wchar:") + 1])


def kill_at_first_write(process: psutil.Process, before: int) -> None:
    """Kill a worker when it begins to send, right behind the length of what it sends."""
    while n_written(process) == before:
        pass
    process.kill()


@pytest.mark.parametrize(
    ("limit", "words"),
    [({"preprocess_timeout_s": 0.05}, "0.05 s"), ({"preprocess_memory_bytes": 128 << 20}, "128 MiB")],
    ids=["time", "memory"],
)
async def test_a_body_that_takes_too_much(start, limit, words):
    """15 MB of arrays are 300 MB of objects."""
    client = await start(Rig(settings=replace(ApiSettings(), **limit)))
    body = io.BytesIO(b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}")
    status, answer = await client.ask("/v1/chat/completions", data=body, headers={"Content-Type": "application/json"})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert words in answer["error"]["message"]


async def test_short_bodies_do_not_wait_for_long_ones_nor_others_for_a_client_that_left(start):
    client = await start()
    await client.chat(user="x" * (SHORT_BYTES + 1))
    (process,) = children()
    process.suspend()
    long = await asked_while_busy(client, SHORT_BYTES + 1)
    assert (await client.chat(user="x" * INLINE_BYTES))[0] == 200
    assert not long.done()
    process.resume()
    assert (await long)[0] == 200
    process.suspend()
    left = await asked_while_busy(client, SHORT_BYTES + 1)
    left.cancel()
    await asyncio.wait([left])
    process.resume()
    assert (await client.chat(user="x" * (SHORT_BYTES + 1)))[0] == 200
    assert process in children()


async def test_too_many_wait(start):
    client = await start(Rig(settings=replace(ApiSettings(), max_waiting_bodies=1)))
    long = "x" * (SHORT_BYTES + 1)
    await client.chat(user=long)
    (process,) = children()
    process.suspend()
    asked = [asyncio.create_task(client.chat(user=long)) for _ in range(3)]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    status, answer = done.pop().result()
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    process.resume()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_the_bytes_of_all_bodies_are_bounded(start):
    client = await start(Rig(settings=replace(ApiSettings(), max_bodies_bytes=100_000)))
    json_type = {"Content-Type": "application/json"}
    going = asyncio.Event()

    async def slow():
        yield b'{"user": "' + b"x" * 80_000
        await going.wait()
        yield b'", "messages": [{"role": "user", "content": "Hi"}]}'

    first = asyncio.create_task(client.ask("/v1/chat/completions", data=slow(), headers=json_type))
    await until(lambda: client.runner.app[BUFFERED_BODIES].n_bytes >= 80_000)
    status, answer = await client.chat(user="x" * 50_000)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    going.set()
    assert (await first)[0] == 200
    assert (await client.chat(user="x" * 50_000))[0] == 200


async def test_a_request_that_is_read_while_the_server_stops(start):
    client = await start()
    await client.chat(user="x" * (SHORT_BYTES + 1))
    (process,) = children()
    process.suspend()
    asked = [await asked_while_busy(client, SHORT_BYTES + 1) for _ in range(2)]
    await client.runner.cleanup()
    for status, answer in await asyncio.gather(*asked):
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
    await until(lambda: not process.is_running())


def test_no_process_outlives_a_server_that_is_killed():
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.api.watched_server"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdout.readline()
        # the worker, and multiprocessing's resource tracker
        wait_until(lambda: len(psutil.Process(server.pid).children()) == 2, what="both are there")
        found = psutil.Process(server.pid).children()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.stdin.close()
        server.stdout.close()
    end = time.monotonic() + 100
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in found):
        assert time.monotonic() < end
        time.sleep(0.02)
