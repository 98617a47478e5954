"""``lucevisor cluster``: what daemons on other hosts need."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from lucevisor.errors import ConfigError, ExitCode


@click.group()
def cluster() -> None:
    """Prepare daemons on other hosts."""


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
