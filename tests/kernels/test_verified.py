"""No kernel lands that the full matrix has not seen; and what is chosen of the matrix has every value in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import verify
from tests.kernels.cover import cover


def test_the_full_matrix_was_run_with_these_kernels_and_versions():
    changed = verify.stale()
    assert not changed, f"run `make kernels`, which tests them all, and commit {verify.RECORD.name}: {changed}"


def test_what_decides_about_a_kernel_is_recorded(monkeypatch, tmp_path):
    found = verify.sources()
    assert {"daemons/ops/triton/gemv.py", "daemons/ops/attention.py", "tests/kernels/test_gemv.py"} <= found.keys()
    record = tmp_path / "verified.txt"
    monkeypatch.setattr(verify, "RECORD", record)
    record.write_text("\n".join(verify.lines(verify.pins(), found)) + "\n")
    assert verify.stale() == []
    for name, other in (("daemons/ops/triton/gemv.py", "0"), ("daemons/ops/triton/new.py", "1")):
        with monkeypatch.context() as patch:
            patch.setattr(verify, "sources", lambda name=name, other=other: found | {name: other})
            assert name in verify.stale()
    monkeypatch.setattr(verify, "pins", lambda: {"torch": "2.13.0", "triton": "99"})
    assert "triton" in verify.stale()


@pytest.mark.parametrize(("status", "changed"), [(1, False), (0, True)])
def test_nothing_is_recorded_of_a_failed_run_or_of_files_that_changed_meanwhile(status, changed, monkeypatch, tmp_path):
    hashes = iter([{"a": "1"}, {"a": "2" if changed else "1"}])
    monkeypatch.setattr(verify, "RECORD", tmp_path / "verified.txt")
    monkeypatch.setattr(verify, "installed", verify.pins)
    monkeypatch.setattr(verify, "sources", lambda: next(hashes))
    monkeypatch.setattr(verify.subprocess, "run", lambda *_, **__: verify.subprocess.CompletedProcess([], status))
    assert verify.main([]) == 1
    assert not verify.RECORD.exists()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), min_size=1, unique=True))
def test_a_cover_has_every_value_and_no_case_too_many(cases):
    values = {case: list(enumerate(case)) for case in cases}
    chosen = cover(values)
    assert {v for case in chosen for v in values[case]} == {v for of in values.values() for v in of}
    assert len(chosen) <= sum(len(set(column)) for column in zip(*cases, strict=True))
    assert cover(values) == chosen
