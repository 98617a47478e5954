"""Cases, table and llama-bench of ``lucevisor bench``; a run of it is in tests/e2e/test_cli.py."""

import json

import pytest

from lucevisor.app.benchmark import Case, Figures, cases, table
from lucevisor.app.llama_bench import LlamaBench
from lucevisor.errors import LucevisorError


def test_cases_are_named_as_llama_bench_names_them():
    found = cases([512, 4096], 128, [0, 4096], [1, 8])
    assert [c.name for c in found] == ["pp512", "pp4096", "tg128", "tg128 @ d4096", "tg128 x8"]
    assert [c.context for c in found] == [513, 4097, 144, 4224, 144]
    assert cases([0], 0, [0], [1]) == []
    assert [c.name for c in cases([], 5, [0, 0], [1, 1])] == ["tg5"]


def test_the_table_has_medians_and_ratios():
    ours, alone = (
        Figures(Case(answer=8), [10.0, 30.0, 20.0], [10.0, 5.0, 40.0]),
        Figures(Case(answer=8, streams=4), [7.0]),
    )
    assert table([ours, alone]).splitlines() == [
        "test    tokens/s  least  most  llama.cpp  ratio",
        "tg8         20.0   10.0  30.0       10.0   2.00",
        "tg8 x4       7.0    7.0   7.0          -      -",
    ]
    assert table([alone]).splitlines()[0] == "test    tokens/s  least  most"
    assert ours.as_json()["ratio"] == 2.0
    assert "ratio" not in alone.as_json()


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_llama_bench_is_given_the_case(tmp_path):
    asked = tmp_path / "asked"
    result = json.dumps([{"avg_ts": 12.5}])
    bench = LlamaBench(
        program(tmp_path / "ok", f"echo \"$@\" > {asked}; echo '{result}'"), tmp_path / "m.gguf", ["-t", "2"]
    )
    assert bench.run(prompt=0, answer=16, depth=64) == 12.5
    assert asked.read_text().split() == [
        "-m", str(tmp_path / "m.gguf"), "-p", "0", "-n", "16", "-d", "64", "-r", "1", "-o", "json", "-t", "2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo bad file >&2; exit 3", "ended with code 3: bad file"),
        ("echo hello", "printed no result of llama-bench"),
        ("echo []", "printed no result of llama-bench"),
        ("sleep 5", "timed out"),
    ],
)
def test_a_llama_bench_that_fails_is_told(tmp_path, text, words):
    bench = LlamaBench(program(tmp_path / "bad", text), tmp_path / "m.gguf", timeout_s=0.3)
    with pytest.raises(LucevisorError, match=words):
        bench.run(prompt=1, answer=0, depth=0)
