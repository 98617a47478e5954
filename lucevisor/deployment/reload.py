"""A changed configuration for a running service: what may change, and how state goes to the next deployment.

The next deployment loads its weights beside the one that serves.  Then nothing is planned, all state goes from the
daemons of the one to those of the other through host memory, and requests go on there.
Invariant: until the engine has left the earlier deployment a failure changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from lucevisor.config import Config, changed_keys
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.state_memory import export_state, import_state
from lucevisor.engine.core import Engine
from lucevisor.errors import ConfigError, ConfigErrors, LucevisorError
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.asyncio_link import Link

FREEZE_S: Final = 15.0
"""How long steps on their way may take until the state moves."""

RELOADED: Final = ("placement.", "groups.", "draft.device", "recovery.journal", "recovery.spares",
                   "recovery.restart_limit")  # fmt: skip
"""Keys that a later deployment may have otherwise, and tables of which all keys may."""
READ_LATER: Final = frozenset({"server.drain_s"})
"""Keys that are read when they are needed."""


def values_of(before: Config, after: Config, at_once: Collection[str]) -> dict[str, object]:
    """Return the keys that differ, with their values in ``after`` (None: not there any more).  ``at_once``: those that
    need no other daemons.

    Raises ConfigErrors naming those that can only change with another start.
    """
    changed = changed_keys(before, after)
    values = {key: _value(after.as_dict(), key) for key in changed}
    why, hint = "cannot change while the supervisor runs", "leave it as it was, or `lucevisor stop`, then `start`"
    fixed = [key for key in changed if key not in at_once and not key.startswith(RELOADED)]
    if fixed:
        raise ConfigErrors([ConfigError(key, values[key], why, hint, file=str(after.file)) for key in fixed])
    return values


def _value(tree: Mapping[str, Any], key: str) -> object:
    table, _, rest = key.partition(".")
    return _value(tree.get(table, {}), rest) if rest else tree.get(table)


async def move_state(engine: Engine, earlier: Deployment, later: Deployment, spec: ModelSpec) -> Collection[Link]:
    """Bring requests to rest, and copy all state from the daemons of ``earlier`` to those of ``later``, which are all
    READY; return the links of these.

    Raises LucevisorError, after which requests go on where they were.
    """
    assert earlier.placement is not None
    assert later.placement is not None
    assert earlier.transfers is not None
    assert later.transfers is not None
    try:
        frozen = await engine.freeze(FREEZE_S, "reload")
        if frozen is None:
            raise LucevisorError("requests did not come to rest; try again")
        groups = {stage.group for stage in earlier.placement.stages}
        memory = await export_state(spec.layers, earlier.placement, earlier.transfers, frozen, groups)
        links = dict(later.links)
        await import_state(memory, later.transfers, {stage.group for stage in later.placement.stages})
        if later.links != links:
            raise LucevisorError("a new daemon was lost while the state moved; try again")
    except BaseException:
        earlier.transfers.resume()
        engine.thaw()
        raise
    return links.values()
