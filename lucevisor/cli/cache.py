"""``lucevisor cache``: the snapshots on disk, of a running supervisor or of a directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from lucevisor.app.rundir import find
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import target_options
from lucevisor.config import load
from lucevisor.config.formats import InvalidValue, size
from lucevisor.errors import ExitCode

_KIB = 1024
_WAIT_S = 3600.0
"""Verifying every byte of a large directory takes long."""

JsonObject = dict[str, Any]


class _Bytes(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size(value)
        except InvalidValue as error:
            self.fail(f"{value} {error.why}; {error.hint}", param, ctx)


class _Directory:
    """``disk_bytes``: the budget from CONFIG, if given."""

    def __init__(self, directory: Path, disk_bytes: int | None) -> None:
        from lucevisor.snapshots import maintenance

        self._maintenance, self._directory, self._disk_bytes = maintenance, directory, disk_bytes

    def show(self) -> JsonObject:
        files = self._maintenance.files(self._directory)
        return {"dir": str(self._directory), "disk": self._disk_bytes, "slots": [], "files": files}

    def verify(self, files: Sequence[str], *, set_aside: bool) -> Iterator[JsonObject]:
        for file in self._maintenance.to_verify(self._directory, files):
            yield self._maintenance.verify(self._directory, file, set_aside=set_aside)

    def prune(self, to: int | None, *, refused: bool) -> list[JsonObject]:
        budget = to if to is not None else self._disk_bytes
        if budget is None:
            raise click.UsageError("say how much to keep: --to SIZE, or --config CONFIG to use its cache.disk")
        return self._maintenance.prune(self._directory, budget, refused=refused)

    def remove(self, files: Sequence[str], *, everything: bool) -> list[JsonObject]:
        return self._maintenance.remove(self._directory, files, everything=everything)


class _Supervisor:
    def __init__(self, socket: Path) -> None:
        self._client = AdminClient(socket)

    def show(self) -> JsonObject:
        return self._client.call("GET", "/cache", timeout_s=_WAIT_S)

    def verify(self, files: Sequence[str], *, set_aside: bool) -> Iterator[JsonObject]:
        yield from self._post("verify", {"files": list(files), "set_aside": set_aside})["checked"]

    def prune(self, to: int | None, *, refused: bool) -> list[JsonObject]:
        return list(self._post("prune", {"to": to, "refused": refused})["removed"])

    def remove(self, files: Sequence[str], *, everything: bool) -> list[JsonObject]:
        return list(self._post("rm", {"files": list(files), "all": everything})["removed"])

    def _post(self, operation: str, order: JsonObject) -> JsonObject:
        return self._client.call("POST", f"/cache/{operation}", order, timeout_s=_WAIT_S)


def _where(function: Callable[..., Any]) -> Callable[..., Any]:
    """Resolve CONFIG, ``--dir``, ``--name`` or ``--socket`` into ``place``."""

    def located(config: Path | None, directory: Path | None, name: str | None, socket: Path | None, **more: Any) -> Any:
        return function(place=_place(config, directory, name, socket), **more)

    located.__name__, located.__doc__ = function.__name__, function.__doc__
    located.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    path = click.Path(path_type=Path)
    with_target = target_options(located)
    with_dir = click.option("--dir", "directory", type=path, help="A directory of snapshots.")(with_target)
    return click.option("--config", "-c", type=path, help="Configuration file that sets cache.dir.")(with_dir)


def _place(
    config: Path | None, directory: Path | None, name: str | None, socket: Path | None
) -> _Directory | _Supervisor:
    if config is None and directory is None:
        return _Supervisor(find(name, socket).socket)
    if name is not None or socket is not None:
        raise click.UsageError(
            "--config and --dir name a directory, --name and --socket a supervisor: give one of them"
        )
    disk_bytes = None
    if config is not None:
        cache = load(config, ()).cache
        disk_bytes = cache.disk
        if directory is None:
            if not cache.dir:
                raise click.UsageError(f"{config} sets no cache.dir: set it, or give --dir")
            directory = Path(cache.dir)
    assert directory is not None
    return _Directory(directory, disk_bytes)


@click.group()
def cache() -> None:
    """List, verify, prune and remove snapshots on disk: of the running supervisor, or of a directory."""


@cache.command("ls")
@_where
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(place: _Directory | _Supervisor, as_json: bool) -> int:
    """List every snapshot, most recently used first; reads headers only."""
    contents = place.show()
    files, slots, disk_bytes = contents["files"], contents["slots"], contents["disk"]
    if as_json:
        click.echo(json.dumps(files, indent=2))
        return ExitCode.DONE
    if files:
        _print(["file", "state", "model", "tokens", "size", "kv", "last used"], [_row(entry) for entry in files])
    total = _size(sum(entry["n_bytes"] for entry in files))
    if contents["dir"]:
        click.echo(f"{len(files)} files, {total}" + (f" of {_size(disk_bytes)}" if disk_bytes is not None else ""))
    else:
        click.echo("no files: cache.dir is not in use")
    if slots:
        longest = max(entry["n_tokens"] for entry in slots)
        n_disk = sum(entry["origin"] == "disk" for entry in slots)
        click.echo(f"{len(slots)} prefix slots in memory, {n_disk} of them from disk, the longest has {longest} tokens")
    return ExitCode.DONE


@cache.command()
@_where
@click.argument("files", nargs=-1)
@click.option("--set-aside", is_flag=True, help="Rename what is damaged, so that no supervisor tries it.")
def verify(place: _Directory | _Supervisor, files: tuple[str, ...], set_aside: bool) -> int:
    """Compare every checksum of FILES, or of all snapshots.  Exit code 1 when one is damaged."""
    n_checked = n_damaged = 0
    for entry in place.verify(files, set_aside=set_aside):
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
@_where
@click.option("--to", type=_Bytes(), help="Space to keep in use, e.g. 5GiB.  Default: cache.disk.")
@click.option("--refused", is_flag=True, help="Remove files that were set aside as well.")
def prune(place: _Directory | _Supervisor, to: int | None, refused: bool) -> int:
    """Remove leftovers, then the least recently used snapshots until the rest fits."""
    _print_gone(place.prune(to, refused=refused))
    return ExitCode.DONE


@cache.command()
@_where
@click.argument("files", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Remove every snapshot in the directory.")
def rm(place: _Directory | _Supervisor, files: tuple[str, ...], everything: bool) -> int:
    """Remove FILES.  Files that are not snapshots are refused."""
    if bool(files) == everything:
        raise click.UsageError("name FILES, or give --all")
    _print_gone(place.remove(files, everything=everything))
    return ExitCode.DONE


# ---- output


def _print_gone(gone: Sequence[JsonObject]) -> None:
    for entry in gone:
        click.echo(f"removed {entry['file']}, {_size(entry['n_bytes'])}")
    click.echo(f"{len(gone)} files removed, {_size(sum(entry['n_bytes'] for entry in gone))} free")


def _row(entry: JsonObject) -> list[str]:
    return [
        entry["file"],
        entry["state"] + (f" ({entry['problem']})" if entry["problem"] else ""),
        entry.get("model", ""),
        str(entry.get("n_tokens", "")),
        _size(entry["n_bytes"]),
        entry.get("kv_dtype", ""),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["used_s"])),
    ]


def _print(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _size(n_bytes: int) -> str:
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIB or unit == "GiB":
            break
        value /= _KIB
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
