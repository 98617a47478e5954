"""Equality and speed before and after a change: what a cut in the code may cost.

    python bench/gate.py --half cpu --baseline bench/results/gate-cpu.json          # some ten minutes on two cores
    python bench/gate.py --half gpu --baseline bench/results/gate-h200.json         # some ten minutes on a GPU
    python bench/gate.py --half two-gpus --baseline bench/results/gate-2xh200.json
    python bench/gate.py --half gpu --record bench/results/gate-h200.json           # writes a baseline

A half runs its checks (tests that compare with an oracle) and its measurements (the other scripts of this folder) one
after the other, each within what is left of --minutes, and prints figure, baseline, now, change, allowed change.  Exit
code 1: a check failed, a figure fell by more than it may, or one is missing.  Figures of two machines do not compare:
the table names the device of both.  Model files are made in --files: 20 GB for a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from records import conditions, write_json

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
MODELS = {"qwen3.5-0.8b": [], "qwen3.6-27b-mtp": ["--counting"], "qwen3.6-27b-dflash2": []}
"""Shapes, and how make_gguf.py makes them."""

EQUALITY = [
    "tests/families/test_golden.py",
    *(f"tests/e2e/test_{name}.py" for name in ("golden", "prefix", "snapshots", "recovery", "speculation")),
    "tests/engine",
    "tests/mistakes",
]
"""Golden files over one to three groups, the cache's four arms, kills, drafts, the toy pipeline, users' mistakes."""


@dataclass(frozen=True)
class Figure:
    """``worse``: share by which it may fall, or grow where ``lower`` is better; ``limit``: what it must not pass."""

    name: str
    worse: float
    lower: bool = False
    limit: float | None = None

    def change(self, before: float, now: float) -> float:
        """Share by which ``now`` is worse than ``before``; negative: better."""
        return now / before - 1 if self.lower else 1 - now / before

    def passes(self, before: float | None, now: float) -> bool:
        if self.limit is not None:
            return now <= self.limit if self.lower else now >= self.limit
        return before is None or self.change(before, now) <= self.worse


@dataclass(frozen=True)
class Measurement:
    """A command that writes ``{json}``, and how its figures are read from there."""

    name: str
    command: list[str]
    read: Callable[[dict], dict[str, float]]
    figures: list[Figure]
    models: list[str] = field(default_factory=list)


def script(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(BENCH / name), *map(str, arguments), "--json", "{json}"]


def speeds(record: dict) -> dict[str, float]:
    return {test["name"]: test["tokens_per_s"] for test in record["tests"]}


def drafts(record: dict) -> dict[str, float]:
    found = {}
    for kind in ("mtp", "dflash2"):
        row = record[kind]
        found |= {f"{kind}, {n} tokens a step": row["tokens_per_s"][f"accepted_{n}"] for n in (3, 8)}
        found[f"{kind}, 16 streams, all drafts wrong"] = row["streams_ratio"]["streams_useless"]
    return found


def pauses(record: dict) -> dict[str, float]:
    beside = [kill["pause_s"] for kill in record["kills"] if kill["beside"] != "alone"]
    return {"pause of 8 streams": max(beside)}


def two_daemons(record: dict) -> dict[str, float]:
    def token_s(side: str, n: int) -> float:
        values = sorted(record[side]["streams"][str(n)])
        return values[len(values) // 2]

    prompt = {side: min(record[side]["prompt_s"]) for side in ("one", "two")}
    return {
        "one stream, two daemons over one": token_s("one", 1) / token_s("two", 1),
        "8 streams, of n / T(n / 2)": token_s("one", 4) / token_s("two", 8),
        "prompt of 16384, two daemons over one": prompt["one"] / prompt["two"],
        "hop, us": 1e6 * max(record["two"]["hop_s"]),
    }


def service_config(path: Path, model: Path, backend: str) -> Path:
    """One group with the whole model."""
    device = "threads = 2" if backend == "cpu" else 'visible_devices = ["0"]'
    path.write_text(
        f'[model]\npath = "{model}"\n[groups.g0]\nbackend = "{backend}"\npython = "{sys.executable}"\n{device}\n'
        f'[placement]\ntarget_devices = ["g0:0"]\n[engine]\nmax_sequences = {8 if backend == "cpu" else 32}\n'
    )
    return path


def measurements(half: str, files: Path, out: Path) -> list[Measurement]:
    """What a half runs, the most important first."""

    def model(name: str) -> Path:
        return files / f"{name}.gguf"

    def bench(shape: str, backend: str, *arguments: object) -> list[str]:
        config = service_config(out / f"{shape}.toml", model(shape), backend)
        return [sys.executable, "-m", "lucevisor", "bench", str(config), *map(str, arguments), "--json", "{json}"]

    dense, drafter = "qwen3.6-27b-mtp", "qwen3.6-27b-dflash2"
    if half == "cpu":
        return [
            Measurement(
                "demo drafts", script("demo_drafts.py", "--prompts", 20, "--tokens", 96),
                lambda record: {"demo drafts, x plain": record["speed_up"]["fresh"]},
                [Figure("demo drafts, x plain", 0.0, limit=1.5)],
            ),
            Measurement(
                "0.8 B", bench("qwen3.5-0.8b", "cpu", "-p", 512, "-n", 32, "-r", 3), speeds,
                [Figure("pp512", 0.03), Figure("tg32", 0.03)], ["qwen3.5-0.8b"],
            ),
            Measurement(
                "short beside long", script("fairness.py", "--seconds", 30, "--rounds", 1),
                lambda record: {"first token p95, beside long over alone": record["ratios"]["p95 of the first token"]},
                [Figure("first token p95, beside long over alone", 0.0, lower=True, limit=3.0)],
            ),
        ]  # fmt: skip
    if half == "gpu":
        named = [Figure(f"{kind}, {n} tokens a step", 0.03) for kind in ("mtp", "dflash2") for n in (3, 8)]
        useless = [Figure(f"{kind}, 16 streams, all drafts wrong", 0.0, limit=0.98) for kind in ("mtp", "dflash2")]
        speculation = ["--devices", "cuda:0", "--files", files, "--repeats", 3, "--tokens", 128]
        speculation += ["--accepted", 3, 8, "--streams", 16]
        halved = ["--model", model(dense), "--backend", "cuda", "--groups", 2, "--tokens", 4096, "--streams", 8]
        return [
            Measurement(
                "27B", bench(dense, "cuda", "-p", "512,3581", "-n", 64, "-s", "1,8,32", "-r", 2), speeds,
                [Figure("pp512", 0.02), Figure("pp3581", 0.02)]
                + [Figure(name, 0.01) for name in ("tg64", "tg64 x8", "tg64 x32")],
                [dense],
            ),
            Measurement(
                "drafts", script("speculation.py", *speculation, "--drafters", "mtp", "dflash2"), drafts,
                [*named, *useless], [dense, drafter],
            ),
            Measurement(
                "a lost shard", script("recovery.py", *halved, "--rounds", 0, "--kills", 1, "--spares", 1), pauses,
                [Figure("pause of 8 streams", 0.3, lower=True)], [dense],
            ),
        ]  # fmt: skip
    groups = ["--shape", dense, "--file", model(dense), "--devices", "cuda:0", "cuda:1", "--rounds", 2, "--tokens", 128]
    return [
        Measurement(
            "two daemons", script("groups.py", *groups), two_daemons,
            [
                Figure("one stream, two daemons over one", 0.01), Figure("8 streams, of n / T(n / 2)", 0.02),
                Figure("prompt of 16384, two daemons over one", 0.02), Figure("hop, us", 0.0, lower=True, limit=60.0),
            ],
            [dense],
        )
    ]  # fmt: skip


def run(command: list[str], log: Path, limit_s: float) -> str:
    """Run a command; how it failed, or nothing."""
    paths = [str(ROOT), str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=file, stderr=file,
                timeout=limit_s,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"cut off after {limit_s:.0f} s"
    return f"exit code {code}: {log}" if code else ""


def make(name: str, files: Path, out: Path, limit_s: float) -> str:
    path = files / f"{name}.gguf"
    if path.exists():
        return ""
    part = path.with_suffix(".part")
    command = [sys.executable, str(BENCH / "make_gguf.py"), "--shape", name, "--out", str(part), *MODELS[name]]
    why = run(command, out / f"{name}.log", limit_s)
    if not why:
        part.rename(path)
    return why


def rows(figures: list[Figure], before: dict[str, float], now: dict[str, float]) -> tuple[list[list[str]], bool]:
    """The table's rows, and whether all figures pass."""
    found, good = [["figure", "baseline", "now", "worse by", "allowed", ""]], True
    for figure in figures:
        old, new = before.get(figure.name), now.get(figure.name)
        limit = "" if figure.limit is None else f"{'<=' if figure.lower else '>='} {figure.limit:g}"
        allowed = limit or f"{100 * figure.worse:.0f} %"
        ok = new is not None and figure.passes(old, new)
        good &= ok
        change = "-" if old is None or new is None else f"{100 * figure.change(old, new):+.1f} %"
        text = ["-" if value is None else f"{value:.4g}" for value in (old, new)]
        found.append([figure.name, *text, change, allowed, "ok" if ok else "MISSING" if new is None else "WORSE"])
    return found, good


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("cpu", "gpu", "two-gpus"), required=True)
    parser.add_argument("--baseline", type=Path, help="compare with this file")
    parser.add_argument("--record", type=Path, help="write what was measured to this file")
    parser.add_argument("--minutes", type=float, default=10.0)
    scratch = Path(tempfile.gettempdir())
    parser.add_argument("--files", type=Path, default=scratch / "gate", help="folder of model files")
    parser.add_argument("--out", type=Path, default=scratch / "gate-out", help="folder of logs")
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    parser.add_argument("--only", default="", help="measurements whose name has this in it")
    return parser.parse_args()


def measured(one: Measurement, options: argparse.Namespace, ends: float) -> tuple[dict[str, float], str]:
    """Figures of a measurement, and why there are none."""
    log, result = (options.out / f"{one.name.replace(' ', '-')}.{kind}" for kind in ("log", "json"))
    result.unlink(missing_ok=True)
    for name in one.models:
        if why := make(name, options.files, options.out, ends - time.monotonic()):
            return {}, why
    command = [str(result) if part == "{json}" else part for part in one.command]
    if why := run(command, log, max(1.0, ends - time.monotonic())):
        return {}, why
    return one.read(json.loads(result.read_text())), ""


def main() -> None:
    options = parse()
    for folder in (options.files, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    record: dict = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **conditions(), "figures": {}}
    plan, failed = measurements(options.half, options.files, options.out), ""
    plan = [one for one in plan if options.only in one.name]
    for one in plan:
        began = time.monotonic()
        found, why = measured(one, options, ends)
        record["figures"] |= found
        print(f"{one.name}: {why or 'measured'} ({time.monotonic() - began:.0f} s)", flush=True)
        if options.record is not None:
            write_json(options.record, record)
    if options.half == "cpu" and not options.no_tests:
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-n", "logical", *EQUALITY]
        began = time.monotonic()
        failed = run(tests, options.out / "tests.log", max(1.0, ends - began))
        print(f"equality: {failed or 'all tests pass'} ({time.monotonic() - began:.0f} s)", flush=True)
    before = json.loads(options.baseline.read_text()) if options.baseline is not None else {"figures": {}}
    found, good = rows([figure for one in plan for figure in one.figures], before["figures"], record["figures"])
    widths = [max(len(row[i]) for row in found) for i in range(len(found[0]))]
    for row in found:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name, side in (("baseline", before), ("now", record)):
        if "cpu" in side:
            print(
                f"{name}: {side['date']}, {side['cpu']}, {side['cores']} cores, {', '.join(side['gpus']) or 'no GPU'}"
            )
    raise SystemExit(0 if good and not failed else 1)


if __name__ == "__main__":
    main()
