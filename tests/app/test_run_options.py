"""The switch of fault hooks: a production start refuses it."""

from __future__ import annotations

import pytest

from lucevisor.app.run import fault_limits, refuse_faults
from lucevisor.config import load
from lucevisor.errors import ConfigError
from tests.e2e.process import DEMO


@pytest.mark.parametrize(
    ("environ", "overrides", "key"),
    [
        ({"LUCEVISOR_FAULTS": "/tmp/x"}, [], "LUCEVISOR_FAULTS"),
        ({}, ["groups.left.env.LUCEVISOR_FAULTS=/tmp/x"], "groups.left.env.LUCEVISOR_FAULTS"),
    ],
)
def test_hooks_are_refused(environ, overrides, key):
    with pytest.raises(ConfigError, match="lucevisor chaos") as refused:
        refuse_faults(load(DEMO, overrides), environ)
    assert refused.value.key == key


def test_without_them_nothing_is_refused():
    refuse_faults(load(DEMO), {"LUCEVISOR_FAULTS": ""})


def test_deadlines():
    limits = fault_limits("heartbeat_s=0.5,step_s=3")
    assert (limits.heartbeat_s, limits.step_s, limits.reap_s) == (0.5, 3.0, 10.0)
    assert fault_limits("").heartbeat_s == 10.0


@pytest.mark.parametrize("text", ["heartbeat_s", "heartbeat_s=soon", "heartbeat_s=0", "n_restarts=3", "x_s=1"])
def test_something_else_is_refused(text):
    with pytest.raises(ConfigError, match="--allow-faults"):
        fault_limits(text)
