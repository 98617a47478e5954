"""A service that saves snapshots, and the directories it lives in."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lucevisor.deployment.service import Service
from lucevisor.snapshots.manager import SnapshotManager
from tests.e2e.service import write_config

MIN_TOKENS = 8
CONFIG = """
[engine]
dtype = "float32"
prefill_chunk = 64
max_sequences = 4
pages = {pages}
[cache]
min_tokens = {min_tokens}
prefix_slots = {slots}
states = "{states}"
dir = "{directory}"
[draft]
kind = "off"  # tests count the tokens that are computed
"""
SPLITS = {1: "1", 2: "0.5,0.5", 3: "0.08,0.46,0.46"}
PROMPT = [random.Random(3).randrange(5, 500) for _ in range(300)]


class Place:
    """Where a test's snapshots are, and how its services are configured."""

    def __init__(self, model: Path, directory: Path, states: str = "device") -> None:
        self.model, self.directory, self.states = model, directory, states
        self.snapshots = directory / "snapshots"

    def config(self, n_groups: int = 2, *, slots: int = 2000, pages: int = 1200, on: bool = True) -> Path:
        groups = dict.fromkeys("abc"[:n_groups], 1)
        where = self.snapshots if on else ""
        extra = CONFIG.format(slots=slots, pages=pages, directory=where, min_tokens=MIN_TOKENS, states=self.states)
        path = write_config(self.directory, self.model, groups, ["0-1"] * n_groups, extra)
        text = path.read_text().replace(str(["0-1"] * n_groups).replace("'", '"'), f"[{SPLITS[n_groups]}]")
        path.write_text(text)
        return path

    def files(self) -> list[Path]:
        return sorted(self.snapshots.glob("*.safetensors"))


def snapshots_of(service: Service) -> SnapshotManager:
    assert service.snapshots is not None
    return service.snapshots


def told_of(service: Service) -> Counter[str]:
    """What the store counted."""
    now = snapshots_of(service).store.statistics
    return Counter(saved=now.n_saved, restored=now.n_restored, failed=sum(now.failures.values()))


async def until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not reached():  # noqa: ASYNC110 - files and counters have no event
            await asyncio.sleep(0.02)
