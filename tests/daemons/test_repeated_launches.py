"""When launches are captured, replayed, dropped and launched again.  What a GPU does: tests/gpu/test_cuda_graphs.py."""

import pytest
import torch

from daemons.cuda_graphs import MOST_LAUNCHES, RepeatedLaunches


class Work:
    """Counts how often it was launched."""

    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1


class Graph:
    """In place of CUDA's: replays by calling."""

    def __init__(self, work):
        self.replay = work


def run(launches, key, work):
    if not launches.replay(key):
        launches.launch(key, work)


@pytest.fixture
def captures(monkeypatch):
    """What was captured, in order."""
    found = []

    def captured(device, work, pool):
        assert pool is None
        found.append(work)
        return Graph(work), None

    monkeypatch.setattr("daemons.cuda_graphs.captured", captured)
    return found


def launches_of(device="cuda:0"):
    launches, warnings = RepeatedLaunches(torch.device(device), "states are made"), []
    launches.warn = warnings.append
    return launches, warnings


def test_the_second_time_is_captured_with_the_first_ones_arguments_and_then_replayed(captures):
    launches, warnings = launches_of()
    first, second = Work(), Work()
    run(launches, "a", first)
    for _ in range(3):
        run(launches, "a", second)
    assert captures == [first]  # which holds what is read
    assert (first.n, second.n, warnings) == (4, 0, [])


def test_the_least_recently_used_are_dropped(captures):
    launches, _ = launches_of()
    works = [Work() for _ in range(MOST_LAUNCHES + 1)]
    for key in (0, 0, 1, 1, *range(2, MOST_LAUNCHES), 0, MOST_LAUNCHES):
        run(launches, key, works[key])
    assert launches.replay(0)
    assert not launches.replay(1)
    run(launches, 1, works[1])
    assert len(captures) == 2, "it came once since"


def test_a_capture_that_fails_is_reported_once_and_the_work_is_done(monkeypatch):
    def refused(device, work, pool):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("daemons.cuda_graphs.captured", refused)
    launches, warnings = launches_of()
    works = Work(), Work()
    for key in (0, 0, 0, 1, 1, 1):
        run(launches, key, works[key])
    assert [work.n for work in works] == [3, 3]
    [warning] = warnings
    assert warning.startswith("states are made on cuda:0 without a graph, which is slower: capture failed: CUDA out of")
    assert "lower engine.pages" in warning


def test_a_cpu_keeps_nothing(captures):
    launches, _ = launches_of("cpu")
    work = Work()
    for _ in range(3):
        run(launches, "a", work)
    assert (work.n, captures, len(launches._kept)) == (3, [], 0)
