"""Daemons and supervisors that die, with real processes and the demo model (docs/failures.md)."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf import GGUFReader

from tests.daemon_forks import Forker
from tests.e2e.process import DEMO, Cli, post
from tests.e2e.promised_status import Status
from tests.e2e.service import GOLDEN, write_config
from tests.waiting import wait_until

QUESTION = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0, "max_tokens": 24}


def answer(status: dict[str, Any], **more: Any) -> str:
    code, body = post(f"{status['url']}/v1/chat/completions", QUESTION | more)
    assert code == 200, body
    return str(body["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While there is such a file, no daemon of group left gets further than its interpreter's start."""
    return tmp_path_factory.mktemp("gate") / "closed"


@pytest.fixture(scope="module")
def shared(forker: Forker, gate: Path) -> Iterator[Cli]:
    """A supervisor for tests that kill its daemons and wait until it is ready again."""
    python = gate.with_name("python")
    wait = f'case "$*" in *daemons*) while [ -e {gate} ]; do sleep 0.05; done;; esac'
    python.write_text(f'#!/bin/sh\n{wait}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cli = Cli(forker)
    try:
        cli.start(DEMO, "recovery.restart_limit=9/60s", "engine.dtype=float32", f"groups.left.python={python}")
        yield cli
        cli.stop()
    finally:
        cli.close()


def group(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(g for g in status["groups"] if g["name"] == name)


LONG = {"prompt": "import os\n", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_a_daemon_killed_while_requests_run_costs_them_a_pause(shared: Cli) -> None:
    status = shared.status()
    url = f"{status['url']}/v1/completions"
    code, before = post(url, LONG)
    assert code == 200
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        plain = pool.submit(post, url, LONG)
        lines = pool.submit(stream, url, LONG | {"stream": True}, begun := threading.Event())
        assert begun.wait(100), "the stream has begun"
        os.kill(group(status, "right")["pid"], signal.SIGSTOP)  # so that neither ends before the kill
        wait_until(lambda: shared.status()["engine"]["running"] == 2, what="both requests run")
        os.kill(group(status, "right")["pid"], signal.SIGKILL)
        code, body = plain.result(timeout=100)
        streamed = lines.result(timeout=100)
    assert code == 200
    assert body["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert streamed[-1] == "[DONE]"
    chunks = [json.loads(line) for line in streamed[:-1]]
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids") or []]
    assert ids == before["choices"][0]["token_ids"]
    engine = shared.status()["engine"]
    assert engine["held"] == 0
    assert engine["recovery"]["sequences"] == 2
    assert engine["pages"]["used"] == 0


def stream(url: str, body: dict[str, Any], begun: threading.Event) -> list[str]:
    """Data of all server-sent events; ``begun`` is set when the first is there."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    found = []
    with urllib.request.urlopen(request, timeout=100) as reply:
        for line in reply:
            if line.startswith(b"data: "):
                found.append(line.decode()[6:].strip())
                begun.set()
    return found


def unready(status: dict[str, Any]) -> str:
    """What /ready says while it is 503."""
    try:
        with urllib.request.urlopen(f"{status['url']}/ready", timeout=20):
            return ""
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.read().decode()


def test_while_a_shard_is_away_new_requests_wait_and_ready_says_why(shared: Cli, gate: Path) -> None:
    status = shared.status()
    before = answer(status)
    other = group(status, "right")["pid"]
    gate.touch()
    os.kill(group(status, "left")["pid"], signal.SIGKILL)
    wait_until(lambda: msgspec.convert(shared.status(), Status).state == "degraded", what="degraded")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{status['url']}/ready", timeout=20)
    assert refused.value.code == 503
    assert "left" in refused.value.read().decode()
    refused.value.close()
    wait_until(lambda: "restarting after: process" in unready(status), what="the cause, in the next process' state")
    assert "killed by signal 9 (SIGKILL)" in unready(status)
    with urllib.request.urlopen(f"{status['url']}/health", timeout=20) as health:
        assert health.status == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, status)
        wait_until(lambda: shared.status()["engine"]["held"] == 1, what="the request waits")
        gate.unlink()
        assert asked.result(timeout=100) == before
    now = shared.status()
    assert now["state"] == "ready"
    assert group(now, "right")["pid"] == other, "the sibling keeps its process and its weights"


def test_a_stage_that_computes_no_numbers_is_named(cli: Cli, tmp_path: Path) -> None:
    """Its weights are finite, and so large that what it computes is not."""
    model = tmp_path / "model.gguf"
    shutil.copy(GOLDEN / "qwen35" / "model.gguf", model)
    [found] = [one for one in GGUFReader(model, "r+").tensors if one.name == "blk.1.ffn_down.weight"]
    found.data[:] = 3e38
    found.data.base.flush()
    config = write_config(tmp_path, model, {"left": 1, "right": 1}, ["0-4", "4-8"], '[draft]\nkind = "off"\n')
    status = cli.start(config, "engine.dtype=float32")
    code, body = post(f"{status['url']}/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4})
    assert (code, body["error"]["code"]) == (500, "invalid_logits")
    said = "stage 0 (group left) computed numbers that are NaN or infinite"
    assert said in body["error"]["message"]
    assert said in unready(status)
    now = cli.status()
    assert [(g["state"], g["restarts"]) for g in now["groups"]] == [("ready", 0), ("ready", 0)]
    assert (now["engine"]["running"], now["engine"]["pages"]["used"]) == (0, 0)
    assert "logits are not numbers" in cli.run("logs", "--level", "error").stdout
    cli.stop()
