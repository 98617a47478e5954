"""File systems that are soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a file system of so many KiB; skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(n_kib: int) -> Path:
        directory = tmp_path / f"disk{len(mounted)}"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={n_kib}k,mode=0700", "tmpfs", str(directory)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
