"""The demo with its drafter: usage, metrics, status and log agree on its drafts, and with the tokens generated."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon_forks import Forker
from tests.e2e.process import DEMO, Cli
from tests.e2e.test_faults import post

WIDTH = 4
ORIGINS = ("fresh", "restored")
QUESTION = {"role": "user", "content": "What does os.path.join do?"}


@pytest.fixture(scope="module")
def demo(forker: Forker) -> Iterator[Cli]:
    """The bundled demo; it always drafts, where `auto` would go by the machine's speed."""
    cli = Cli(forker)
    try:
        cli.start(DEMO, "engine.dtype=float32", f"draft.width={WIDTH}", "cache.min_tokens=8", "log.format=json")
        yield cli
        cli.stop()
    finally:
        cli.close()


def metrics(cli: Cli) -> dict[str, float]:
    """Counters of drafts, by name and origin; those by position are summed up."""
    with urllib.request.urlopen(f"{cli.status()['url']}/metrics") as reply:
        text = reply.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("lucevisor_").removesuffix("_total")
            found[f"{name} {sample.labels.get('origin', '')}".strip()] += sample.value
    return dict(found)


def at_rest(cli: Cli) -> tuple[dict[str, Any], dict[str, float]]:
    """Statistics and counters of one moment: a draft may still be on its way when its request has ended."""
    for _ in range(100):
        told, counted = cli.status()["draft"], metrics(cli)
        if cli.status()["draft"] == told:
            return told, counted
        time.sleep(0.05)
    raise AssertionError("statistics change although nothing runs")


def ask(cli: Cli, messages: list[dict[str, str]], **more: Any) -> tuple[str, dict[str, Any]]:
    """A greedy answer of a fixed length, and its usage."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True} | more
    url = f"{cli.status()['url']}/v1/chat/completions"
    if not more.get("stream"):
        code, answer = post(url, body)
        assert code == 200, answer
        return answer["choices"][0]["message"]["content"], answer["usage"]
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        lines = [line[6:] for line in reply.read().decode().split("\n") if line.startswith("data: {")]
    *chunks, last = map(json.loads, lines)
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks), last["usage"]


def test_usage_metrics_status_and_log_agree_with_the_tokens(demo: Cli) -> None:
    before, counted = at_rest(demo)
    assert (before["verified"], before["acceptance_length"], before["paused"]) == (0, 0.0, "")
    assert counted["accepted_tokens fresh"] == counted["accepted_tokens restored"] == 0
    text, fresh = ask(demo, [QUESTION])
    turns = [QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And os.path.split?"}]
    _, restored = ask(demo, turns, stream=True, stream_options={"include_usage": True})
    assert fresh["prompt_tokens_details"]["cached_tokens"] == 0 < restored["prompt_tokens_details"]["cached_tokens"]

    now, counted = at_rest(demo)
    for origin, usage in zip(ORIGINS, (fresh, restored), strict=True):
        details, told = usage["completion_tokens_details"], now["origins"][origin]
        n_accepted, n_rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert n_accepted > 0
        assert told["accepted"] == n_accepted == counted[f"accepted_tokens {origin}"]
        assert told["verified"] == n_accepted + n_rejected == counted[f"verified_tokens {origin}"]
        assert told["verify_slices"] == counted[f"verify_slices {origin}"]
        assert counted[f"accepted_tokens_per_position {origin}"] == n_accepted
        assert counted[f"verified_tokens_per_position {origin}"] == n_accepted + n_rejected
        # The prompt yields one token; a decode one, and its accepted drafts.
        assert usage["completion_tokens"] == 40
        assert 1 + told["plain_slices"] + told["verify_slices"] + n_accepted == 40
        assert told["acceptance_length"] == pytest.approx(1 + n_accepted / told["verify_slices"], abs=1e-3)
        assert len(told["acceptance_by_position"]) == WIDTH
        assert told["verify_s"] > 0 < told["draft_s"]
        assert told["draft_s"] == pytest.approx(counted[f"draft_seconds {origin}"], abs=1e-6)
    assert now["accepted"] == sum(one["accepted"] for one in now["origins"].values())
    assert now["verified"] <= now["drafted"] == counted["draft_tokens"]
    assert now["steps"] == counted["draft_steps"] >= now["verify_slices"]

    lines = map(json.loads, demo.run("logs").stdout.splitlines())
    logged = [line for line in lines if line.get("event") == "request" and "accepted_tokens" in line]
    assert [line["accepted_tokens"] for line in logged] == [now["origins"][one]["accepted"] for one in ORIGINS]
