"""Where daemons and supervisor share the cores, the output stage's daemon has some of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lucevisor.config import Config, load
from lucevisor.deployment import affinity, group_settings
from lucevisor.deployment.group_settings import CorePlan, core_plan, with_cores
from tests.e2e.process import ROOT

TWO = '[groups.left]\nbackend = "cpu"\nthreads = 1\n[groups.right]\nbackend = "cpu"\nthreads = 1\n'


def config_of(tmp_path: Path, groups: str = TWO, devices: str = '"left:0", "right:0"') -> Config:
    text = f'[model]\npath = "{ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"}"\n{groups}'
    (tmp_path / "config.toml").write_text(f"{text}[placement]\ntarget_devices = [{devices}]\n")
    return load(tmp_path / "config.toml", [])


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    usable = [4, 7]
    monkeypatch.setattr(group_settings, "usable_cores", lambda: usable)
    return usable


def test_the_supervisor_keeps_off_the_core_of_the_output_stage(tmp_path: Path, cores: list[int]) -> None:
    config = config_of(tmp_path)
    assert core_plan(config) == CorePlan((4,), {"left": (4, 7), "right": (7,)})
    assert {name: group.cores for name, group in with_cores(config).items()} == {"left": (4, 7), "right": (7,)}
    assert not any(group.cores for group in config.groups.values())  # what is configured is as it was
    other_way = config_of(tmp_path, devices='"right:0", "left:0"')
    assert core_plan(other_way) == CorePlan((4,), {"left": (7,), "right": (4, 7)})


def test_all_threads_of_the_output_stage_have_a_core(tmp_path: Path, cores: list[int]) -> None:
    cores[:] = [0, 1, 2]
    config = config_of(
        tmp_path,
        TWO.replace('[groups.right]\nbackend = "cpu"\nthreads = 1', '[groups.right]\nbackend = "cpu"\nthreads = 2'),
    )
    assert core_plan(config) == CorePlan((0,), {"left": (0, 1, 2), "right": (1, 2)})


@pytest.mark.parametrize(
    ("usable", "groups", "devices"),
    [
        ([0, 1, 2], TWO, '"left:0", "right:0"'),  # the supervisor has a core
        ([0], TWO, '"left:0", "right:0"'),  # not even all threads have one
        ([0, 1], TWO[: len(TWO) // 2], '"left:0"'),  # one stage: nobody else computes
        ([0, 1], TWO.replace("threads = 1", "threads = 2"), '"left:0", "right:0"'),
        ([0, 1], TWO + "cores = [0]\n", '"left:0", "right:0"'),  # somebody else decided
        ([0, 1], TWO.replace("cpu", "cuda", 1).replace("threads = 1\n", "", 1), '"left:0", "right:0"'),
    ],
)
def test_else_nothing_is_pinned(usable: list[int], groups: str, devices: str, tmp_path: Path, cores: list[int]) -> None:
    cores[:] = usable
    config = config_of(tmp_path, groups, devices)
    assert core_plan(config) == CorePlan((), {})
    assert with_cores(config) == config.groups


@pytest.fixture
def own_thread() -> Iterator[list[BaseException]]:
    """What a thread that changes its own cores raised."""
    failures: list[BaseException] = []
    yield failures
    assert not affinity._all_cores
    if failures:
        raise failures[0]


def test_cores_that_a_thread_is_kept_off_stay_usable(own_thread: list[BaseException]) -> None:
    usable, found = sorted(os.sched_getaffinity(0)), list[set[int]]()

    def work() -> None:
        try:
            for _ in range(2):  # as after a reload
                affinity.keep_to(usable[:1])
                assert os.sched_getaffinity(0) == {usable[0]}
                assert affinity.usable_cores() == usable
            affinity.keep_to([100_000])  # which is not there
            assert os.sched_getaffinity(0) == {usable[0]}
            other = threading.Thread(target=lambda: (affinity.take_all(), found.append(os.sched_getaffinity(0))))
            other.start()
            other.join()
            assert found == [set(usable)]
            assert os.sched_getaffinity(0) == {usable[0]}
            affinity.keep_to(())
            assert sorted(os.sched_getaffinity(0)) == affinity.usable_cores() == usable
        except BaseException as error:
            own_thread.append(error)
        finally:
            affinity._all_cores.clear()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
