"""Measures on a GPU that is lent for minutes what docs/performance.md and the issues still ask for, in three parts.

    python bench/gpu_round.py --part a|b|c --out DIR [--minutes 9] [--files DIR] [--previous DIR] [--gpus N]
                              [--llama-source DIR | --llama-bench FILE] [--workers 8] [--dry-run]
    python bench/gpu_round.py --out DIR --device cpu --tiny [--minutes 20]

The measurements of a part (gpu_round_steps.py) run one after the other, the most important first, each within its own
limit and what is left of --minutes.  One that fails or is cut off stops no other.  --out gets NAME.log and the JSON of
each, and round.json, by which a further call goes on: what is done is left out, what was cut off continues with what
its JSON lacks.  --previous DIR: the --out of a call on another machine, which is copied first.  At the end of a part
its aims (gpu_round_aims.py) are printed: aim, measured, met or missed.  Model files are made in --files, which needs
60 GB; those that the part does not need are removed when room is short.  --tiny runs every command with tiny models.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from gpu_round_aims import table
from gpu_round_steps import BENCH, ROOT, Setup, parts, script
from make_gguf import stats
from model_shapes import SHAPES
from records import conditions, write_json

RESERVE_S = 12.0
"""For stopping what runs, and for the table at the end."""
STOP_S = 6.0
"""From the first signal to the last one."""
ROOM_BYTES = 3 << 30


def limit_s(measurement, left_s):
    """Seconds that a measurement gets when ``left_s`` are left of the call; 0: it is not started."""
    left_s -= RESERVE_S
    return min(measurement.limit_s, left_s) if left_s >= measurement.least_s else 0.0


def told(command, setup):
    """A command that is the same on every machine."""
    text = "\n".join(command)
    for path, name in ((sys.executable, "python"), (setup.out, "OUT"), (setup.files, "FILES"), (ROOT, ".")):
        text = text.replace(str(path), name)
    return text.split("\n")


def is_done(ledger, measurement, command, setup):
    """Whether this very command has ended well in an earlier call, and what it wrote is there."""
    row = ledger.get(measurement.name, {})
    written = not measurement.result or (setup.out / measurement.result).exists()
    return row.get("command") == told(command, setup) and row.get("code") in measurement.codes and written


def needed(measurements):
    """Names of the model files, without the mark of those that count."""
    return {name.rstrip("+") for measurement in measurements for name in measurement.files}


def removable(measurements, present, setup):
    """Model files that none of the measurements needs."""
    keep = {setup.model(name) for name in needed(measurements)}
    return [path for path in present if path not in keep]


class Round:
    """One call: what is running, and the seconds that are left."""

    def __init__(self, setup, minutes, echo=print):
        self.setup, self.ends, self.echo = setup, time.monotonic() + 60 * minutes, echo
        self.background = {}
        self.path = setup.out / "round.json"
        self.ledger = json.loads(self.path.read_text()) if self.path.exists() else {}

    def left_s(self):
        return self.ends - time.monotonic()

    def note(self, name, **row):
        self.ledger[name] = row
        self.path.write_text(json.dumps(self.ledger, indent=1) + "\n")

    def run(self, measurements):
        """Run all for which there is time, and stop what still runs."""
        try:
            for i, one in enumerate(measurements):
                try:
                    self.one(one, measurements[i:])
                except Exception as error:  # any: the next measurement may work
                    self.say(one.name, f"not run: {type(error).__name__}: {error}")
        finally:
            for name in list(self.background):
                self.finish(name, 0.0)

    def one(self, measurement, following):
        if measurement.awaits in self.background:
            self.finish(measurement.awaits, max(0.0, self.left_s() - RESERVE_S - measurement.least_s))
        command = measurement.command(self.setup)
        if not command:
            self.say(measurement.name, "nothing to do without llama.cpp")
            return
        if is_done(self.ledger, measurement, command, self.setup):
            self.say(measurement.name, "done before")
            return
        for name in measurement.files:
            if not self.make(name, following):
                return
        limit = limit_s(measurement, self.left_s())
        if not limit:
            self.say(measurement.name, f"not started: {self.left_s():.0f} s are left, it needs {measurement.least_s}")
            return
        self.say(measurement.name, f"at most {limit:.0f} s: {' '.join(told(command, self.setup))}")
        began = time.monotonic()
        with (self.setup.out / f"{measurement.name}.log").open("ab") as log:
            process = started(command, log, measurement.environment)
        self.background[measurement.name] = (measurement, command, process, began, limit)
        if not measurement.background:
            self.finish(measurement.name, limit)

    def finish(self, name, wait_s):
        """Wait for a command that was started, stop it when its time is over, and note how it ended."""
        measurement, command, process, began, limit = self.background.pop(name)
        wait_s = min(wait_s, max(0.0, began + limit - time.monotonic()))
        cut = stopped(process, wait_s)
        code, seconds = process.returncode, round(time.monotonic() - began, 1)
        self.note(name, command=told(command, self.setup), code=None if cut else code, seconds=seconds, cut=cut)
        well = code in measurement.codes
        self.say(name, f"{'cut off' if cut else 'done' if well else f'FAILED with {code}'} after {seconds:.0f} s")

    def make(self, name, following):
        """Make a model file unless it is there; False when there is no time."""
        path, kind = self.setup.model(name.rstrip("+")), self.setup.shape(name.rstrip("+"))
        if path.exists():
            return True
        for unused in removable(following, self.setup.files.glob("*.gguf"), self.setup):
            if shutil.disk_usage(self.setup.files).free < ROOM_BYTES + stats(SHAPES[kind]())["weight_bytes"]:
                unused.unlink()
        part = path.with_suffix(".part")
        command = script("make_gguf.py", "--shape", kind, "--out", part, *(["--counting"] if name[-1] == "+" else []))
        with (self.setup.out / "files.log").open("ab") as log:
            process = started(command, log, {})
            cut = stopped(process, self.left_s() - RESERVE_S)
        if cut or process.returncode:
            self.say(path.name, "cut off" if cut else "could not be made: files.log")
            part.unlink(missing_ok=True)
            return False
        part.rename(path)
        return True

    def say(self, name, text):
        self.echo(f"[{self.left_s():4.0f} s left] {name}: {text}")


def started(command, log, environment):
    """Start a command in a process group of its own, with its output in a file."""
    path = os.pathsep.join([str(ROOT), str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | environment
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def stopped(process, wait_s):
    """Wait for a process; if it takes longer, stop it with all that it started, and return True."""
    try:
        process.wait(max(0.0, wait_s))
    except subprocess.TimeoutExpired:
        for number, seconds in ((signal.SIGINT, STOP_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # those of its group that ignored the first one
        return True
    return False


def planned(name, measurements, setup, minutes):
    """The lines of --dry-run."""
    left_s = 60 * minutes
    yield f"part {name}: {minutes:g} minutes"
    for one in measurements:
        limit = limit_s(one, left_s)
        when = f"{one.expected_s} s expected, at most {limit:.0f}" if limit else "no time left: a further call"
        files = f"; files: {', '.join(sorted(needed([one])))}" if one.files else ""
        yield f"{one.name}: {when}{' beside the next' if one.background else ''}{files}"
        yield f"    {' '.join(told(one.command(setup), setup))}"
        left_s -= 0 if one.background else min(one.expected_s, limit)


def carry_over(previous, out):
    """Copy the results of an earlier call, without their modes: they may come back read-only."""
    for path in previous.iterdir():
        if path.is_file():
            shutil.copyfile(path, out / path.name)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("a", "b", "c"), action="append", help="default: all three in turn")
    parser.add_argument("--minutes", type=float, default=9.0, help="of each part")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--previous", type=Path, help="the --out of an earlier call: go on from there")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "gpu-round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--gpus", type=int, help="default: as many as torch sees")
    parser.add_argument("--workers", type=int, default=8, help="of pytest")
    parser.add_argument("--llama-source", type=Path, help="llama.cpp's source tree, to build llama-bench from")
    parser.add_argument("--llama-bench", type=Path, help="a llama-bench with llama-batched-bench beside it")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: full models take hours there")
    return options


def main():
    options = parse(sys.argv[1:])
    for folder in (options.out, options.files):
        folder.mkdir(parents=True, exist_ok=True)
    where = conditions()
    n_gpus = options.gpus if options.gpus is not None else len(where["gpus"])
    setup = Setup(
        options.out.resolve(), options.files.resolve(), options.device, options.tiny, n_gpus, options.workers,
        options.llama_source and options.llama_source.resolve(), options.llama_bench and options.llama_bench.resolve(),
    )  # fmt: skip
    if options.previous is not None:
        carry_over(options.previous, setup.out)
    write_json(setup.out / "conditions.json", {"date": datetime.now(UTC).isoformat(timespec="seconds"), **where})
    plan = parts(setup)
    for name in options.part or plan:
        if options.dry_run:
            print("\n".join(planned(name, plan[name], setup, options.minutes)))
            continue
        Round(setup, options.minutes, lambda text: print(text, flush=True)).run(plan[name])
        lines = table(name, setup.out)
        (setup.out / f"part-{name}.txt").write_text("\n".join(lines) + "\n")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
