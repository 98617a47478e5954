"""``lucevisor cache``: the snapshots in a directory, whether or not a supervisor uses it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from lucevisor.app.rundir import find_supervisor
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import target_options
from lucevisor.config import load, single_model
from lucevisor.config.formats import InvalidValue, size
from lucevisor.errors import AdminError, ExitCode, LucevisorError
from lucevisor.placement.formatting import format_bytes, in_columns

JsonObject = dict[str, Any]
_HEADINGS = ("file", "state", "model", "tokens", "size", "kv", "last used")


class _Bytes(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size(value)
        except InvalidValue as error:
            self.fail(f"{value} {error.why}; {error.hint}", param, ctx)


def _with_directory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options ``--config``, ``--dir``, ``--name`` and ``--socket``, and pass the directory that they name, and
    the bytes that may be in use there, if that is known."""

    @wraps(function)
    def located(config: Path | None, folder: Path | None, name: str | None, socket: Path | None, **more: Any) -> Any:
        disk_bytes: int | None = None
        if name is not None or socket is not None or (config is None and folder is None):
            if config is not None or folder is not None:
                what = "--config and --dir name a directory, --name and --socket a supervisor"
                raise click.UsageError(f"{what}: give one of them")
            folder, disk_bytes = _of_supervisor(name, socket)
        elif config is not None:
            loaded = load(config, ())  # replicas have one directory
            cache = (loaded if loaded.replicas else single_model(loaded, "cache --config")).cache
            disk_bytes = cache.disk
            if folder is None and not cache.dir:
                raise click.UsageError(f"{config} sets no cache.dir: set it, or give --dir")
            folder = folder or Path(cache.dir)
        return function(directory=folder, disk_bytes=disk_bytes, **more)

    path = click.Path(path_type=Path)
    with_target = target_options(located)
    with_dir = click.option("--dir", "folder", type=path, help="A directory of snapshots.")(with_target)
    return click.option("--config", "-c", type=path, help="Configuration file that sets cache.dir.")(with_dir)


def _of_supervisor(name: str | None, socket: Path | None) -> tuple[Path, int]:
    status = AdminClient(find_supervisor(name, socket).socket).call("GET", "/status")
    names = dict.fromkeys(model["name"] for model in status["models"])
    if len(names) > 1:
        what = f"this supervisor serves several models ({', '.join(names)})"
        raise AdminError(f"{what}: use --dir DIR, a directory for each model")
    caches = [part["cache"] for part in (status, *status["models"]) if "cache" in part]
    cache = next((each for each in caches if each["dir"]), None)  # of any replica
    if cache is None:
        raise LucevisorError("snapshots are off, or not open yet: set cache.dir, or ask again when the model is ready")
    return Path(cache["dir"]), cache["disk_max_bytes"]


@click.group()
def cache() -> None:
    """List, verify, prune and remove snapshots on disk: of the running supervisor, or of a directory."""


@cache.command("ls")
@_with_directory
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(directory: Path, disk_bytes: int | None, as_json: bool) -> int:
    """List every snapshot, most recently used first; reads headers only."""
    from lucevisor.snapshots import maintenance

    files = maintenance.files(directory)
    if as_json:
        click.echo(json.dumps(files, indent=2))
        return ExitCode.DONE
    if files:
        click.echo(in_columns([_HEADINGS, *map(_row, files)]))
    total = format_bytes(sum(entry["n_bytes"] for entry in files))
    click.echo(f"{len(files)} files, {total}" + (f" of {format_bytes(disk_bytes)}" if disk_bytes is not None else ""))
    return ExitCode.DONE


@cache.command()
@_with_directory
@click.argument("files", nargs=-1)
@click.option("--set-aside", is_flag=True, help="Rename what is damaged, so that no supervisor tries it.")
def verify(directory: Path, disk_bytes: int | None, files: tuple[str, ...], set_aside: bool) -> int:
    """Compare every checksum of FILES, or of all snapshots.  Exit code 1 when one is damaged."""
    from lucevisor.snapshots import maintenance

    n_checked = n_damaged = 0
    for file in maintenance.to_verify(directory, files):
        entry = maintenance.verify(directory, file, set_aside=set_aside)
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
@_with_directory
@click.option("--to", type=_Bytes(), help="Space to keep in use, e.g. 5GiB.  Default: cache.disk.")
@click.option("--refused", is_flag=True, help="Remove files that were set aside as well.")
def prune(directory: Path, disk_bytes: int | None, to: int | None, refused: bool) -> int:
    """Remove leftovers, then the least recently used snapshots until the rest fits."""
    from lucevisor.snapshots import maintenance

    budget = disk_bytes if to is None else to
    if budget is None:
        raise click.UsageError("say how much to keep: --to SIZE, or --config CONFIG to use its cache.disk")
    _print_gone(maintenance.prune(directory, budget, refused=refused))
    return ExitCode.DONE


@cache.command()
@_with_directory
@click.argument("files", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove every snapshot in the directory.")
def rm(directory: Path, disk_bytes: int | None, files: tuple[str, ...], everything: bool) -> int:
    """Remove FILES.  Files that are not snapshots are refused."""
    from lucevisor.snapshots import maintenance

    if bool(files) == everything:
        raise click.UsageError("name FILES, or give --all")
    _print_gone(maintenance.remove(directory, files, everything=everything))
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
