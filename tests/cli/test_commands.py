"""Names, help, completion and exit codes of the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lucevisor.app.rundir import boot_id, default_name, start_ticks
from lucevisor.cli import COMMANDS, EXAMPLES, EXIT_CODES, cli
from lucevisor.cli.admin_client import AdminClient
from lucevisor.config import load, read_secret
from lucevisor.errors import ConfigError, ExitCode, NotRunningError

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


def test_a_command_like_no_other():
    assert "did you mean" not in CliRunner().invoke(cli, ["frobnicate"]).output


@pytest.mark.parametrize("typed", [["chaos", "--minutes", "nan"], ["chat", "--temperature", "nan"]])
def test_nan_is_in_no_range(typed):
    done = CliRunner().invoke(cli, typed)
    assert (done.exit_code, "'nan' is not a number" in done.output) == (ExitCode.USAGE, True)


def test_a_file_whose_stem_is_no_name_asks_for_one():
    assert default_name(Path("etc/box.toml")) == "box"
    with pytest.raises(ConfigError, match="is not given, and the file's stem 'my bóx' is not a usable name; give one"):
        default_name(Path("etc/my bóx.toml"))


def test_a_supervisor_whose_socket_was_removed_is_not_gone(short_path):
    (short_path / "pid").write_text(f"{os.getpid()} {boot_id()} {start_ticks(os.getpid())}\n")
    client = AdminClient(short_path / "admin.sock")
    with pytest.raises(
        NotRunningError, match=f"was removed, but the supervisor still runs: `kill {os.getpid()}` stops it"
    ):
        client.call("GET", "/status")
    (short_path / "pid").unlink()
    with pytest.raises(NotRunningError, match="the supervisor is gone"):
        client.call("GET", "/status")


def test_init_without_a_model_prints_a_configuration_that_works_anywhere(tmp_path):
    printed = CliRunner().invoke(cli, ["init"]).output
    (tmp_path / "box.toml").write_text(printed)
    config = load(tmp_path / "box.toml")
    assert Path(config.model.path).is_file()
    assert config.notices == ()
    refused = CliRunner().invoke(cli, ["init", "--python", "python3"])
    assert (refused.exit_code, "is for a configuration of MODEL" in refused.output) == (ExitCode.USAGE, True)


def test_exit_codes_are_told_in_the_help_and_in_the_page():
    assert EXIT_CODES.split(":")[0] in CliRunner().invoke(cli, ["--help"]).output
    told = {int(code) for code in re.findall(r"^\| (\d) \|", PAGE.read_text(), re.MULTILINE)}
    assert told == set(ExitCode) == {int(code) for code in re.findall(r"\d", EXIT_CODES)}


def test_completion_as_the_page_says():
    env = os.environ | {"_LUCEVISOR_COMPLETE": "bash_complete", "COMP_WORDS": "lucevisor st", "COMP_CWORD": "1"}
    script = "import sys; sys.argv = ['lucevisor']; from lucevisor.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True, check=False)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == ["start", "stop", "status"]


DEMO = str(Path(__file__).parents[2] / "etc" / "demo.toml")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["bench", DEMO, "-n", "1"], "a speed needs two tokens at least"),
        (["bench", DEMO, "-s", "0"], "'0' is not a list of numbers >= 1, such as 1,8"),
        (["bench", DEMO, "-d", "1,,2"], "'1,,2' is not a list of numbers >= 0"),
        (["bench", DEMO, "--against-args", "'-t 2"], "No closing quotation"),
        (["bench", DEMO, "--tune", "-p", "0", "-n", "0", "--json", "x.json"], "--json: nothing to write"),
        (["bench", DEMO, "--json", "no/such/out.json"], "no/such/out.json: there is no directory no/such: create it"),
        (["logits", DEMO, "--ids", DEMO, "--out", "/"], "/ is a directory: name a file in it"),
        (["logits", DEMO, "--ids", DEMO, "--out", "x.npz"], "demo.toml: not a JSON list of token ids"),
        (["logits", DEMO, "--ids", "/dev/null", "--out", "x.npz"], "/dev/null: not a JSON list of token ids"),
        (["demo", "--max-tokens", "0"], "--max-tokens"),
        (["status", "box"], "argument (box); use --name to choose a supervisor"),
        (["stop", "box"], "argument (box); use --name to choose a supervisor"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(command, says):
    done = CliRunner().invoke(cli, command)
    assert (done.exit_code, says in done.output) == (ExitCode.USAGE, True), done.output


def test_chaos_refuses_a_wrong_configuration_as_start_does():
    with pytest.raises(ConfigError, match="no section nope"):
        CliRunner().invoke(cli, ["chaos", "--set", "nope.x=1"], standalone_mode=False, catch_exceptions=False)


def lucevisor(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    """Run the command as a shell does, with the interpreter's own buffers."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "lucevisor", *arguments]
    return subprocess.run(command, env=env, stdout=stdout, stderr=stderr, text=True, check=False)


PRINTING = [["--help"], ["plan", DEMO, "--no-probe"]]


@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_a_full_disk_behind_the_output_is_told_in_a_line(command):
    with Path("/dev/full").open("w") as full:
        done = lucevisor(*command, stdout=full)
    assert (done.returncode, done.stderr) == (ExitCode.FAILED, "lucevisor: No space left on device\n")


@pytest.mark.parametrize("command", PRINTING[:1], ids=" ".join)
def test_a_reader_that_has_left_ends_a_command_without_a_word(command):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = lucevisor(*command, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.FAILED, "")


def test_an_error_that_cannot_be_written_keeps_its_exit_code():
    with Path("/dev/full").open("w") as full:
        assert lucevisor("nope", stderr=full).returncode == ExitCode.USAGE
        assert lucevisor("plan", "no/such.toml", stderr=full).returncode == ExitCode.USAGE


def test_status_and_stop_import_neither_the_supervisor_nor_its_libraries():
    code = "import sys, lucevisor.cli.operate; print({'aiohttp', 'msgspec', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_secret_is_written_once_for_its_owner_only(tmp_path):
    file = tmp_path / "secret"
    done = CliRunner().invoke(cli, ["cluster", "secret", str(file)])
    assert done.exit_code == ExitCode.DONE, done.output
    assert (file.stat().st_mode & 0o777, len(read_secret(file))) == (0o600, 64)
    written = file.read_bytes()
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        CliRunner().invoke(cli, ["cluster", "secret", str(file)], catch_exceptions=False)
    assert file.read_bytes() == written
