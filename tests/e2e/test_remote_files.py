"""State of groups that get no descriptors: the same greedy tokens from every tier, after a restart, under another split
and another transport, and nothing wrong when either side is killed on the way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.protocol import files
from tests.certificates import make_certificate
from tests.combinations import slow
from tests.e2e.service import MODELS, PROMPT, Place, ask, converse, restore_always, running, snapshots_of, told_of
from tests.waiting import until


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen35", *(slow(name) for name in MODELS if name != "qwen35")])
async def test_state_goes_to_disk_and_back_over_any_transport(name: str, tmp_path: Path) -> None:
    """Saved over TCP, and used by two groups over TCP, by two that share memory, and by three over TCP."""
    spec = open_spec(MODELS[name])
    place, remote = Place(MODELS[name], tmp_path), Place(MODELS[name], tmp_path, transport="tcp")
    async with running(place.config(slots=0, on=False), tmp_path) as service:
        off = await converse(service, spec.vocabulary, 2)
    async with running(remote.config(), tmp_path) as service:
        cold = await converse(service, spec.vocabulary, 2)
        warm = await converse(service, spec.vocabulary, 2)
        await snapshots_of(service).save_all(60.0)
        assert told_of(service)["failed"] == 0
    assert off.answers == cold.answers == warm.answers
    for config in (remote.config(), place.config(), remote.config(3)):
        async with running(config, tmp_path) as service:
            restore_always(service)
            told = await converse(service, spec.vocabulary, 2)
            counts = told_of(service)
        assert told.answers == off.answers
        assert (counts["failed"], counts["restored"] >= 2) == (0, True)
        assert told.n_computed < sum(told.prompts) / 2


@pytest.mark.parametrize("tls", [False, True])
async def test_a_restarted_group_has_its_state_again(tls: bool, tmp_path: Path) -> None:
    """In an orderly restart, as one that shares memory: nothing is computed again, and no slot is lost."""
    config = Place(MODELS["qwen35"], tmp_path, transport="tcp").config(on=False)
    overrides = []
    if tls:
        secret = tmp_path / "secret"
        secret.write_text("0123456789abcdef" * 4)
        secret.chmod(0o600)
        cert, key = make_certificate(tmp_path)
        overrides += ["cluster.listen=127.0.0.1", f"cluster.secret_file={secret}"]
        overrides += [f"cluster.tls_cert_file={cert}", f"cluster.tls_key_file={key}"]
    async with running(config, tmp_path, overrides) as service:
        assert service.only.engine is not None
        expected, _ = await ask(service, PROMPT, [])
        for group in ("a", "b"):
            n_slots = service.only.engine.statistics().cache.n_slots
            await AdminOperations(service).restart_all([group], now=False)
            now = service.only.engine.statistics()
            assert (now.recovery.n_rebuilt, now.recovery.n_recomputed, now.cache.n_slots) == (0, 0, n_slots)
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens > 200) == (expected, True)


def kill_at(service: Service, monkeypatch: pytest.MonkeyPatch, what: str, group: str, n: int) -> list[int]:
    """Kill a daemon when the supervisor has read or written ``n`` chunks of a file for it; return what it killed."""
    real, pid, killed, seen = getattr(files.LocalFile, what), service.groups[group].pid, list[int](), [0]
    assert pid is not None

    def call(self: files.LocalFile, views: Sequence[memoryview], offset: int) -> Any:
        seen[0] += 1
        if seen[0] == n and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
        return real(self, views, offset)

    monkeypatch.setattr(files.LocalFile, what, call)
    return killed


async def test_a_daemon_killed_while_it_saves_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(MODELS["qwen35"], tmp_path, transport="tcp")
    async with running(place.config(), tmp_path) as service:
        await until(lambda: snapshots_of(service).store is not None)
        killed = kill_at(service, monkeypatch, "write", "b", 7)
        expected, _ = await ask(service, PROMPT, [])
        await until(lambda: killed and told_of(service)["failed"] > 0)
        await until(lambda: service.state == "ready")
        await until(lambda: len(place.files()) == told_of(service)["saved"])
        await until(lambda: not list(place.snapshots.glob("*.partial")))
        assert (await ask(service, PROMPT, []))[0] == expected
        await snapshots_of(service).save_all(60.0)
    assert place.files()
    async with running(Place(MODELS["qwen35"], tmp_path).config(), tmp_path) as service:
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens > 200) == (expected, True)


async def test_a_daemon_killed_while_it_restores_costs_the_prefix_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(MODELS["qwen35"], tmp_path, transport="tcp")
    async with running(place.config(), tmp_path) as service:
        expected, _ = await ask(service, PROMPT, [])
        await snapshots_of(service).save_all(60.0)
    before = place.files()
    async with running(place.config(), tmp_path) as service:
        await until(lambda: snapshots_of(service).store is not None)
        killed = kill_at(service, monkeypatch, "read", "b", 7)
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens, len(killed)) == (expected, 0, 1)
        assert told_of(service)["restored"] == 0
        assert set(before) <= set(place.files())
        answer, _ = await ask(service, [*PROMPT, *expected, 7], [])
        assert answer


@pytest.mark.parametrize(("what", "n"), [("write", 5), ("read", 5)])
async def test_a_supervisor_killed_while_its_daemons_save_or_restore_leaves_nothing_wrong(
    what: str, n: int, tmp_path: Path
) -> None:
    place = Place(MODELS["qwen35"], tmp_path, transport="tcp")
    expected: list[int] = []
    if what == "read":
        async with running(place.config(), tmp_path) as service:
            expected, _ = await ask(service, PROMPT, [])
            await snapshots_of(service).save_all(60.0)
    before = place.files()
    arguments = [str(place.config()), str(tmp_path), what, str(n)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.e2e.killed_supervisor", *arguments)
    assert await asyncio.wait_for(process.wait(), 200) == -signal.SIGKILL
    assert place.files() == before
    assert len(list(place.snapshots.glob("*.partial"))) == (what == "write")
    async with running(place.config(), tmp_path) as service:
        await until(lambda: snapshots_of(service).store is not None)
        assert not list(place.snapshots.glob("*.partial"))
        answer, finished = await ask(service, PROMPT, [])
        assert (finished.usage.cached_tokens > 200) == (what == "read")
        assert answer == (expected or answer)
        assert (await ask(service, PROMPT, []))[0] == answer


@pytest.mark.parametrize("what", ["write", "read"])
async def test_steps_go_on_while_a_disk_hangs(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(MODELS["qwen35"], tmp_path, transport="tcp")
    real, begun, held = getattr(files.LocalFile, what), threading.Event(), threading.Event()

    def call(self: files.LocalFile, views: Sequence[memoryview], offset: int) -> None:
        begun.set()
        assert held.wait(100)
        real(self, views, offset)

    if what == "read":
        async with running(place.config(), tmp_path) as service:
            await ask(service, PROMPT, [])
            await snapshots_of(service).save_all(60.0)
    async with running(place.config(), tmp_path) as service:
        await until(lambda: snapshots_of(service).store is not None)
        monkeypatch.setattr(files.LocalFile, what, call)
        asking = asyncio.create_task(ask(service, PROMPT, []))
        await until(begun.is_set)
        answer, _ = await asyncio.wait_for(ask(service, [9, 8, 7], [], 30), 50)
        assert len(answer) == 30
        held.set()
        _, finished = await asking
        await until(lambda: told_of(service)["saved" if what == "write" else "restored"] > 0)
        assert (finished.usage.cached_tokens > 200) == (what == "read")
