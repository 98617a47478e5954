"""Options shared by several commands."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class RangeOfNumbers(click.FloatRange):
    """A number in a range; nan, which compares with nothing, is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


SECONDS = RangeOfNumbers(0, 86_400)


class OutputFile(click.ParamType[Path]):
    """A file that can be written: refused before the work whose result it is to hold."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.is_dir():
            self.fail(f"{path} is a directory: name a file in it", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no directory {path.parent}: create it", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{path} cannot be written by user {os.geteuid()}: name another file", param, ctx)
        return path


def config_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG and ``--set K=V``."""
    function = click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key, e.g. server.port=0."
    )(function)
    return click.argument("config", type=click.Path(path_type=Path))(function)


def target_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--name`` and ``--socket``: select a running supervisor."""
    function = click.option("--socket", type=click.Path(path_type=Path), help="Admin socket of the supervisor.")(
        function
    )
    return click.option("--name", help="Name of the supervisor (default: the only one running).")(function)


def python_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--python``: further interpreters for a model that has no configuration file."""
    what = "An interpreter whose torch sees devices, besides this one and the environments beside it; may be repeated."
    return click.option("--python", "pythons", metavar="PATH", multiple=True, help=what)(function)
