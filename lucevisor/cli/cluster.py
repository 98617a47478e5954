"""``lucevisor cluster``: what daemons on other hosts need."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from lucevisor.errors import ConfigError, ExitCode, LucevisorError

_RAY_PORT = 6379
_OBJECT_STORE_BYTES = 100_000_000  # through Ray pass the source of daemons and their output only


@click.group()
def cluster() -> None:
    """Prepare daemons on other hosts: the secret of all, and Ray as the launcher."""


@cluster.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def secret(file: Path) -> int:
    """Write a new secret to FILE, for cluster.secret_file; every host needs a copy at the same path."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        hint = "remove it first, if no host uses it any more"
        raise ConfigError("FILE", str(file), "exists, and is not overwritten", hint) from None
    except OSError as error:
        raise ConfigError("FILE", str(file), f"cannot be written: {error.strerror}", "name another file") from None
    with os.fdopen(fd, "w") as opened:
        opened.write(f"{secrets.token_hex(32)}\n")
    click.echo(
        f"{file} has a new secret. Copy it to every host of the cluster, with mode 0600: scp -p {file} HOST:{file}"
    )
    return ExitCode.DONE


def _of_node(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.argument("ray_options", nargs=-1, type=click.UNPROCESSED)(function)
    function = click.option(
        "--resource",
        "resources",
        metavar="NAME=AMOUNT",
        multiple=True,
        help="What this host has for groups to ask for, e.g. amd=1.",
    )(function)
    return click.option("--address", help="Address of this host that the others reach.")(function)


@cluster.command(context_settings={"ignore_unknown_options": True})
@_of_node
@click.option("--port", type=click.IntRange(1, 65535), default=_RAY_PORT, show_default=True, help="Port of the head.")
def start(address: str | None, resources: tuple[str, ...], port: int, ray_options: tuple[str, ...]) -> int:
    """Start Ray's head on this host. RAY_OPTIONS go to `ray start`."""
    options = ["--head", f"--port={port}", "--include-dashboard=false"]
    return _ray_start(options, address, resources, ray_options)


@cluster.command(context_settings={"ignore_unknown_options": True})
@click.argument("head", metavar="HEAD:PORT")
@_of_node
def join(head: str, address: str | None, resources: tuple[str, ...], ray_options: tuple[str, ...]) -> int:
    """Add this host to the Ray cluster whose head is at HEAD:PORT. RAY_OPTIONS go to `ray start`."""
    options = [f"--address={head if ':' in head else f'{head}:{_RAY_PORT}'}"]
    return _ray_start(options, address, resources, ray_options)


@cluster.command()
@click.option("--address", default="auto", show_default=True, help="HEAD:PORT of the Ray cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(address: str, as_json: bool) -> int:
    """Show the nodes of a Ray cluster, their addresses, what groups can ask of them, and the groups that run there."""
    from lucevisor.cluster.ray_nodes import RayError, alive_nodes, connect, describe_resources, running_commands

    try:
        ray = connect(address)
    except RayError as error:
        raise LucevisorError(str(error)) from error
    running = running_commands(ray)
    nodes = [(node, running.get(node.id, [])) for node in alive_nodes(ray)]
    if as_json:
        rows = [
            {
                "address": node.address,
                "name": node.names[0],
                "resources": dict(node.asked_for),
                "groups": [asdict(group) for group in groups],
            }
            for node, groups in nodes
        ]
        click.echo(json.dumps(rows, indent=2))
        return ExitCode.DONE
    for node, groups in nodes:
        what = ", ".join(
            f"{group.name} (pid {group.pid}, of {group.started_by_pid} on {group.started_by_host})" for group in groups
        )
        click.echo(f"{node.address}  {node.names[0]}  {describe_resources(node.asked_for)}  {what or 'no groups'}")
    return ExitCode.DONE


def _ray_start(options: list[str], address: str | None, resources: tuple[str, ...], more: tuple[str, ...]) -> int:
    from lucevisor.cluster.ray_nodes import ray_environment

    if find_spec("ray") is None:
        raise LucevisorError(f"Ray is missing in the environment of {sys.executable}: `pip install 'lucevisor[ray]'`")
    options += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    if address is not None:
        options.append(f"--node-ip-address={address}")
    amounts = _amounts(resources)
    for name, option in (("CPU", "--num-cpus"), ("GPU", "--num-gpus")):  # Ray refuses these among the others
        if name in amounts:
            options.append(f"{option}={amounts.pop(name):g}")
    if amounts:
        options.append(f"--resources={json.dumps(amounts)}")
    command = [str(Path(sys.executable).with_name("ray")), "start", *options, *more]
    env = ray_environment()
    click.echo(shlex.join([*(f"{name}={value}" for name, value in env.items()), *command]))
    done = subprocess.run(command, env=os.environ | env, check=False)
    return ExitCode.DONE if done.returncode == 0 else ExitCode.FAILED


def _amounts(resources: tuple[str, ...]) -> dict[str, float]:
    from lucevisor.cluster.ray_nodes import Place, RayError

    if not resources:
        return {}
    text = ",".join(resources)
    try:
        place = Place.parse(text)
    except RayError as error:
        raise click.UsageError(f"--resource {text}: {error}") from None
    if place.host:
        raise click.UsageError(f"--resource {place.host}: write NAME=AMOUNT, such as amd=1")
    return dict(place.resources)
