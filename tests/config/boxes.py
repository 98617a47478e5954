"""Small configurations, and the errors that loading one gives."""

from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.errors import ConfigError

SMALLEST = """
[model]
path = "m.gguf"
[groups.left]
backend = "cpu"
[groups.right]
backend = "cpu"
[placement]
target_devices = ["left:0", "right:0"]
"""
TWO_VENDORS = """
[model]
path = "m.gguf"
[groups.nv]
backend = "cuda"
[groups.amd]
backend = "hip"
[placement]
target_devices = ["cuda:0", "hip:0", "hip:1"]
target_layer_split = [0.08, 0.46, 0.46]
"""


def errors_of(path: Path, *overrides: str) -> list[ConfigError]:
    """Return the errors that loading raises; each message must name its origin and its key."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    for error in caught.value.errors:
        assert error.file in (str(path), "--set") or error.key == "--set"
        assert error.key in str(error)
        assert "\n" not in str(error)
    return list(caught.value.errors)


def error_of(path: Path, *overrides: str) -> ConfigError:
    """Return the only error that loading raises."""
    errors = errors_of(path, *overrides)
    assert len(errors) == 1, [str(error) for error in errors]
    return errors[0]
