"""What the limits of a scheduler leave to requests."""

from __future__ import annotations

import pytest

from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import limits


def test_a_step_has_room_for_a_chunk_and_all_decodes() -> None:
    with pytest.raises(ValueError, match="max_step_tokens is 67; 68 is the least"):
        limits(max_step_tokens=67)


def test_capacity_is_what_context_and_pages_allow() -> None:
    assert limits().capacity_tokens == 1024
    assert limits(pools=PoolSizes(3, 0, 4)).capacity_tokens == 192
    recurrent_only = limits(spaces=frozenset({Space.RECURRENT}), pools=PoolSizes(0, 0, 4))
    assert recurrent_only.capacity_tokens == 1024
