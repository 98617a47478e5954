"""A changed configuration for a running service: what may change, and how state goes to the next deployment.

The next deployment loads its weights beside the one that serves; where both do not fit, after it.  All state goes from
the daemons of the one to those of the other through host memory, while nothing is planned.
Invariant: until the engine has left the earlier deployment a failure changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from lucevisor.config import Config, changed_keys
from lucevisor.config.checks import OVERRIDE
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.state_memory import Kept, StateMemory, export_state, import_state
from lucevisor.engine.core import Engine
from lucevisor.errors import ConfigError, ConfigErrors, LucevisorError
from lucevisor.model.spec import ModelSpec

FREEZE_S: Final = 15.0
"""How long steps in flight may take until the state moves."""

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
        given = {override.partition("=")[0] for override in after.overrides}
        files = {key: OVERRIDE if key in given else str(after.file) for key in fixed}
        raise ConfigErrors([ConfigError(key, values[key], why, hint, file=files[key]) for key in fixed])
    return values


def _value(tree: Mapping[str, Any], key: str) -> object:
    table, _, rest = key.partition(".")
    return _value(tree.get(table, {}), rest) if rest else tree.get(table)


async def take_state(engine: Engine, earlier: Deployment, spec: ModelSpec) -> StateMemory:
    """Bring requests to rest, and copy all state of the daemons to host memory.

    Raises LucevisorError, after which requests go on.
    """
    assert earlier.placement is not None
    assert earlier.transfers is not None
    try:
        frozen = await engine.freezer.freeze(FREEZE_S, "reload")
        while frozen is None and engine.ready:  # a daemon was lost, and came back
            frozen = await engine.freezer.freeze(FREEZE_S, "reload")
        if frozen is None:
            raise LucevisorError("requests did not come to rest; try again")
        groups = {stage.group for stage in earlier.placement.stages}
        drafter = earlier.draft_layers(groups)
        return await export_state(spec.layers, earlier.placement, earlier.transfers, frozen, groups, drafter)
    except BaseException:
        go_on(engine, earlier)
        raise


def go_on(engine: Engine, earlier: Deployment) -> None:
    """Resume requests where they stopped."""
    if earlier.transfers is not None:
        earlier.transfers.resume()
    engine.freezer.thaw()


async def give_state(memory: StateMemory, later: Deployment) -> Kept:
    """Copy state to the daemons of a deployment, which are all READY; return what they have.  Raises LucevisorError."""
    assert later.placement is not None
    assert later.transfers is not None
    links = dict(later.links)
    groups = {stage.group for stage in later.placement.stages}
    await import_state(memory, later.transfers, groups)
    if later.links != links:
        raise LucevisorError("a new daemon was lost while the state moved; try again")
    return Kept(links.values(), memory.with_draft and later.draft_group in groups)
