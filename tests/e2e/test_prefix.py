"""Prefix slots with real daemons: the same greedy tokens with the cache off, cold and warm, and only new tokens
computed.
"""

from __future__ import annotations

import urllib.request

from tests.e2e.process import DEMO as DEMO_CONFIG
from tests.e2e.process import Cli, chat

RULES = " ".join(f"Rule {i}: answer in one sentence and name the module." for i in range(30))


def test_an_agent_that_tells_the_time_is_answered_from_memory_and_everybody_is_told(cli: Cli) -> None:
    status = cli.start(DEMO_CONFIG, "engine.dtype=float32", "cache.normalise=fix")
    turns = ["What does os.path.join do?"]
    cached, prompts = [], []
    for hour in (9, 10, 11):
        answer, n_prompt, n_cached = chat(status["url"], f"Current time: {hour}:00\n{RULES}", turns)
        cached.append(n_cached)
        prompts.append(n_prompt)
        turns += [answer, "And os.path.split?"]
    assert cached[0] == 0
    assert all(n > 0.9 * before for n, before in zip(cached[1:], prompts, strict=False))
    now = cli.status()
    assert now["cache"]["hits"] == 2
    assert now["cache"]["prompts"] == 3
    assert now["cache"]["tokens"] == {"device": sum(cached), "host": 0, "disk": 0}
    assert 0 < now["cache"]["prefix_slots"] <= now["cache"]["max_slots"] == 32
    assert 0 < now["cache"]["used_bytes"] <= now["cache"]["max_bytes"] == 2**30
    assert now["engine"]["pages"]["used"] == 0
    assert now["engine"]["pages"]["cached"] > 0
    with urllib.request.urlopen(f"{status['url']}/metrics", timeout=100) as reply:
        text = reply.read().decode()
    name = now["model"]["name"]
    assert f'lucevisor_cached_prompt_tokens_total{{model="{name}",tier="device"}} {float(sum(cached))}' in text
    assert f'lucevisor_pages{{model="{name}",space="full",where="cached"}}' in text
    cli.run("restart", "left")  # its successor takes over what it held
    assert cli.status()["cache"]["prefix_slots"] == now["cache"]["prefix_slots"]
    assert chat(status["url"], f"Current time: 12:00\n{RULES}", turns[:1])[2] > 0
    cli.stop()
