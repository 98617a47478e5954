"""Exceptions: exit codes and one-line messages."""

import pytest

from lucevisor.errors import (
    NO_VALUE,
    ConfigError,
    ConfigErrors,
    ExitCode,
    LucevisorError,
    NotReadyError,
    NotRunningError,
)


def test_exit_codes_are_the_promised_ones():
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4]
    codes = {
        kind: int(kind.exit_code)
        for kind in (LucevisorError, ConfigError, ConfigErrors, NotRunningError, NotReadyError)
    }
    assert codes == {LucevisorError: 1, ConfigError: 2, ConfigErrors: 2, NotRunningError: 3, NotReadyError: 4}


def test_message_says_where_what_and_what_to_do():
    error = ConfigError("server.port", 70000, "is not in 0..65535", "nearest: 65535", file="box.toml")
    assert str(error) == "box.toml: server.port = 70000: is not in 0..65535; nearest: 65535"
    assert str(ConfigError("model.path", NO_VALUE, "is missing")) == "model.path: is missing"
    assert str(ConfigError("", NO_VALUE, "is not TOML", file="x.toml")) == "x.toml: is not TOML"


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "‮", "\x00", "\ud800"])
def test_a_message_is_one_printable_line(value):
    text = str(ConfigError(value, value, f"is {value}", f"not {value}", file=value))
    assert text.isprintable()
    assert text.encode("utf-8")


def test_a_value_nested_too_deep_can_be_shown():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert str(ConfigError("k", deep, "is odd")) == "k = a list: is odd"
