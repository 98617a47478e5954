"""Prefix slots with real daemons: the same greedy tokens with the cache off, cold and warm, and only new tokens
computed.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from lucevisor.model.families import open_spec
from tests.combinations import slow
from tests.e2e.process import DEMO as DEMO_CONFIG
from tests.e2e.process import Cli, chat
from tests.e2e.service import DEMO, MODELS, converse, running, write_config
from tests.model.drafter_files import UPSTREAM

CONFIG = """
[engine]
dtype = "float32"
prefill_chunk = 64
max_sequences = 4
pages = 1000
[cache]
min_tokens = 64
prefix_slots = {}
states = "{}"
[draft]
{}
"""
PLAIN = 'kind = "off"'
"""Without drafts every token is computed once: tests count them."""


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        slow("demo", DEMO.with_name("demo-qwen35-22m-dflash2-q4_0.gguf")),
        slow("qwen35", UPSTREAM),
        ("qwen3", None),
    ],
)
async def test_drafts_change_neither_answers_nor_what_is_remembered(
    name: str, drafter: Path | None, tmp_path: Path
) -> None:
    told = []
    for draft in (PLAIN, 'kind = "lookup"' if drafter is None else f'path = "{drafter}"'):
        spec = open_spec(MODELS[name])
        ranges = [f"0-{spec.n_layers // 2}", f"{spec.n_layers // 2}-{spec.n_layers}"]
        config = write_config(tmp_path, MODELS[name], {"a": 1, "b": 1}, ranges, CONFIG.format(300, "device", draft))
        async with running(config, tmp_path) as service:
            told += [await converse(service, spec.vocabulary, 3) for _ in range(2)]
            assert service.only.engine is not None
            assert all(use.used == use.evictable for use in service.only.engine.statistics().pages.values())
            assert service.only.deployment.drafting == (draft != PLAIN and drafter is not None)
    plain, drafted = told[:2], told[2:]
    assert [(one.answers, one.cached) for one in plain] == [(one.answers, one.cached) for one in drafted]


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
    assert now["cache"]["tokens"] == {"memory": sum(cached), "host": 0, "disk": 0}
    assert 0 < now["cache"]["prefix_slots"] <= now["cache"]["max_slots"] == 32
    assert 0 < now["cache"]["bytes"] <= now["cache"]["memory"] == 2**30
    assert now["engine"]["pages"]["used"] == 0
    assert now["engine"]["pages"]["cached"] > 0
    with urllib.request.urlopen(f"{status['url']}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    name = now["model"]["name"]
    assert f'lucevisor_cached_prompt_tokens_total{{model="{name}",tier="memory"}} {float(sum(cached))}' in text
    assert f'lucevisor_pages{{model="{name}",space="full",where="cached"}}' in text
    cli.run("restart", "left")  # its successor takes over what it held
    assert cli.status()["cache"]["prefix_slots"] == now["cache"]["prefix_slots"]
    assert chat(status["url"], f"Current time: 12:00\n{RULES}", turns[:1])[2] > 0
    cli.stop()
