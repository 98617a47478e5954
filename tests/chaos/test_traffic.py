"""The clients of `lucevisor chaos` find every answer that is wrong or lost, with a server that gives such."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from aiohttp import web

from lucevisor.api.server import listen, url_of
from lucevisor.chaos.traffic import FORMS, N_LONG, N_SHORT, Traffic

N_QUESTIONS = N_SHORT + 2 * N_LONG + 2 * len(FORMS) + 2


class Server:
    """Answers with tokens that follow from the prompt, until it is told to ``do`` something else."""

    def __init__(self) -> None:
        self.do = "right"
        self.n_asked = 0

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["content"]
        return web.json_response({"tokens": [ord(letter) for letter in text[-40:]]})

    async def props(self, request: web.Request) -> web.Response:
        return web.json_response({"chat_template": "{{ messages }}"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.n_asked += 1
        ids = [sum(body.get("prompt", [7])) % 1000 + i for i in range(body["max_tokens"])]
        do, self.do = self.do, "right"
        if do == "wrong":
            ids[3] += 1
        if do == "short":
            del ids[-1]
        if do == "refuse":
            return web.Response(status=503)
        if not body["stream"]:
            if do in ("cut", "error"):
                request.transport.close()
            return web.json_response({"choices": [{"token_ids": ids}]})
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(b": waiting\n\n")
        for i, token in enumerate(ids):
            if i == 4 and do == "cut":
                request.transport.close()
            if i == 4 and do == "error":
                await reply.write(b'data: {"error": {"code": "shard_lost"}}\n\n')
                return reply
            event = json.dumps({"choices": [{"token_ids": [token]}]})
            await reply.write(f"data: {event}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply


@pytest.fixture
async def served():
    server = Server()
    app = web.Application()
    app.add_routes(
        [
            web.post("/tokenize", server.tokenize),
            web.post("/v1/completions", server.complete),
            web.post("/v1/chat/completions", server.complete),
            web.get("/props", server.props),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    [sock] = listen("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    yield server, url_of(sock)
    await runner.cleanup()


@pytest.mark.parametrize("do", ["right", "wrong", "short", "refuse", "cut", "error"])
async def test_one_bad_answer_is_counted_once(served, do):
    server, url = served
    traffic = Traffic(url, random.Random(do))
    async with traffic.open():
        await traffic.learn()
        assert server.n_asked == N_QUESTIONS
        async with traffic.counting() as counts:
            asking = asyncio.create_task(traffic.run())
            server.do = do
            while server.do == do != "right" or server.n_asked < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            traffic.end()
            await asking
        async with traffic.counting() as later:
            pass
    expected = {"wrong": (1, 0), "short": (1, 0), "refuse": (0, 1), "cut": (0, 1), "error": (0, 1)}.get(do, (0, 0))
    assert (len(counts.wrong), len(counts.lost)) == expected, (counts.wrong, counts.lost)
    assert counts.n_right == server.n_asked - N_QUESTIONS - sum(expected)
    assert (later.n_right, later.wrong, later.lost) == (0, [], [])
