"""bench/gpu_round.py: order and budget of its measurements, what a further call leaves out, and the table of aims."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_round
import pytest
from gpu_round import Round, carry_over, is_done, limit_s, planned, removable, told
from gpu_round_aims import line, table
from gpu_round_steps import Measurement, Setup, parts
from make_gguf import SHAPES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


@pytest.fixture
def setup(tmp_path):
    out = Setup(tmp_path / "out", tmp_path / "files")
    out.out.mkdir()
    out.files.mkdir()
    return out


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu_round, "RESERVE_S", 0.0)
    monkeypatch.setattr(gpu_round, "STOP_S", 0.5)


def measurement(name, code, limit_s=60, **more):
    return Measurement(name, lambda setup: [sys.executable, "-c", code], 1, limit_s, 1, **more)


def run(setup, *measurements, seconds=60.0):
    said = []
    Round(setup, seconds / 60, said.append).run(measurements)
    return [text.split("] ", 1)[1] for text in said], json.loads((setup.out / "round.json").read_text())


def test_the_most_important_comes_first_and_fits_into_its_part(setup):
    plan = parts(replace(setup, n_gpus=2))
    assert [[one.name for one in part] for part in plan.values()] == [
        ["llama.cpp", "tests", "27B", "35B-A3B", "27B deep", "35B-A3B deep", "27B ubatch of 2048",
         "35B-A3B ubatch of 2048"],
        ["KV Flash", "recovery", "speculation", "27B tuned", "35B-A3B tuned", "moves"],
        ["groups", "steps", "eager steps", "perplexity", "hop", "groups on one GPU"],
    ]  # fmt: skip
    every = [one for part in plan.values() for one in part]
    results = [one.result for one in every if one.result]
    assert len(set(results)) == len(results)
    assert {name.rstrip("+") for one in every for name in one.files} <= SHAPES.keys()
    assert all(one.least_s <= one.limit_s and one.expected_s <= one.limit_s for one in every)
    for part in plan.values():  # the first half of each part is expected to end in its nine minutes
        assert sum(one.expected_s for one in part[: (len(part) + 1) // 2] if not one.background) <= 540


@pytest.mark.parametrize(("left_s", "limit"), [(300, 100), (90, 90), (20, 20), (19, 0), (-5, 0)])
def test_a_measurement_gets_what_is_left_or_is_not_started(left_s, limit):
    assert limit_s(replace(measurement("m", ""), limit_s=100, least_s=20), left_s) == limit


def test_a_dry_run_prints_what_fits_and_names_no_folder(setup):
    lines = list(planned("a", parts(setup)["a"], replace(setup, llama_source=Path("/llama")), 5.0))
    text = "\n".join(lines)
    assert "bench FILES/qwen3.6-27b.toml" in text
    assert "tests: 240 s expected, at most 300" in text
    assert "27B deep: no time left: a further call; files: qwen3.6-27b" in text
    assert str(setup.out.parent) not in text


def test_llama_cpp_is_built_beside_the_tests_and_compared_with(setup):
    llama = setup.files / "llama.cpp" / "bin" / "llama-bench"
    plan = {one.name: one for one in parts(setup)["a"]}
    assert plan["27B ubatch of 2048"].command(setup) == plan["llama.cpp"].command(setup) == []
    assert "--against" not in plan["27B"].command(setup)
    assert "-DGGML_CUDA=ON" in plan["llama.cpp"].command(replace(setup, llama_source=Path("/llama")))[-1]
    llama.parent.mkdir(parents=True)
    llama.touch()
    assert plan["27B"].command(setup)[-4:] == ["--against", str(llama), "--against-args", "-ngl 99 -fa on"]
    assert plan["27B ubatch of 2048"].command(setup)[-1] == "-ngl 99 -fa on -ub 2048 -b 2048"


def test_failures_and_cuts_stop_no_other_and_a_further_call_takes_them_up(setup):
    child = (
        f"import subprocess, sys; subprocess.Popen(['sleep', '97']); open({str(setup.out / 'slow')!r}, 'a').write('x')"
    )
    every = [
        measurement("good", f"open({str(setup.out / 'good.json')!r}, 'a').write('x')", result="good.json"),
        measurement("bad", "raise SystemExit(3)"),
        measurement("slow", f"{child}; import time; time.sleep(98)", limit_s=2),
        Measurement("broken", lambda setup: 1 / 0, 1, 60, 1),
        measurement("judged", "raise SystemExit(1)", codes=(0, 1)),
    ]
    said, ledger = run(setup, *every)
    assert [text for text in said if "at most" not in text] == [
        "good: done after 0 s", "bad: FAILED with 3 after 0 s", "slow: cut off after 2 s",
        "broken: not run: ZeroDivisionError: division by zero", "judged: done after 0 s",
    ]  # fmt: skip
    assert [ledger[name]["code"] for name in ("good", "bad", "slow", "judged")] == [0, 3, None, 1]
    assert ledger["good"]["command"][0] == "python"
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 97" not in processes.splitlines()

    said, _ = run(setup, *every)
    assert [text for text in said if "before" in text] == ["good: done before", "judged: done before"]
    assert ((setup.out / "good.json").read_text(), (setup.out / "slow").read_text()) == ("x", "xx")
    every[0] = measurement("good", f"open({str(setup.out / 'good.json')!r}, 'a').write('y')", result="good.json")
    run(setup, every[0])  # another command is another measurement
    assert (setup.out / "good.json").read_text() == "xy"
    (setup.out / "good.json").unlink()
    assert not is_done(json.loads((setup.out / "round.json").read_text()), every[0], every[0].command(setup), setup)


def test_a_call_on_another_machine_goes_on_with_results_that_came_back_read_only(setup, tmp_path):
    one = measurement("good", f"open({str(setup.out / 'good.json')!r}, 'a').write('x')", result="good.json")
    run(setup, one)
    for path in setup.out.iterdir():
        path.chmod(0o444)
    elsewhere = replace(setup, out=tmp_path / "elsewhere")
    elsewhere.out.mkdir()
    carry_over(setup.out, elsewhere.out)
    assert all(path.stat().st_mode & 0o200 for path in elsewhere.out.iterdir())
    moved = measurement("good", f"open({str(elsewhere.out / 'good.json')!r}, 'a').write('x')", result="good.json")
    assert run(elsewhere, moved)[0] == ["good: done before"]


def test_what_does_not_fit_is_not_started_and_a_call_ends_in_time(setup):
    began = time.monotonic()
    said, ledger = run(setup, measurement("slow", "import time; time.sleep(99)"), measurement("late", ""), seconds=2.0)
    assert time.monotonic() - began < 60
    assert said[1] == "slow: cut off after 2 s"
    assert said[2].startswith("late: not started")
    assert list(ledger) == ["slow"]


def test_a_build_runs_beside_the_tests_until_it_is_needed(setup):
    built = setup.out / "built"
    wait = f"import time; time.sleep(1); open({str(built)!r}, 'w')"
    beside, user = f"assert not __import__('os').path.exists({str(built)!r})", f"open({str(built)!r})"
    said, ledger = run(
        setup, measurement("build", wait, background=True), measurement("tests", beside),
        measurement("user", user, awaits="build"),
    )  # fmt: skip
    assert {name: row["code"] for name, row in ledger.items()} == {"tests": 0, "build": 0, "user": 0}, said


def test_files_are_made_once_and_those_of_other_parts_make_room(setup, monkeypatch):
    tiny = replace(setup, tiny=True, device="cpu")
    one, other = (measurement(name, "", files=(shape,)) for name, shape in (("a", "qwen3-0.6b"), ("b", "laguna-xs.2")))
    run(tiny, one)
    made = tiny.model("qwen3-0.6b").stat().st_mtime_ns
    run(tiny, replace(one, name="again"))
    assert tiny.model("qwen3-0.6b").stat().st_mtime_ns == made
    assert removable([one], tiny.files.glob("*.gguf"), tiny) == []
    usage = shutil.disk_usage(tiny.files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    run(tiny, other)
    assert [path.name for path in tiny.files.glob("*.gguf")] == ["tiny-laguna-xs.2.gguf"]


def test_tests_that_passed_are_left_out_of_a_further_call(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_a(): pass\ndef test_a_more(): assert 'NOW' in os.environ\ndef test_b(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_round_tests", "-p", "no:cacheprovider", "test_it.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "bench"), "LUCEVISOR_OUTCOMES": "outcomes.jsonl"}

    def tested(**more):
        done = subprocess.run(command, cwd=tmp_path, env=env | more, capture_output=True, text=True, check=False)
        return done.stdout.splitlines()[-1].split(" in ")[0]

    assert tested() == "1 failed, 2 passed"
    with (tmp_path / "outcomes.jsonl").open("a") as file:
        file.write('{"id": "test_it.py::cut of\n')
    assert tested(NOW="1") == "1 passed, 2 deselected"
    assert tested() == "3 deselected"


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        (("x", 2.0, 1.93), ("x", ">= 2", "1.93", "missed")),
        (("x", 2.0, 2.0), ("x", ">= 2", "2", "met")),
        (("x", None, 2.0), ("x", "", "2", "")),
        (("x", 2.0, None), ("x", "2", "-", "not measured")),
        (("x", 2.0, float("nan")), ("x", "2", "-", "not measured")),
    ],
)
def test_a_line_of_the_table(arguments, cells):
    assert line(*arguments) == cells


def test_the_table_judges_what_was_measured(setup):
    """By the results of an earlier day, which docs/performance.md judges likewise."""
    for name, theirs in (
        ("speed-27b", "speed-h200-27b"), ("speed-27b-deep", "speed-h200-27b-again"),
        ("speed-35b", "speed-h200-35b-a3b"), ("speculation", "speculation-h200-27b"),
        ("kv-flash", "kv-flash-service-h200-27b"), ("perplexity", "perplexity-cuda"), ("hop", "hop-same"),
    ):  # fmt: skip
        shutil.copy(RESULTS / f"{theirs}.json", setup.out / f"{name}.json")
    kills = [
        {"group": "g0", "beside": beside, "load_s": 3.35, "pause_s": s}
        for beside, s in (("alone", 3.7), ("with streams", 5.06))
    ]
    cost = {"prefill": {"ratio": 0.998}, "decode": {"ratio": 0.97}}
    (setup.out / "recovery.json").write_text(json.dumps({"cost": cost, "kills": kills}))
    steps = [{"tokens": 512, "start": 0, "known_s": 0.0098, "launched_s": 0.009}]
    (setup.out / "steps-35b.json").write_text(json.dumps({"layers": 10, "steps": steps}))
    two = {"streams": {"1": [0.0066], "8": [0.001]}, "hop_s": [50e-6], "prompt_s": [1.0]}
    one = {"streams": {"1": [0.0062], "4": [0.00098]}, "prompt_s": [1.9]}
    devices = ["cuda:0", "cuda:1"]
    (setup.out / "groups.json").write_text(json.dumps({"devices": devices, "one": one, "two": two}))
    (setup.out / "tests.jsonl").write_text('{"id": "a", "outcome": "passed"}\n{"id": "b", "outcome": "failed"}\n')
    verdicts = {}
    for part in "abc":
        for row in table(part, setup.out)[1:]:
            name, _, *measured, verdict = (cell.strip() for cell in row.split(" | "))
            verdicts[name] = measured[0], verdict
    assert verdicts["GPU tests that failed"] == ("1 of 2, 0 skipped", "missed")
    assert verdicts["27B tg64"] == ("2.015 x llama.cpp: 161.94 and 80.36 tokens/s", "met")
    assert verdicts["27B tg64 x8"][1] == verdicts["35B-A3B tg64 x32"][1] == "met"
    assert verdicts["27B tg64 x16"] == ("2.825 x llama.cpp: 1402.4 and 496.38 tokens/s", "missed")
    assert verdicts["27B tg64 @ d65536"] == ("-", "not measured")
    assert verdicts["dflash2: step of 8 rows"] == ("1.424 steps", "missed")
    assert verdicts["dflash2: a draft of 7"] == ("0.1863 of 8 rows", "missed")
    assert verdicts["mtp: speed-up at 8 tokens a step"] == ("3.463", "missed")
    assert verdicts["qk: slowest over fastest context"] == ("0.7399", "missed")
    assert verdicts["qk: GPU memory"] == ("21,609 MiB", "")
    assert verdicts["journal: decode over without"] == ("0.97", "missed")
    assert verdicts["pause of 8 streams, g0 lost"] == ("5.06 s", "missed")
    assert verdicts["35B-A3B, 10 layers: 512 tokens at 0"] == ("9.8 ms, launched in 9 ms", "")
    assert verdicts["two groups: prompt of 16,384"] == ("1.9 x", "met")
    assert verdicts["two groups: a token, one stream"] == ("6.6 ms", "missed")
    assert verdicts["largest change of perplexity"] == ("0.1258 % of 22 rows", "met")


def test_commands_are_the_same_on_every_machine(setup):
    elsewhere = replace(setup, out=Path("/elsewhere/out"), files=Path("/elsewhere/files"))
    for part in parts(setup).values():
        for one in part:
            if one.name in ("speculation", "KV Flash", "recovery", "moves", "groups", "steps"):
                assert told(one.command(setup), setup) == told(one.command(elsewhere), elsewhere)
