"""How a supervisor runs, apart from its configuration, and the fault hooks, which a production start refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from lucevisor.config import Config
from lucevisor.errors import ConfigError
from lucevisor.protocol import fault_hooks
from lucevisor.supervision.policy import SupervisionLimits


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``to_terminal``: log to standard error, too.  ``take_over_s``: take over from a running supervisor of the same
    name, which then has so long to finish requests.  ``limits``: deadlines of supervision, None for the usual ones.
    """

    to_terminal: bool = True
    take_over_s: float | None = None
    limits: SupervisionLimits | None = None


def refuse_faults(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the fault hooks of processes would be on."""
    found = [(fault_hooks.VARIABLE, environ.get(fault_hooks.VARIABLE, ""))]
    for name, group in config.groups.items():
        found.append((f"groups.{name}.env.{fault_hooks.VARIABLE}", group.environment().get(fault_hooks.VARIABLE, "")))
    for key, value in found:
        if value:
            why = "switches on hooks by which the processes of this supervisor can be broken"
            raise ConfigError(key, value, why, "unset it; it is for `lucevisor chaos`")


def fault_limits(text: str) -> SupervisionLimits:
    """Return the limits that ``--allow-faults`` names, as ``NAME=SECONDS,...``.  Raises ConfigError."""
    known = {one.name for one in fields(SupervisionLimits) if one.name.endswith("_s")}
    found = {}
    for part in filter(None, text.split(",")):
        name, _, seconds = part.partition("=")
        try:
            found[name] = float(seconds)
        except ValueError:
            found[name] = -1.0
        if name not in known or not found[name] > 0:
            raise ConfigError("--allow-faults", part, "is not NAME=SECONDS of a deadline", f"names: {', '.join(known)}")
    return replace(SupervisionLimits(), **found)  # type: ignore[arg-type]
