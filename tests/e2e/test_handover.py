"""A supervisor takes over from another one beside clients: none is refused, and all get the same tokens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lucevisor.cli.admin_client import AdminClient
from tests.app.test_systemd import Manager
from tests.e2e.process import DEMO, RULES, Cli, alive, complete, tokens_of
from tests.waiting import wait_until

N_CLIENTS = 4
PAUSE_S = 0.2
BODY = {"max_tokens": 16, "ignore_eos": True, "return_token_ids": True, "stream": True}
EXACT = ("engine.dtype=float32",)


class Clients:
    """Threads that each ask over a new connection as soon as they have their answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = False
        self.n_answers = 0
        self.wrong: list[str] = []
        self.right = [self._ask(i) for i in range(N_CLIENTS)]

    def _ask(self, i: int) -> list[int]:
        sampling = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        body = BODY | sampling | {"prompt": f"import module_{i}\n"}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        ids: list[int] = []
        with urllib.request.urlopen(request, timeout=100) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
        return ids

    def _client(self, i: int) -> None:
        while not self._ended:
            try:
                ids = self._ask(i)
            except Exception as error:  # whatever a client sees counts
                self.wrong.append(f"client {i}: {error!r}")
            else:
                if ids != self.right[i]:
                    self.wrong.append(f"client {i}: {ids} instead of {self.right[i]}")
            self.n_answers += 1
            time.sleep(PAUSE_S)  # leaves the processor to the start of the other supervisor

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(N_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended = True
            for thread in threads:
                thread.join(100)


@contextlib.contextmanager
def reading(manager: Manager) -> Iterator[None]:
    """As systemd does: what nobody reads fills the queue."""
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.02):
            manager.read()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def manager(short_path: Path) -> Iterator[Manager]:
    one = Manager(str(short_path / "notify"))
    yield one
    one.sock.close()


def pids(status: dict[str, Any]) -> list[int]:
    return [status["pid"], *(group["pid"] for group in status["groups"])]


@pytest.mark.timeout(600)
def test_clients_notice_nothing_of_a_new_supervisor(cli: Cli, manager: Manager) -> None:
    cli.env |= manager.environ
    status = cli.start(DEMO, *EXACT)
    clients = Clients(status["url"])
    with clients.running(), reading(manager):
        old, status = status, cli.start(DEMO, *EXACT, take_over=True)
        assert status["url"] == old["url"]
        assert not set(pids(status)) & set(pids(old))
        wait_until(lambda: not any(alive(pid) for pid in pids(old)), what="the old one has ended")
        n_then = clients.n_answers
        wait_until(lambda: clients.n_answers > n_then + N_CLIENTS, what="answers of the new one")
    assert clients.wrong == []
    said = manager.read()
    main = said.index(f"MAINPID={status['pid']}")
    assert [line.partition("\n")[0] for line in said[:main] if not line.startswith("STATUS")][-1] == "RELOADING=1"
    assert "READY=1" in said[main:]
    assert said.count("READY=1") == 2
    cli.stop()
    assert not cli.socket().parent.exists()


def test_a_killed_supervisor_leaves_nothing_and_the_next_goes_on_warm(cli: Cli, tmp_path: Path) -> None:
    cache = (*EXACT, f"cache.dir={tmp_path / 'cache'}", "cache.min_tokens=64")
    status = cli.start(DEMO, *cache)
    url = status["url"]
    asked = tokens_of(url, RULES)
    answer, _ = complete(url, asked)
    right, _ = complete(url, asked + answer)
    wait_until(lambda: cli.status()["cache"]["saved"] >= 1, what="a file was saved")
    os.kill(status["pid"], signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids(status)), what="no daemon is left")
    again = cli.start(DEMO, *cache, take_over=True)  # there is nothing to take over
    tokens, n_cached = complete(again["url"], asked + answer)
    assert n_cached > 64
    assert tokens == right
    assert AdminClient(cli.socket()).call("GET", "/status")["cache"]["tokens"]["disk"] == n_cached
    cli.stop()
