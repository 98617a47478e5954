"""The mistakes of docs/features.md on the command line: what is typed there is run, and must say what is written."""

from __future__ import annotations

import shlex

import click
import pytest
from click.testing import CliRunner

from lucevisor.cli import cli
from lucevisor.errors import LucevisorError
from tests.mistakes.page import ROOT, table

DEMO = ROOT / "etc" / "demo.toml"
ROWS = table("Mistakes on the command line")


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """The directory that the page describes: the demo's configuration, and files that are wrong."""
    place = tmp_path_factory.mktemp("box")
    (place / "box.toml").write_text(DEMO.read_text().replace('"demo/', f'"{DEMO.parent}/demo/'))
    (place / "cut.gguf").write_bytes((DEMO.parent / "demo/demo-qwen35-22m-q4_k_m.gguf").read_bytes()[:8_000_000])
    (place / "text.gguf").write_text("hello")
    (place / "typo.toml").write_text('[model]\npath = "x.gguf"\n[placment]\ntarget_devices = ["cpu:0"]\n')
    (place / "broken.toml").write_text("[model\n")
    (place / "double.toml").write_text('[model]\npath = "a"\npath = "b"\n')
    (place / "empty.toml").write_text("")
    (place / "empty.keys").write_text("\n")
    return place


def told(line: str) -> tuple[int, str]:
    """Exit code and words of a command, as lucevisor.cli.main makes them."""
    done = CliRunner().invoke(cli, shlex.split(line)[1:], standalone_mode=False)
    match done.exception:
        case click.ClickException() as error:
            return 2, error.format_message()
        case LucevisorError() as error:
            return int(error.exit_code), str(error)
        case None:
            return int(done.return_value or 0), done.output
        case error:
            raise error


@pytest.mark.parametrize(("number", "typed", "code", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_mistake(number, typed, code, words, box, monkeypatch):
    monkeypatch.chdir(box)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(box))
    found, text = told(typed)
    assert words in text
    assert found == int(code)
