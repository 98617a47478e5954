"""``lucevisor cache``: the snapshots on disk, of a running supervisor or of a directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from lucevisor.app.rundir import find_supervisor
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import target_options
from lucevisor.config import load, single_model
from lucevisor.config.formats import InvalidValue, size
from lucevisor.errors import ExitCode
from lucevisor.placement.formatting import format_bytes

_WAIT_S = 3600.0
"""Verifying every byte of a large directory takes long."""

JsonObject = dict[str, Any]
SnapshotTarget = Callable[[str, JsonObject], JsonObject]
"""Runs an operation (name, arguments) on the snapshots of a supervisor or of a directory."""


class _Bytes(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size(value)
        except InvalidValue as error:
            self.fail(f"{value} {error.why}; {error.hint}", param, ctx)


def _in_directory(directory: Path, disk_bytes: int | None, operation: str, arguments: JsonObject) -> JsonObject:
    """Run an operation as POST /cache/OPERATION does.  ``disk_bytes``: the budget from CONFIG, if given."""
    from lucevisor.snapshots import maintenance

    if operation == "ls":
        return {"dir": str(directory), "disk": disk_bytes, "slots": [], "files": maintenance.files(directory)}
    if operation == "verify":
        files = maintenance.to_verify(directory, arguments["files"])
        return {"checked": (maintenance.verify(directory, file, set_aside=arguments["set_aside"]) for file in files)}
    if operation == "rm":
        return {"removed": maintenance.remove(directory, arguments["files"], everything=arguments["all"])}
    budget = arguments["to"] if arguments["to"] is not None else disk_bytes
    if budget is None:
        raise click.UsageError("say how much to keep: --to SIZE, or --config CONFIG to use its cache.disk")
    return {"removed": maintenance.prune(directory, budget, refused=arguments["refused"])}


def _by_supervisor(client: AdminClient, operation: str, arguments: JsonObject) -> JsonObject:
    if operation == "ls":
        return client.call("GET", "/cache", timeout_s=_WAIT_S)
    return client.call("POST", f"/cache/{operation}", arguments, timeout_s=_WAIT_S)


def _with_target(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options CONFIG, ``--dir``, ``--name`` and ``--socket``, and pass the target that they name."""

    @wraps(function)
    def located(config: Path | None, directory: Path | None, name: str | None, socket: Path | None, **more: Any) -> Any:
        return function(target=_snapshot_target(config, directory, name, socket), **more)

    path = click.Path(path_type=Path)
    with_target = target_options(located)
    with_dir = click.option("--dir", "directory", type=path, help="A directory of snapshots.")(with_target)
    return click.option("--config", "-c", type=path, help="Configuration file that sets cache.dir.")(with_dir)


def _snapshot_target(
    config: Path | None, directory: Path | None, name: str | None, socket: Path | None
) -> SnapshotTarget:
    if config is None and directory is None:
        return partial(_by_supervisor, AdminClient(find_supervisor(name, socket).socket))
    if name is not None or socket is not None:
        raise click.UsageError(
            "--config and --dir name a directory, --name and --socket a supervisor: give one of them"
        )
    disk_bytes = None
    if config is not None:
        cache = single_model(load(config, ()), "cache --config").cache
        disk_bytes = cache.disk
        if directory is None:
            if not cache.dir:
                raise click.UsageError(f"{config} sets no cache.dir: set it, or give --dir")
            directory = Path(cache.dir)
    assert directory is not None
    return partial(_in_directory, directory, disk_bytes)


@click.group()
def cache() -> None:
    """List, verify, prune and remove snapshots on disk: of the running supervisor, or of a directory."""


@cache.command("ls")
@_with_target
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(target: SnapshotTarget, as_json: bool) -> int:
    """List every snapshot, most recently used first; reads headers only."""
    contents = target("ls", {})
    files, slots, disk_bytes = contents["files"], contents["slots"], contents["disk"]
    if as_json:
        click.echo(json.dumps(files, indent=2))
        return ExitCode.DONE
    if files:
        _print(["file", "state", "model", "tokens", "size", "kv", "last used"], [_row(entry) for entry in files])
    total = format_bytes(sum(entry["n_bytes"] for entry in files))
    if contents["dir"]:
        click.echo(
            f"{len(files)} files, {total}" + (f" of {format_bytes(disk_bytes)}" if disk_bytes is not None else "")
        )
    else:
        click.echo("no files: cache.dir is not in use")
    if slots:
        longest = max(entry["n_tokens"] for entry in slots)
        n_disk = sum(entry["origin"] == "disk" for entry in slots)
        click.echo(f"{len(slots)} prefix slots in memory, {n_disk} of them from disk, the longest has {longest} tokens")
    return ExitCode.DONE


@cache.command()
@_with_target
@click.argument("files", nargs=-1)
@click.option("--set-aside", is_flag=True, help="Rename what is damaged, so that no supervisor tries it.")
def verify(target: SnapshotTarget, files: tuple[str, ...], set_aside: bool) -> int:
    """Compare every checksum of FILES, or of all snapshots.  Exit code 1 when one is damaged."""
    n_checked = n_damaged = 0
    for entry in target("verify", {"files": files, "set_aside": set_aside})["checked"]:
        if entry.get("gone"):
            click.echo(f"{entry['file']}: removed meanwhile")
            continue
        n_checked += 1
        n_damaged += bool(entry["problem"])
        click.echo(f"{entry['file']}: {entry['problem'] or 'good'}")
        if entry["set_aside"]:
            click.echo(f"{entry['file']}: set aside as {entry['set_aside']}")
    click.echo(f"{n_checked} checked, {n_damaged} damaged")
    return ExitCode.FAILED if n_damaged else ExitCode.DONE


@cache.command()
@_with_target
@click.option("--to", type=_Bytes(), help="Space to keep in use, e.g. 5GiB.  Default: cache.disk.")
@click.option("--refused", is_flag=True, help="Remove files that were set aside as well.")
def prune(target: SnapshotTarget, to: int | None, refused: bool) -> int:
    """Remove leftovers, then the least recently used snapshots until the rest fits."""
    _print_gone(target("prune", {"to": to, "refused": refused})["removed"])
    return ExitCode.DONE


@cache.command()
@_with_target
@click.argument("files", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove every snapshot in the directory.")
def rm(target: SnapshotTarget, files: tuple[str, ...], everything: bool) -> int:
    """Remove FILES.  Files that are not snapshots are refused."""
    if bool(files) == everything:
        raise click.UsageError("name FILES, or give --all")
    _print_gone(target("rm", {"files": files, "all": everything})["removed"])
    return ExitCode.DONE


# ---- output


def _print_gone(removed: Sequence[JsonObject]) -> None:
    for entry in removed:
        click.echo(f"removed {entry['file']}, {format_bytes(entry['n_bytes'])}")
    click.echo(f"{len(removed)} files removed, {format_bytes(sum(entry['n_bytes'] for entry in removed))} free")


def _row(entry: JsonObject) -> list[str]:
    return [
        entry["file"],
        entry["state"] + (f" ({entry['problem']})" if entry["problem"] else ""),
        entry.get("model", ""),
        str(entry.get("n_tokens", "")),
        format_bytes(entry["n_bytes"]),
        entry.get("kv_dtype", ""),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["used_s"])),
    ]


def _print(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
