"""``lucevisor cache``: the snapshots on disk, seen without a running supervisor.

Works on the directory of CONFIG's ``cache.dir`` or on ``--dir``; a supervisor that uses it may run meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from lucevisor.config import load
from lucevisor.config.strict import Refused, Size
from lucevisor.errors import ExitCode

_KIB = 1024


class _Bytes(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return Size().from_text(str(value))
        except Refused as refused:
            self.fail(f"{value} {refused.why}; {refused.hint}", param, ctx)


def _where(function: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG or ``--dir``, given on as ``directory`` and ``disk_bytes`` (None without a CONFIG)."""

    def located(config: Path | None, directory: Path | None, **more: Any) -> Any:
        disk_bytes = None
        if config is not None:
            cache = load(config, ()).cache
            disk_bytes = cache.disk
            if directory is None:
                if not cache.dir:
                    raise click.UsageError(f"{config} sets no cache.dir: set it, or give --dir")
                directory = Path(cache.dir)
        if directory is None:
            raise click.UsageError("name the directory: --config CONFIG, or --dir DIRECTORY")
        return function(directory=directory, disk_bytes=disk_bytes, **more)

    located.__name__, located.__doc__ = function.__name__, function.__doc__
    located.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    path = click.Path(path_type=Path)
    with_dir = click.option("--dir", "directory", type=path, help="The directory of snapshots.")(located)
    return click.option("--config", "-c", type=path, help="Configuration file whose cache.dir is meant.")(with_dir)


@click.group()
def cache() -> None:
    """List, verify, prune and remove snapshots on disk."""


@cache.command("ls")
@_where
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(directory: Path, disk_bytes: int | None, as_json: bool) -> int:
    """Show every snapshot, the last used first; reads headers only."""
    from lucevisor.memory.snapshot_tools import listing, total_bytes

    found = listing(directory)
    if as_json:
        click.echo(json.dumps([_facts(one) for one in found], indent=2))
        return ExitCode.DONE
    rows = [_row(one) for one in found]
    if rows:
        _print(["file", "state", "model", "tokens", "size", "kv", "last used"], rows)
    total = _size(total_bytes([one.use for one in found]))
    click.echo(f"{len(found)} files, {total}" + (f" of {_size(disk_bytes)}" if disk_bytes is not None else ""))
    return ExitCode.DONE


@cache.command()
@_where
@click.argument("files", nargs=-1)
@click.option("--set-aside", is_flag=True, help="Rename what is damaged, so that no supervisor tries it.")
def verify(directory: Path, disk_bytes: int | None, files: tuple[str, ...], set_aside: bool) -> int:
    """Compare every checksum of FILES, or of all snapshots.  Exit code 1 when one is damaged."""
    from lucevisor.memory import snapshot_tools as tools
    from lucevisor.memory.snapshots import FileKind

    found = [one.use.file for one in tools.listing(directory) if one.use.kind is FileKind.SNAPSHOT]
    for file in files:
        if file not in found:
            raise tools.CacheError(f"{file} is no snapshot in {directory}: `lucevisor cache ls` shows what is there")
    n_damaged = 0
    for file in files or found:
        problem = tools.verify(directory, file)
        n_damaged += bool(problem)
        click.echo(f"{file}: {problem or 'good'}")
        if problem and set_aside:
            click.echo(f"{file}: set aside as {tools.set_aside(directory, file)}")
    click.echo(f"{len(files or found)} checked, {n_damaged} damaged")
    return ExitCode.FAILED if n_damaged else ExitCode.DONE


@cache.command()
@_where
@click.option("--to", type=_Bytes(), help="Space that may stay in use, e.g. 5GiB.  Default: cache.disk of CONFIG.")
@click.option("--refused", is_flag=True, help="Remove files that were set aside as well.")
def prune(directory: Path, disk_bytes: int | None, to: int | None, refused: bool) -> int:
    """Remove leftovers, then the least recently used snapshots until the rest fits."""
    from lucevisor.memory import snapshot_tools as tools

    budget = to if to is not None else disk_bytes
    if budget is None:
        raise click.UsageError("say how much may stay: --to SIZE, or --config CONFIG for its cache.disk")
    _print_gone(tools.prune(directory, budget, refused=refused))
    return ExitCode.DONE


@cache.command()
@_where
@click.argument("files", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every file of lucevisor's in the directory.")
def rm(directory: Path, disk_bytes: int | None, files: tuple[str, ...], everything: bool) -> int:
    """Remove FILES.  Names that are not lucevisor's are refused."""
    from lucevisor.memory import snapshot_tools as tools

    if bool(files) == everything:
        raise click.UsageError("name FILES, or give --all")
    wanted: Sequence[str] = [one.use.file for one in tools.listing(directory)] if everything else files
    _print_gone(tools.remove(directory, wanted))
    return ExitCode.DONE


# ---- output


def _print_gone(gone: Sequence[Any]) -> None:
    for one in gone:
        click.echo(f"removed {one.file}, {_size(one.n_bytes)}")
    click.echo(f"{len(gone)} files removed, {_size(sum(one.n_bytes for one in gone))} free")


def _state(one: Any) -> str:
    return "damaged" if one.problem else str(one.use.kind.value)


def _facts(one: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "file": one.use.file,
        "state": _state(one),
        "n_bytes": one.use.n_bytes,
        "used_s": one.use.used_s,
        "problem": one.problem,
    }
    if one.snapshot is not None:
        s = one.snapshot
        facts |= {
            "model": s.model,
            "architecture": s.architecture,
            "fingerprint": s.fingerprint,
            "n_tokens": s.n_tokens,
            "dtype": s.dtype.value,
            "kv_dtype": s.kv_dtype.value,
            "created_s": s.created_s,
        }
    return facts


def _row(one: Any) -> list[str]:
    s = one.snapshot
    return [
        one.use.file,
        _state(one) + (f" ({one.problem})" if one.problem else ""),
        s.model if s else "",
        str(s.n_tokens) if s else "",
        _size(one.use.n_bytes),
        s.kv_dtype.value if s else "",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(one.use.used_s)),
    ]


def _print(header: list[str], rows: list[list[str]]) -> None:
    """Plain columns: a file name stays whole, so that it can be copied to ``rm``."""
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
