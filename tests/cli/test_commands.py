"""Names, help, completion and exit codes of the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lucevisor.cli import COMMANDS, EXAMPLES, EXIT_CODES, cli
from lucevisor.errors import ExitCode

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_of_options_that_exist(name):
    done = CliRunner().invoke(cli, [name, "--help"])
    assert done.exit_code == 0
    assert "Examples:" in done.output
    command = cli.get_command(None, name)
    known = {
        option for one in [command, *getattr(command, "commands", {}).values()] for p in one.params for option in p.opts
    }
    for line in EXAMPLES[name]:
        assert f"\n    {line}\n" in done.output
        used = re.findall(r"(?<= )-{1,2}[a-z]+", line)
        assert set(used) <= known, line


@pytest.mark.parametrize(("typed", "meant"), [("statsu", "status"), ("star", "start"), ("log", "logs"), ("tpo", "top")])
def test_the_nearest_command_is_named(typed, meant):
    done = CliRunner().invoke(cli, [typed])
    assert done.exit_code == ExitCode.USAGE
    assert f"there is no command '{typed}'; did you mean '{meant}'?" in done.output


def test_a_command_like_no_other_and_the_nearest_option():
    assert "did you mean" not in CliRunner().invoke(cli, ["frobnicate"]).output
    done = CliRunner().invoke(cli, ["status", "--jsno"])
    assert (done.exit_code, "--json" in done.output) == (ExitCode.USAGE, True)


def test_exit_codes_are_told_in_the_help_and_in_the_page():
    assert EXIT_CODES.split(":")[0] in CliRunner().invoke(cli, ["--help"]).output
    told = {int(code) for code in re.findall(r"^\| (\d) \|", PAGE.read_text(), re.MULTILINE)}
    assert told == set(ExitCode) == {int(code) for code in re.findall(r"\d", EXIT_CODES)}


def test_completion_as_the_page_says():
    env = os.environ | {"_LUCEVISOR_COMPLETE": "bash_complete", "COMP_WORDS": "lucevisor st", "COMP_CWORD": "1"}
    script = "import sys; sys.argv = ['lucevisor']; from lucevisor.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True, check=False)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == ["start", "stop", "status"]
