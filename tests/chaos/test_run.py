"""What a run leaves behind."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from lucevisor.chaos.run import Chaos
from lucevisor.errors import LucevisorError, NotRunningError


def never(socket: Path, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    raise NotRunningError("no supervisor listens")


def test_a_run_that_fails_keeps_the_log_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config, said = tmp_path / "bad.toml", list[str]()
    config.write_text('[model]\npath = "away.gguf"\n')
    with pytest.raises(LucevisorError, match=r"(?s)did not start:.*groups: is missing"):
        Chaos(config, [], never, 1, said.append).run(1.0)
    [kept] = tmp_path.glob("lucevisor-chaos-*")
    assert "groups: is missing" in (kept / "output").read_text()
    assert str(kept) in said[-1]
