"""Limits under which some request could wait for ever are refused, by name."""

from __future__ import annotations

import pytest

from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import ALL_SPACES, limits


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"max_context": 1}, "max_context is 1"),
        ({"max_step_tokens": 67}, "max_step_tokens is 67.* = 68"),
        ({"spaces": frozenset()}, "spaces is empty"),
        ({"pools": PoolSizes(0, 0, 4)}, "full_pages is 0"),
        ({"pools": PoolSizes(16, 0, 3)}, "states is 3"),
        ({"pools": PoolSizes(16, 0, 9, 6)}, "states is 9, 6 of them in host memory; max_sequences = 4"),
        ({"pools": PoolSizes(16, 0, 4, -1)}, "host_states is -1"),
        ({"pools": PoolSizes(16, 0, 4, draft_states=-1)}, "draft_states is -1"),
        ({"window_tokens": 64}, "window_tokens is 64"),
        ({"spaces": ALL_SPACES}, "window_tokens is None"),
        ({"spaces": ALL_SPACES, "window_tokens": 0}, "window_tokens is 0"),
        (
            {"spaces": ALL_SPACES, "window_tokens": 64, "pools": PoolSizes(16, 2, 4)},
            "window_pages is 2; one sequence needs 3",
        ),
    ],
)
def test_what_cannot_work_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        limits(**changes)


def test_capacity_is_what_context_and_pages_allow() -> None:
    assert limits().capacity_tokens == 1024
    assert limits(pools=PoolSizes(3, 0, 4)).capacity_tokens == 192
    recurrent_only = limits(spaces=frozenset({Space.RECURRENT}), pools=PoolSizes(0, 0, 4))
    assert recurrent_only.capacity_tokens == 1024
