"""What is kept of a start for the status."""

from __future__ import annotations

from lucevisor.app.status import LoadProgress
from lucevisor.protocol.messages import Progress
from lucevisor.supervision.states import State


def test_the_bytes_of_all_shards_while_a_group_loads_and_none_after():
    kept = LoadProgress()
    assert kept.loading("left") is None
    assert kept.state_s("left") == 0.0
    kept.state("left", State.LOADING, "")
    kept.progress("left", Progress(stage=0, device=0, done_bytes=10, total_bytes=10, phase="warm up"))
    kept.progress("left", Progress(stage=0, device=1, done_bytes=2, total_bytes=20, phase="read"))
    kept.progress("left", Progress(stage=0, device=1, done_bytes=5, total_bytes=20, phase="convert"))
    assert kept.loading("left") == {"phase": "convert", "done_bytes": 15, "total_bytes": 30}
    assert kept.loading("right") is None
    kept.state("left", State.READY, "")
    assert kept.loading("left") is None
    kept.progress("left", Progress(stage=0, device=1, done_bytes=20, total_bytes=20, phase="warm up"))
    assert kept.loading("left") is None, "a report that came late"
    assert kept.state_s("left") >= 0.0
