"""Cases, table and llama-bench of ``lucevisor bench``; a run of it is in tests/e2e/test_cli.py."""

import json
from types import SimpleNamespace

import pytest

from lucevisor.cli import bench as benchmark
from lucevisor.cli.bench import BenchmarkResult, Case, LlamaBench, cases, table
from lucevisor.errors import LucevisorError


def test_cases_are_named_as_llama_bench_names_them():
    found = cases([512, 4096], 128, [0, 4096], [1, 8])
    assert [c.name for c in found] == ["pp512", "pp4096", "tg128", "tg128 @ d4096", "tg128 x8"]
    assert [c.context for c in found] == [513, 4097, 144, 4224, 144]
    assert cases([0], 0, [0], [1]) == []
    assert [c.name for c in cases([], 5, [0, 0], [1, 1])] == ["tg5"]


def test_the_table_has_medians_and_ratios():
    ours, alone = (
        BenchmarkResult(Case(answer=8), [10.0, 30.0, 20.0], [10.0, 5.0, 40.0]),
        BenchmarkResult(Case(answer=8, streams=4), [7.0]),
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


def peers(tmp_path, rows, batched_rows=()):
    """Programs that note their arguments and print these rows; returns the first and a reader of the notes."""
    notes = tmp_path / "asked"
    program(tmp_path / "llama-bench", f"echo \"$@\" >> {notes}; echo '{json.dumps(rows)}'")
    if batched_rows:
        lines = "; ".join(f"echo '{json.dumps(row)}'" for row in batched_rows)
        program(tmp_path / "llama-batched-bench", f'echo "$@" >> {notes}; echo; {lines}')
    return tmp_path / "llama-bench", lambda: [line.split(" ", 2)[2] for line in notes.read_text().splitlines()]


def test_a_call_of_llama_bench_measures_all_cases_of_a_depth(tmp_path):
    rows = [{"n_prompt": p, "n_gen": n, "avg_ts": v} for p, n, v in ((512, 0, 90.0), (64, 0, 80.0), (0, 16, 12.5))]
    program, asked = peers(tmp_path, rows)
    bench = LlamaBench(program, tmp_path / "m.gguf", ["-t", "2"])
    near, far = cases([512, 64], 16, [0], [1, 8]), Case(answer=16, depth=64)
    assert bench.run([*near, far]) == {
        Case(prompt=512): 90.0, Case(prompt=64): 80.0, Case(answer=16): 12.5, far: 12.5,
    }  # fmt: skip
    assert asked() == ["-p 64,512 -n 16 -r 1 -o json -t 2", "-p 0 -n 16 -d 64 -r 1 -o json -t 2"]


def test_several_streams_are_measured_by_the_batched_program_beside_it(tmp_path):
    rows = [{"pl": 8, "speed_tg": 280.0}, {"pl": 32, "speed_tg": 674.0}]
    program, asked = peers(tmp_path, [{"n_prompt": 0, "n_gen": 300, "avg_ts": 85.0}], rows)
    found = LlamaBench(program, tmp_path / "m.gguf", ["-fa", "on"]).run(cases([], 300, [0], [1, 8, 32]))
    assert list(found.values()) == [85.0, 280.0, 674.0]
    assert asked()[1] == "-c 16384 -npp 16 -ntg 300 -npl 8,32 --output-format jsonl -fa on"


@pytest.mark.parametrize(
    ("text", "words", "timeout_s"),
    [
        ("echo bad file >&2; exit 3", "ended with code 3: bad file", 100.0),
        ("echo hello", "printed no result of llama-bench", 100.0),
        ("echo []", "printed no result of llama-bench", 100.0),
        ("sleep 100", "timed out", 0.3),
    ],
)
def test_a_llama_bench_that_fails_is_told(tmp_path, text, words, timeout_s):
    bench = LlamaBench(program(tmp_path / "bad", text), tmp_path / "m.gguf", timeout_s=timeout_s)
    with pytest.raises(LucevisorError, match=words):
        bench.run([Case(prompt=1)])


def test_a_batched_bench_without_the_asked_streams_is_told(tmp_path):
    program, _ = peers(tmp_path, [], [{"pl": 4, "speed_tg": 1.0}])
    with pytest.raises(LucevisorError, match="printed no result of llama-batched-bench"):
        LlamaBench(program, tmp_path / "m.gguf").run([Case(answer=1, streams=2)])


async def test_what_was_measured_is_there_when_a_later_round_fails(tmp_path, monkeypatch):
    """Rounds that warm up are not counted, two of prompts and one of answers; llama-bench runs after each other one."""
    order = []

    async def tokens_per_s(service, case, turn):
        order.append(f"{case.name} {turn}")
        return float(turn)

    class Peer:
        def run(self, wanted):
            order.append("theirs")
            if order.count("theirs") == 2:
                raise LucevisorError("it crashed")
            return dict.fromkeys(wanted, 0.5)

    monkeypatch.setattr(benchmark, "tokens_per_s", tokens_per_s)
    service, kept = SimpleNamespace(only=SimpleNamespace(placement=SimpleNamespace(max_context=100))), []

    async def every_round():
        async for figures in benchmark.measure(service, [Case(prompt=4), Case(answer=8)], 3, Peer()):
            kept.extend(f.as_json() for f in figures)

    with pytest.raises(LucevisorError, match="it crashed"):
        await every_round()
    warm = ["pp4 -1", "pp4 0", "tg8 0"]
    assert order == [*warm, "pp4 1", "tg8 1", "theirs", "pp4 2", "tg8 2", "theirs"]
    assert [figure["name"] for figure in kept] == ["pp4", "tg8"]
    for figure in kept:
        assert (figure["rounds"], figure["against_rounds"], figure["ratio"]) == ([1.0], [0.5], 2.0)
