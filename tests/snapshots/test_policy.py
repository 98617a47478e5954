"""Decisions about snapshots: file names, what is worth saving, what is removed first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.snapshots.policy import (
    CacheFile,
    Candidate,
    FileKind,
    SavePolicy,
    SaveTrigger,
    files_to_evict,
    kind_of,
    plan_shutdown_saves,
    reject_save_reason,
)

NAME = "lucevisor-0123456789abcdef-0123456789abcdef"


# ---- names


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{NAME}.safetensors", FileKind.SNAPSHOT),
        (f"{NAME}.0123456789abcdef.partial", FileKind.PARTIAL),
        (f"{NAME}.safetensors.refused", FileKind.REFUSED),
        (f"{NAME}.safetensors.refused.12", FileKind.REFUSED),
        ("lucevisor.lock", FileKind.OTHER),
        ("model.safetensors", FileKind.OTHER),
        (f"{NAME}.safetensors.bak", FileKind.OTHER),
        (f"x{NAME}.safetensors", FileKind.OTHER),
        (f"{NAME}.partial", FileKind.OTHER),
        (f"{NAME.upper()}.safetensors", FileKind.OTHER),
        (f"{NAME}.safetensors\n", FileKind.OTHER),
        (f"../{NAME}.safetensors", FileKind.OTHER),
    ],
)
def test_file_kinds_by_name(name, kind):
    assert kind_of(name) is kind


# ---- what is worth a file

POLICY = SavePolicy(min_tokens=256, disk_bytes=1 << 30)


@pytest.mark.parametrize(
    ("candidate", "trigger", "text"),
    [
        (Candidate(0, 255, 1000), SaveTrigger.EVICTION, "255 tokens are fewer than cache.min_tokens = 256"),
        (Candidate(0, 4096, 2 << 30), SaveTrigger.EVICTION, "of cache.disk or of the disk"),
        (Candidate(0, 4096, 1000, n_saved_tokens=4000), SaveTrigger.EVICTION, "4000 of its 4096 tokens are on disk"),
        (Candidate(0, 4096, 1000, n_saved_tokens=3500), SaveTrigger.TURN, "a file needs 1024 new ones"),
    ],
)
def test_reasons_not_to_save(candidate, trigger, text):
    assert text in reject_save_reason(candidate, trigger, POLICY)


@pytest.mark.parametrize(
    ("candidate", "trigger"),
    [
        (Candidate(0, 256, 1000), SaveTrigger.TURN),
        (Candidate(0, 4096, 1000, n_saved_tokens=3500), SaveTrigger.EVICTION),
        (Candidate(0, 4096, 1000, n_saved_tokens=3000), SaveTrigger.TURN),
    ],
)
def test_slots_worth_saving(candidate, trigger):
    assert reject_save_reason(candidate, trigger, POLICY) == ""


def test_saving_turns_writes_linearly():
    saved = written = 0
    for n in range(200, 20_001, 200):
        if not reject_save_reason(Candidate(0, n, n, n_saved_tokens=saved), SaveTrigger.TURN, POLICY):
            saved, written = n, written + n
    assert written < 5 * 20_000
    assert saved > 0.7 * 20_000


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.integers(0, 99),
        st.integers(1, 10_000),
        st.integers(1, 10**9),
        st.integers(0, 10_000),
    ),
    max_size=12,
)


@given(candidates=CANDIDATES)
def test_shutdown_saves_fit_the_disk(candidates):
    chosen = plan_shutdown_saves(candidates, POLICY)
    assert sum(c.n_bytes for c in chosen) <= POLICY.disk_bytes
    assert all(not reject_save_reason(c, SaveTrigger.SHUTDOWN, POLICY) for c in chosen)


def test_shutdown_saves_evict_no_slot_that_was_used_later():
    newest, older = (
        [Candidate(n, 4000, 1 << 28) for n in numbers] for numbers in (range(24, 20, -1), range(20, 0, -1))
    )
    on_disk = [replace(c, n_saved_tokens=4000) for c in newest]
    assert plan_shutdown_saves([*newest, *older], POLICY) == newest
    assert plan_shutdown_saves([*on_disk, *older], POLICY) == []
    assert plan_shutdown_saves([*on_disk[1:], *older], POLICY) == older[:1]
    small = Candidate(0, 4000, 1 << 20)
    assert plan_shutdown_saves([*newest[:3], Candidate(9, 4000, 1 << 29), small], POLICY) == [*newest[:3], small]


# ---- what goes


USES = st.lists(
    st.builds(
        CacheFile,
        st.uuids().map(str),
        st.integers(1, 100),
        st.floats(0, 100),
        st.sampled_from([FileKind.SNAPSHOT, FileKind.SNAPSHOT, FileKind.REFUSED, FileKind.PARTIAL]),
    ),
    max_size=12,
    unique_by=lambda f: f.file,
)


@given(files=USES, budget=st.integers(0, 400), data=st.data())
def test_victims(files, budget, data):
    keep = data.draw(st.sets(st.sampled_from([f.file for f in files]))) if files else set()
    gone = files_to_evict(files, budget, keep)
    total = sum(f.n_bytes for f in files)
    assert all(f.kind is FileKind.SNAPSHOT and f.file not in keep for f in gone)
    assert [f.used_s for f in gone] == sorted(f.used_s for f in gone)
    left = [f for f in files if f.kind is FileKind.SNAPSHOT and f.file not in keep and f not in gone]
    over = total - sum(f.n_bytes for f in gone) - budget
    assert over <= 0 or not left  # within the budget, or nothing more to give
    assert not gone or over + gone[-1].n_bytes > 0  # and the last one was needed
    assert not gone or all(f.used_s >= gone[-1].used_s for f in left)
