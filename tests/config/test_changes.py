"""Which keys differ between two configurations."""

from __future__ import annotations

from lucevisor.config import changed_keys, load
from tests.config.boxes import SMALLEST

TWO = """
[model]
path = "m.gguf"
[groups.{0}]
backend = "cpu"
[groups.{1}]
backend = "cpu"
[placement]
target_devices = ["{0}:0", "{1}:0"]
"""


def test_equal_configurations_differ_in_nothing(file) -> None:
    assert changed_keys(load(file(SMALLEST)), load(file(SMALLEST))) == []


def test_keys_of_sections_and_groups_are_named(file) -> None:
    before = load(file(TWO.format("left", "right")))
    after = load(file(TWO.format("left", "right")), ["log.level=debug", "groups.left.threads=2", "server.port=0"])
    assert changed_keys(before, after) == ["server.port", "log.level", "groups.left.threads"]


def test_a_group_that_comes_or_goes_is_one_change(file) -> None:
    before, after = load(file(TWO.format("a", "b"))), load(file(TWO.format("a", "c")))
    assert changed_keys(before, after) == ["placement.target_devices", "groups.b", "groups.c"]
