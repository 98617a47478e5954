"""Fixtures of the configuration tests."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path):
    """A function that writes a configuration and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "box.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
