"""A model's file on a host that does not have it: what its layers need comes from the supervisor, once.

The "host" is a mount namespace in which the folder of the model is empty.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from daemons.weights.copies import RUN_PIECES, Journal
from lucevisor.app.model_files import open_models
from lucevisor.config import load
from lucevisor.deployment.service import Observer, Service
from lucevisor.model.gguf_files import open_model
from lucevisor.protocol import files
from tests.e2e.service import DEMO, generate, running, write_config
from tests.waiting import until

ENGINE = '[engine]\ndtype = "float32"\nprefill_chunk = 64\nmax_sequences = 2\npages = 50\n[draft]\nkind = "off"\n'
PROMPT = [random.Random(3).randrange(5, 500) for _ in range(60)]


def has_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("unshare") is not None and not subprocess.run(
        ["unshare", "-m", "true"], check=False, capture_output=True
    ).returncode  # fmt: skip


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="mount namespaces need root")


class Host:
    """Where group ``b`` runs: an interpreter that sees no model, or another one."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.models, self.others = directory, directory / "models", directory / "others"
        self.models.mkdir()
        self.others.mkdir()
        self.model, self.cache = self.models / "model.gguf", directory / "cache"
        shutil.copyfile(model, self.model)
        self.python = directory / "python"
        inner = f'mount --bind {self.others} {self.models} && exec {sys.executable} "$@"'
        self.python.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{inner}' sh \"$@\"\n")
        self.python.chmod(0o755)

    def config(self, split: str = "1.0,1.0", here: str = "shared_memory") -> tuple[Path, list[str]]:
        """Group ``a`` on this host, ``b`` there."""
        path = write_config(self.directory, self.model, {"a": 1, "b": 1}, ["0-1", "1-2"], ENGINE, here)
        overrides = [
            "groups.b.transport=tcp", f"groups.b.python={self.python}", f"cluster.cache_dir={self.cache}",
            f"placement.target_layer_split={split}",
        ]  # fmt: skip
        return path, overrides

    def journal(self, name: str = "journal") -> Journal:
        [path] = self.cache.glob(f"*/{name}")
        return msgspec.msgpack.decode(path.read_bytes(), type=Journal)

    @property
    def n_kept(self) -> int:
        return sum(map(len, self.journal().pieces))


class Sent:
    """What the supervisor read of the model for daemons, each chunk after ``delay_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0) -> None:
        self.chunks: list[tuple[int, int]] = []
        self.n_checked, self.delay_s, read, checksum = 0, delay_s, files.SourceFile.read, files.SourceFile.checksum

        def reading(source: files.SourceFile, views: Sequence[memoryview], offset: int) -> None:
            self.chunks.append((offset, sum(map(len, views))))
            time.sleep(self.delay_s)
            read(source, views, offset)

        def checking(source: files.SourceFile, offset: int, n_bytes: int) -> int:
            self.n_checked += n_bytes
            before = len(self.chunks)
            found = checksum(source, offset, n_bytes)
            del self.chunks[before:]
            return found

        monkeypatch.setattr(files.SourceFile, "read", reading)
        monkeypatch.setattr(files.SourceFile, "checksum", checking)

    @property
    def n_bytes(self) -> int:
        return sum(n for _, n in self.chunks)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the model says where all groups have it."""

    async def ask() -> list[int]:
        folder = tmp_path_factory.mktemp("plain")
        config = write_config(folder, DEMO, {"a": 1, "b": 1}, ["0-1", "1-2"], ENGINE)
        async with running(config, folder, ["placement.target_layer_split=1.0,1.0"]) as service:
            return await generate(service, PROMPT, 16)

    return asyncio.run(ask())


async def test_a_daemon_gets_what_its_layers_need_and_keeps_it(
    answer: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sent = Host(tmp_path, DEMO), Sent(monkeypatch)
    config, overrides = host.config()
    async with running(config, tmp_path, overrides) as service:
        assert await generate(service, PROMPT, 16) == answer
        [copy] = host.cache.glob("*/model.gguf")
        n_bytes, total = sent.n_bytes, host.model.stat().st_size
        assert 0 < n_bytes < 0.9 * total
        assert copy.stat().st_size == total
        assert copy.stat().st_blocks * 512 < 0.95 * total
        assert not list(host.models.parent.glob("others/*"))
    async with running(config, tmp_path, overrides) as service:  # a complete copy is used at once
        assert await generate(service, PROMPT, 16) == answer
        assert sent.n_bytes == n_bytes
    config, overrides = host.config("1.0,3.0")
    async with running(config, tmp_path, overrides) as service:  # more layers: only what is missing
        assert await generate(service, PROMPT, 16) == answer
        assert n_bytes < sent.n_bytes < total
        assert len(set(sent.chunks)) == len(sent.chunks)


async def test_a_copy_goes_on_where_a_killed_daemon_left_it(
    answer: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sent = Host(tmp_path, DEMO), Sent(monkeypatch, 0.3)
    loaded = load(*host.config())
    service = Service(loaded, open_models(loaded), tmp_path, Observer())
    try:
        await service.start()
        await until(lambda: bool(list(host.cache.glob("*/journal"))) and host.n_kept >= 4)
        os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
        n_kept, n_before, sent.delay_s = host.n_kept, len(sent.chunks), 0.0
        assert await service.wait_ready(100.0), service.reason()
        assert await generate(service, PROMPT, 16) == answer
    finally:
        await service.stop(0.0)
    n_again = len(sent.chunks) - n_before
    assert 0 < n_again <= host.n_kept - n_kept + RUN_PIECES  # what was on the way, and what was missing


async def test_a_file_of_the_hosts_own_is_compared_once_and_used_if_its_bytes_are_the_same(
    answer: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sent = Host(tmp_path, DEMO), Sent(monkeypatch)
    shutil.copyfile(host.model, host.others / "model.gguf")
    config, overrides = host.config()
    for n_checked in (sent.n_checked, 0):
        before = sent.n_checked
        async with running(config, tmp_path, overrides) as service:
            assert await generate(service, PROMPT, 16) == answer
        assert (sent.n_checked > before) == (n_checked == before == 0)
    assert sent.chunks == []
    assert not list(host.cache.glob("*/model.gguf"))


async def test_a_file_with_other_bytes_is_not_used(
    answer: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size and with the same header: another fine-tuning."""
    host, sent = Host(tmp_path, DEMO), Sent(monkeypatch)
    other = bytearray(host.model.read_bytes())
    opened = open_model([host.model])
    for tensor in opened.tensors.values():
        other[tensor.offset + 5] ^= 1
    (host.others / "model.gguf").write_bytes(other)
    config, overrides = host.config()
    async with running(config, tmp_path, overrides) as service:
        assert await generate(service, PROMPT, 16) == answer
    assert sent.n_bytes > 0
    assert list(host.cache.glob("*/model.gguf"))


async def test_two_groups_of_a_host_share_a_copy(
    answer: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sent = Host(tmp_path, DEMO), Sent(monkeypatch)
    config, overrides = host.config(here="tcp")
    async with running(config, tmp_path, [*overrides, f"groups.a.python={host.python}"]) as service:
        assert await generate(service, PROMPT, 16) == answer
        assert all(not group.reason or group.reason == "loaded" for group in service.groups.values())
    assert len(list(host.cache.glob("*/model.gguf"))) == 1
    assert len(set(sent.chunks)) == len(sent.chunks) == host.n_kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "cache").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path / "cache"], check=True)
    yield tmp_path / "cache"
    subprocess.run(["umount", "--lazy", tmp_path / "cache"], check=True)


async def test_a_disk_without_room_is_named(tmp_path: Path, small_disk: Path) -> None:
    host = Host(tmp_path, DEMO)
    assert host.cache == small_disk
    config, overrides = host.config()
    message = r"bytes of the model are to be kept there, and \d+ are free; free space there, or set cluster.cache_dir"
    with pytest.raises(AssertionError, match=message):
        async with running(config, tmp_path, [*overrides, "recovery.restart_limit=1/60s"]):
            pass


async def test_a_source_that_changes_while_it_is_sent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, DEMO)
    read, touched = files.SourceFile.read, [False]

    def reading(source: files.SourceFile, views: Sequence[memoryview], offset: int) -> None:
        if offset and not touched[0]:
            touched[0] = True
            os.utime(host.model)
        read(source, views, offset)

    monkeypatch.setattr(files.SourceFile, "read", reading)
    config, overrides = host.config()
    with pytest.raises(AssertionError, match="it was changed while it was sent"):
        async with running(config, tmp_path, [*overrides, "recovery.restart_limit=1/60s"]):
            pass
