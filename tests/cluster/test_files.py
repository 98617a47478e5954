"""Files of the supervisor on another host: a model that is not there, and state that outlives its daemons."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lucevisor.protocol import files
from tests.cluster.hosts import hosts, needs_namespaces
from tests.e2e.service import MODELS, PROMPT, ask, running, snapshots_of, told_of, write_config
from tests.waiting import until

pytestmark = needs_namespaces

EXTRA = '[engine]\ndtype = "float32"\nprefill_chunk = 64\npages = 60\n[draft]\nkind = "off"\n'
CACHE = '[cache]\nmin_tokens = 8\nprefix_slots = 20\nstates = "device"\ndir = "{}"\n'


@pytest.mark.slow
async def test_a_cable_that_is_cut_while_state_is_restored_costs_the_prefix_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosts("attic", folder=tmp_path, prefix="fil", subnet="10.211.9") as made:
        text = f'[model]\npath = "{MODELS["demo"]}"\n{made.config(["here", "attic"])}'
        text += '[placement]\ntarget_devices = ["here:0", "attic:0"]\ntarget_layer_split = ["0-4", "4-8"]\n'
        config = tmp_path / "box.toml"
        config.write_text(text + EXTRA + CACHE.format(tmp_path / "snapshots"))
        async with running(config, tmp_path) as service:
            expected, _ = await ask(service, PROMPT, [])
            await snapshots_of(service).save_all(60.0)
        begun, read = threading.Event(), files.LocalFile.read

        def slow_read(file: files.LocalFile, views: Sequence[memoryview], offset: int) -> None:
            begun.set()
            time.sleep(0.5)
            read(file, views, offset)

        async with running(config, tmp_path) as service:
            await until(lambda: snapshots_of(service).store is not None)
            monkeypatch.setattr(files.LocalFile, "read", slow_read)
            asking = asyncio.create_task(ask(service, PROMPT, []))
            await until(begun.is_set)
            made.cut("attic")
            await until(lambda: service.state != "ready")
            monkeypatch.setattr(files.LocalFile, "read", read)
            made.cut("attic", cut=False)
            answer, finished = await asking
            assert (answer, finished.usage.cached_tokens) == (expected, 0)


async def test_a_host_without_the_model_gets_its_part_and_its_state_outlives_it(tmp_path: Path) -> None:
    models, empty, cache = tmp_path / "models", tmp_path / "empty", tmp_path / "cache"
    models.mkdir()
    empty.mkdir()
    model = models / "model.gguf"
    shutil.copyfile(MODELS["demo"], model)
    async with running(write_config(tmp_path, model, {"a": 1}, ["0-8"], EXTRA), tmp_path) as service:
        expected, _ = await ask(service, PROMPT, [])
    python = tmp_path / "python"  # of a host where the folder of the model is empty
    inner = f'mount --bind {empty} {models} && exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{inner}' sh \"$@\"\n")
    python.chmod(0o755)
    with hosts("attic", folder=tmp_path, prefix="fil", subnet="10.211.9") as made:
        text = f'[model]\npath = "{model}"\n{made.config(["here", "attic"], tls=True)}cache_dir = "{cache}"\n'
        head = f'host = "attic"\npython = "{sys.executable}"'
        assert head in text
        text = text.replace(head, f'host = "attic"\npython = "{python}"')
        text += '[placement]\ntarget_devices = ["here:0", "attic:0"]\ntarget_layer_split = ["0-4", "4-8"]\n'
        config = tmp_path / "box.toml"
        config.write_text(text + EXTRA + CACHE.format(tmp_path / "snapshots"))
        async with running(config, tmp_path) as service:
            assert (await ask(service, PROMPT, []))[0] == expected
            await snapshots_of(service).save_all(60.0)
            assert told_of(service)["saved"] > 0
        [copy] = cache.glob("*/model.gguf")
        assert copy.stat().st_blocks * 512 < copy.stat().st_size == model.stat().st_size
        async with running(config, tmp_path) as service:
            answer, finished = await ask(service, PROMPT, [])
            assert (answer, finished.usage.cached_tokens > 200) == (expected, True)
            assert (told_of(service)["restored"], told_of(service)["failed"]) == (1, 0)
