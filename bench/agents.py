"""Agents behind one system prompt, against any OpenAI endpoint: time to the first token, reused tokens, tokens/s.

    python bench/agents.py URL [--agents 12] [--turns 5] [--system 6000] [--tool 2400] [--answer 150] [--json PATH]
                           [--in-turn] [--stream]

All agents begin at once with the same system prompt.  Each turn of an agent sends its conversation so far and a new
text of a tool, and takes an answer of so many tokens, streamed, greedy.  Lengths of texts are in words, most of which
are one token or two; the endpoint's usage says how many tokens they were.  --in-turn: one request at a time, and an
agent goes on when all others have had their turn.  --stream: beside one more answer, whose chunks are timed.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

import aiohttp
from records import machine, write_json

WORDS = (
    "the a of to in for on with is are was file path read write open close test error value index name list return "
    "import class function call line code data user time build run check result type string number object array key"
)


def text(rng, n):
    return " ".join(rng.choices(WORDS.split(), k=n))


async def turn(session, url, model, messages, n_answer):
    """Send one turn; return the answer's text and what was measured."""
    body = {
        "model": model, "messages": messages, "max_tokens": n_answer, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_prompt": True,
    }  # fmt: skip
    began, first, parts, usage = time.monotonic(), None, [], {}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if said := delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                    first = first or time.monotonic() - began
                    parts.append(said)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    seconds = time.monotonic() - began
    return "".join(parts), {
        "first_s": seconds if first is None else first, "seconds": seconds, "prompt": usage.get("prompt_tokens", 0),
        "cached": cached, "answer": usage.get("completion_tokens", 0),
    }  # fmt: skip


async def agent(session, url, model, options, i):
    """Yield what was measured of each turn."""
    rng = random.Random(f"agent {options.seed} {i}")
    messages = [{"role": "system", "content": text(random.Random(options.seed), options.system)}]
    for number in range(options.turns):
        messages.append({"role": "user", "content": f"Agent {i}, turn {number}: {text(rng, options.tool)}"})
        said, row = await turn(session, url, model, messages, options.answer)
        messages.append({"role": "assistant", "content": said})
        yield {"agent": i, "turn": number, **row}


async def all_turns(session, url, model, options):
    agents = [agent(session, url, model, options, i) for i in range(options.agents)]
    if options.in_turn:
        return [await anext(one) for _ in range(options.turns) for one in agents]

    async def rows(one):
        return [row async for row in one]

    return [row for found in await asyncio.gather(*map(rows, agents)) for row in found]


async def gaps_of_a_stream(session, url, model, gaps):
    """Collect the seconds between the chunks of answers without end."""
    body = {
        "model": model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 1500, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    while True:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            last = None
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    gaps += [] if last is None else [now - last]
                    last = now


async def measure(options):
    timeout = aiohttp.ClientTimeout(total=3600)
    # Not kept alive: llama-server closes an idle connection just when the next turn is sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(f"{options.url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        gaps = []
        beside = asyncio.create_task(gaps_of_a_stream(session, options.url, model, gaps)) if options.stream else None
        began = time.monotonic()
        rows = await all_turns(session, options.url, model, options)
        seconds = time.monotonic() - began
        if beside is not None:
            beside.cancel()
    first = sorted(row["first_s"] for row in rows)
    total = {key: sum(row[key] for row in rows) for key in ("prompt", "cached", "answer")}
    print(
        f"{model}: {options.agents} agents of {options.turns} turns in {seconds:.1f} s; {total['prompt']} tokens of "
        f"prompts, {total['cached']} of them reused; {total['answer']} answered; first token p50 "
        f"{statistics.median(first):.2f} s, p95 {first[int(0.95 * (len(first) - 1))]:.2f} s"
    )
    later = sorted(row["first_s"] for row in rows if row["turn"])
    if options.in_turn and later:
        print(f"after the first turn: first token p50 {statistics.median(later):.3f} s, max {later[-1]:.3f} s")
    if gaps := sorted(gaps):
        at = {
            name: 1e3 * gaps[int(share * (len(gaps) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        }
        print(f"{len(gaps)} chunks beside it, ms apart: " + ", ".join(f"{name} {ms:.1f}" for name, ms in at.items()))
    return {"model": model, "seconds": seconds, **total, "first_s": first, "gaps_s": gaps, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8080")
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=6000)
    parser.add_argument("--tool", type=int, default=2400)
    parser.add_argument("--answer", type=int, default=150)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.url = options.url.rstrip("/").removesuffix("/v1")
    found = asyncio.run(measure(options))
    if options.json is not None:
        arguments = {key: str(value) for key, value in vars(options).items() if key != "json"}
        write_json(options.json, {"options": arguments, **machine(), **found})


if __name__ == "__main__":
    main()
