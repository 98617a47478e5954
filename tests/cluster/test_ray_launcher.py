"""`cluster.launcher = "ray"`: what is refused, and how a daemon is started with it.  Needs no Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lucevisor.cli import cli, cluster
from lucevisor.config import checks, load
from lucevisor.errors import ExitCode
from lucevisor.supervision.launcher import launch_command
from tests.config.boxes import SMALLEST, error_of


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A function that writes a configuration whose right group is at a place of a Ray cluster."""

    def write(host: str, *, installed: bool = True, more: str = "") -> Path:
        monkeypatch.setattr(checks, "find_spec", lambda _: object() if installed else None)
        secret = tmp_path / "secret"
        secret.write_text("0123456789abcdef" * 4)
        secret.chmod(0o600)
        text = SMALLEST.replace("[groups.right]\n", f'[groups.right]\nhost = "{host}"\npython = "/opt/env/python"\n')
        cluster = f'[cluster]\nlauncher = "ray"\nlisten = "127.0.0.1"\nsecret_file = "{secret}"\n{more}'
        path = tmp_path / "box.toml"
        path.write_text(text + cluster)
        return path

    return write


def test_the_launcher_needs_ray(box):
    error = error_of(box("10.0.0.2", installed=False))
    assert (error.key, error.why) == ("cluster.launcher", "needs the package ray, which is not installed here")
    assert error.hint == f"{sys.executable} -m pip install 'lucevisor[ray]'"


@pytest.mark.parametrize("host", ["attic,cellar", "GPU=0", "GPU="])
def test_a_host_that_is_no_place_of_a_ray_cluster(box, host):
    error = error_of(box(host))
    assert (error.key, error.value) == ("groups.right.host", host)
    assert error.hint.startswith("write ")


def test_options_of_the_other_launcher_are_unused(box):
    notices = {notice.key: notice.why for notice in load(box("10.0.0.2", more='ssh = ["ssh"]')).notices}
    assert "cluster.launcher is ray" in notices["cluster.ssh"]


@pytest.mark.parametrize("resource", ["amd", "amd=0", "amd=x", "10.0.0.2"])
def test_a_resource_without_an_amount_is_refused(resource, monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda _: object())
    done = CliRunner().invoke(cli, ["cluster", "join", "10.0.0.1", "--resource", resource])
    assert done.exit_code == ExitCode.USAGE
    assert f"--resource {resource}: " in done.output
    assert "write NAME=AMOUNT, such as " in done.output


def test_nodes_are_started_by_ray_only(monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda _: None)
    done = CliRunner().invoke(cli, ["cluster", "start"])
    assert "pip install 'lucevisor[ray]'" in str(done.exception)


def test_a_daemon_is_started_by_ray(box):
    config = load(box("10.0.0.2,GPU=1", more='ray_address = "10.0.0.1:6379"'))
    command = launch_command(config.cluster, config.groups["right"])
    options = ["--address=10.0.0.1:6379", "--host=10.0.0.2,GPU=1", "--name=right", "--"]
    assert command[:7] == [sys.executable, "-m", "lucevisor.cluster.ray_exec", *options]
    assert command[7] == "/opt/env/python"
