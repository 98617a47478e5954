"""`serve-config`: two files, of which Ray reads one and imports the other."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lucevisor.cli import cli

TEXT = '[model]\npath = "model.gguf"\n[groups.g]\nbackend = "cuda"\n[server]\nport = 9000\n'


def written(folder: Path, *arguments: str, text: str = TEXT) -> Result:
    (folder / "box.toml").write_text(text)
    return CliRunner().invoke(cli, ["serve-config", str(folder / "box.toml"), *arguments])


def test_the_files_name_what_runs_and_its_bounds(tmp_path: Path) -> None:
    into = tmp_path / "serve"
    overrides = ("--set", "engine.max_sequences=4", "--set", "server.port=7")
    done = written(tmp_path, "--directory", str(into), "--services", "1", "4", "--gpus", "2", *overrides)
    assert done.exit_code == 0, done.output
    file = json.loads((into / "serve.yaml").read_text().partition("\n")[2])
    assert file["http_options"] == {"host": "127.0.0.1", "port": 7}
    [application] = file["applications"]
    assert application["import_path"] == "lucevisor_serve:app"
    assert application["runtime_env"]["env_vars"] == {"PYTHONPATH": str(into)}
    arguments = application["args"]
    assert arguments["lucevisor"] == [sys.executable, "-P", "-m", "lucevisor"]
    assert (arguments["config"], arguments["overrides"]) == (str(tmp_path / "box.toml"), ["engine.max_sequences=4"])
    [deployment] = application["deployments"]
    assert deployment["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    assert deployment["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 2}
    module = ast.parse((into / "lucevisor_serve.py").read_text())
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    [init] = [node for node in classes[deployment["name"]].body if getattr(node, "name", "") == "__init__"]
    assert isinstance(init, ast.FunctionDef)
    assert [one.arg for one in init.args.args[1:]] == list(arguments)
    imported = {name.name for node in module.body if isinstance(node, ast.Import) for name in node.names}
    assert "lucevisor" not in imported


@pytest.mark.parametrize(
    ("arguments", "text", "why"),
    [
        (("--services", "3", "2"), TEXT, "the first is more than the second"),
        ((), TEXT.replace("port", "prot"), "nearest"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, arguments: tuple[str, ...], text: str, why: str) -> None:
    done = written(tmp_path, "--directory", str(tmp_path), *arguments, text=text)
    assert done.exit_code != 0
    assert why in done.output + str(done.exception)
    assert not (tmp_path / "serve.yaml").exists()
