"""Clients that repeat the same questions. Each request is right, wrong (other tokens) or lost (anything but a whole
answer), and is counted once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

N_CLIENTS: Final = 8
N_SHORT: Final = 10
N_LONG: Final = 6


SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "level": {"type": "integer"}},
    "required": ["name", "level"],
    "additionalProperties": False,
}
FORMS: Final[Sequence[dict[str, Any]]] = (
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "(import|from) [a-z]{1,12}(\\.[a-z]{1,12}){0,3}"}},
)


@dataclass(frozen=True, slots=True)
class Question:
    """The body of a POST to ``path``."""

    path: str
    body: dict[str, Any]

    def __str__(self) -> str:
        shown = {key: value for key, value in self.body.items() if key != "prompt"}
        return f"{self.path}, prompt of {len(self.body.get('prompt', ()))} tokens, {shown}"


@dataclass(slots=True, eq=False)
class Counts:
    """Answers, and what was wrong with some."""

    n_right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    """The longest time that a stream waited for its next token."""

    def add(self, other: Counts) -> None:
        self.n_right += other.n_right
        self.wrong += other.wrong
        self.lost += other.lost
        self.pause_s = max(self.pause_s, other.pause_s)

    def as_json(self) -> dict[str, Any]:
        return {"right": self.n_right, "wrong": self.wrong, "lost": self.lost, "pause_s": self.pause_s}


class Lost(Exception):
    """A request that ended otherwise than with an answer."""


class Traffic:
    """``N_CLIENTS`` clients; :meth:`counting` counts their answers."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._url, self._rng = url, rng
        self._answers: list[tuple[Question, list[int]]] = []
        self._session: aiohttp.ClientSession | None = None
        self._counts: list[Counts] = []
        self._running: set[object] = set()  # one for each request
        self._ended = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the connections."""
        timeout = aiohttp.ClientTimeout(total=900.0)  # requests are held for `recovery.hold_s` at most
        # A supervisor that was taken over from closes connections between requests, as any server may.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def learn(self) -> None:
        """Ask each question once to learn the answers without faults: short prompts, some with a form or a tool call,
        long ones with a common beginning, and the same conversations one turn later."""
        rng = self._rng
        shared = "\n".join(f"def function_{i}(x):\n    return x + {i}" for i in range(40))
        texts = [f"import module_{i}\n" for i in range(N_SHORT)]
        texts += [f"{shared}\n# part {i}\n" for i in range(N_LONG)]
        for i, text in enumerate(texts):
            sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": i}
            sampling |= {"max_tokens": rng.randrange(16, 64), "ignore_eos": True}
            prompt = await self._tokenize(text)
            answer = await self._learn(Question("/v1/completions", {"prompt": prompt, **sampling}))
            if i >= N_SHORT:
                later = [*prompt, *answer, *prompt[:8]]
                await self._learn(Question("/v1/completions", {"prompt": later, **sampling}))
        if not await self._has_chat_template():
            return  # a random model of the tests, whose likeliest tokens fit no schema
        for i, form in enumerate([*FORMS, *FORMS]):
            sampling = {"temperature": i // 2, "seed": i, "max_tokens": 64}
            prompt = await self._tokenize(texts[i])
            await self._learn(Question("/v1/completions", {"prompt": prompt, **sampling, **form}))
        tool = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA, "strict": True}}
        for i in range(2):
            messages = [{"role": "user", "content": f"Look up module_{i}."}]
            body = {"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 64}
            await self._learn(Question("/v1/chat/completions", {**body, "temperature": i, "seed": i}))

    async def _learn(self, question: Question) -> list[int]:
        answer = await self._ask(question, stream=True)
        self._answers.append((question, answer))
        return answer

    async def run(self) -> None:
        """Ask until :meth:`end`."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(N_CLIENTS):
                clients.create_task(self._client())

    def end(self) -> None:
        """Ask nothing more; ``run`` returns when all have their answers."""
        self._ended = True

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[Counts]:
        """Count what is answered meanwhile."""
        counts = Counts()
        self._counts.append(counts)
        try:
            yield counts
        finally:
            self._counts.remove(counts)

    @property
    def running(self) -> frozenset[object]:
        """The requests without an answer."""
        return frozenset(self._running)

    async def answered(self, requests: frozenset[object]) -> None:
        """Wait until such requests have their answers."""
        while requests & self._running:  # noqa: ASYNC110 - they end by the dozen
            await asyncio.sleep(0.02)

    async def _client(self) -> None:
        while not self._ended:
            question, right = self._rng.choice(self._answers)
            request = object()
            self._running.add(request)
            try:
                ids = await self._ask(question, stream=self._rng.random() < 0.7)
            except (Lost, aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                for counts in self._counts:
                    counts.lost.append(f"{question}: {type(error).__name__}: {error}")
                continue
            finally:
                self._running.discard(request)
            for counts in self._counts:
                if ids == right:
                    counts.n_right += 1
                else:
                    at = next((i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), len(ids))
                    counts.wrong.append(f"{question}: token {at} of {len(right)} differs")

    async def _ask(self, question: Question, *, stream: bool) -> list[int]:
        assert self._session is not None
        body = {**question.body, "return_token_ids": True, "stream": stream}
        async with self._session.post(self._url + question.path, json=body) as reply:
            if reply.status != 200:
                raise Lost(f"status {reply.status}: {(await reply.text())[:300]}")
            if not stream:
                return list((await reply.json())["choices"][0]["token_ids"])
            return await self._read_stream(reply)

    async def _read_stream(self, reply: aiohttp.ClientResponse) -> list[int]:
        ids: list[int] = []
        last_s = time.monotonic()
        async for line in reply.content:
            if line == b"data: [DONE]\n":
                return ids
            if not line.startswith(b"data: "):
                continue  # a comment: it waits
            event = json.loads(line[6:])
            if "error" in event:
                raise Lost(str(event["error"])[:300])
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            now_s = time.monotonic()
            for counts in self._counts:
                counts.pause_s = max(counts.pause_s, now_s - last_s)
            last_s = now_s
        raise Lost(f"the stream ended after {len(ids)} tokens")

    async def _has_chat_template(self) -> bool:
        assert self._session is not None
        async with self._session.get(f"{self._url}/props") as reply:
            return bool((await reply.json()).get("chat_template"))

    async def _tokenize(self, text: str) -> list[int]:
        assert self._session is not None
        async with self._session.post(f"{self._url}/tokenize", json={"content": text}) as reply:
            return list((await reply.json())["tokens"])
