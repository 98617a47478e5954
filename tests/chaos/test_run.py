"""What a run leaves behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from lucevisor.chaos.run import Chaos
from lucevisor.errors import LucevisorError


def test_a_run_that_fails_keeps_the_log_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = tmp_path / "bad.toml"
    config.write_text('[model]\npath = "away.gguf"\n')
    with pytest.raises(LucevisorError, match=r"(?s)did not start:.*groups: is missing"):
        Chaos(config, [], 1).run(1.0)
    [kept] = tmp_path.glob("lucevisor-chaos-*")
    assert "groups: is missing" in (kept / "output").read_text()
    assert str(kept) in capsys.readouterr().err
