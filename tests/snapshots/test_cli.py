"""`lucevisor cache` on a directory, without a supervisor; with one: tests/e2e/test_cache_admin.py."""

import json
import os

import click
import pytest
import structlog
from click.testing import CliRunner

from lucevisor.cli import cli
from lucevisor.errors import ConfigError, ExitCode, LucevisorError, NotRunningError
from lucevisor.snapshots.maintenance import check_directory
from tests.snapshots.snapshot_parts import made_model, made_slot, made_store, names, rewritten, save


def run(*args):
    """(exit code, output).  Errors come as the exceptions that main() prints."""
    result = CliRunner().invoke(cli, ["cache", *map(str, args)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


@pytest.fixture
def two(tmp_path):
    """A directory with snapshots of two models, the first one older, and a stranger."""
    entries = []
    for i, digits in enumerate(("ab", "cd")):
        store = made_store(tmp_path, made_model(f"Made {i}B", digits))
        entries.append(save(store, made_slot(40 + i)))
        os.utime(tmp_path / entries[-1].file, (1000 + i, 1000 + i))
        store.close()
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path, entries


def test_ls(two):
    directory, (old, new) = two
    code, output = run("ls", "--dir", directory)
    lines = output.splitlines()
    assert code == ExitCode.DONE
    assert [line.split()[0] for line in lines[1:3]] == [new.file, old.file]
    assert "Made 1B" in lines[1]
    assert lines[-1].startswith("2 files, 18.0 KiB")
    assert "notes" not in output
    code, output = run("ls", "--dir", directory, "--json")
    found = json.loads(output)
    assert found[1]["n_tokens"] == 40
    assert found[1]["fingerprint"] == "ab" * 32


def test_without_a_directory_a_supervisor_is_asked(short_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    for command in (["ls"], ["verify"], ["prune"], ["rm", "--all"]):
        with pytest.raises(NotRunningError, match="no supervisor runs"):
            run(*command)
    with pytest.raises(NotRunningError, match="no such socket"):
        run("ls", "--socket", short_path / "none")


def test_verify(two):
    directory, (old, new) = two
    code, output = run("verify", "--dir", directory)
    assert (code, output.splitlines()[-1]) == (ExitCode.DONE, "2 checked, 0 damaged")
    with open(directory / old.file, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    code, output = run("verify", "--dir", directory)
    assert code == ExitCode.FAILED
    assert f"{new.file}: good" in output
    assert f"{old.file}: tensor layers.2.v: checksum is" in output
    assert run("verify", "--dir", directory, new.file)[0] == ExitCode.DONE
    assert names(directory) == sorted([new.file, old.file, "notes.txt"])
    run("verify", "--dir", directory, "--set-aside")
    assert names(directory) == sorted([new.file, old.file + ".refused", "notes.txt"])
    with pytest.raises(LucevisorError, match="is not a snapshot in"):
        run("verify", "--dir", directory, "notes.txt")


def test_snapshots_of_an_earlier_version_are_reported_and_left_alone(two):
    directory, (old, new) = two
    data = (directory / old.file).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    (directory / old.file).write_bytes(rewritten(data[:start], format_version="1") + data[start:])
    assert "made by an earlier version of lucevisor" in run("ls", "--dir", directory)[1]
    code, output = run("verify", "--dir", directory, "--set-aside")
    assert code == ExitCode.FAILED
    assert f"{old.file}: format_version: is 1: made by an earlier version" in output
    store = made_store(directory, made_model("Made 0B", "ab"))
    assert store.scan() == []
    assert store.statistics.failures == {"older": 1}
    store.close()
    with structlog.testing.capture_logs() as logs:  # under the name of another model, as one of that version has
        store = made_store(directory, made_model("Made 0B", "ef"))
        assert store.scan() == []
        store.close()
    assert [line["n"] for line in logs if line["event"] == "snapshots of an earlier version are not used"] == [1]
    assert names(directory) == sorted([old.file, new.file, "notes.txt"])


def test_prune(two):
    directory, (old, new) = two
    code, output = run("prune", "--dir", directory, "--to", "10KiB")
    assert (code, output.splitlines()[0].split()[:2]) == (ExitCode.DONE, ["removed", old.file + ","])
    assert names(directory) == sorted([new.file, "notes.txt"])
    (directory / (old.file + ".refused")).write_bytes(b"x")
    run("prune", "--dir", directory, "--to", "10KiB")
    assert old.file + ".refused" in names(directory)
    run("prune", "--dir", directory, "--to", "10KiB", "--refused")
    assert names(directory) == sorted([new.file, "notes.txt"])
    with pytest.raises(click.UsageError, match="say how much to keep"):
        run("prune", "--dir", directory)
    with pytest.raises(click.BadParameter, match="is not a size"):
        run("prune", "--dir", directory, "--to", "many")


def test_rm(two):
    directory, (old, new) = two
    for bad, text in (("notes.txt", "not lucevisor's to remove"), (old.file.replace("ab", "ef"), "is not in")):
        with pytest.raises(LucevisorError, match=text):
            run("rm", "--dir", directory, old.file, bad)
    assert len(names(directory)) == 3
    run("rm", "--dir", directory, old.file, old.file)
    assert names(directory) == sorted([new.file, "notes.txt"])
    with pytest.raises(click.UsageError, match="or give --all"):
        run("rm", "--dir", directory)
    run("rm", "--dir", directory, "--all")
    assert names(directory) == ["notes.txt"]


def test_a_file_that_is_being_written_is_left_alone(tmp_path):
    store = made_store(tmp_path)
    writing = store.begin(made_slot())
    assert "partial" in run("ls", "--dir", tmp_path)[1]
    run("prune", "--dir", tmp_path, "--to", "0")
    with pytest.raises(LucevisorError, match="is being written"):
        run("rm", "--dir", tmp_path, "--all")
    assert names(tmp_path) == [writing.path.name]
    store.abort(writing, "end")
    store.close()


def test_a_directory_is_checked_before_it_is_used(tmp_path):
    check_directory(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("x")
    for bad in ("file", "file/inside"):
        with pytest.raises(ConfigError, match=r"cache\.dir = .*file.*name a writable directory"):
            check_directory(tmp_path / bad)
