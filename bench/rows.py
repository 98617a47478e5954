"""What rows cost on a cpu: steps of 1 to 16 rows of a model, and drafts of its drafter, in one process.

    python bench/rows.py [--model FILE] [--draft FILE] [--rows 1,2,4,8,16] [--drafts 1,3,7] [--parts] [--save]

Loads all layers as one stage and the drafter beside it, as the daemon of the last layers does, and runs verify steps
of one sequence: forward, logits, greedy choice, recurrent states after each row.  Drafts follow a step whose tokens
were all accepted, so each extends the context by its rows.  Milliseconds of processor time of one thread: the fastest
round and the median, in turns.  --parts: of them in each entry point of the C++ kernels, the median.
--save writes bench/results/rows-NAME.json.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from full_size import conditions
from services import ROOT

from daemons.draft.stage import DraftStage
from daemons.models.stage import LoadedStage
from daemons.ops.cpu.library import cpu_kernels
from daemons.sampling import Sampler
from lucevisor.model.drafters import draft_paths, open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import CaptureSource, DraftKind, DraftPlan, Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step, ZeroState

DEMO = ROOT / "etc" / "demo"
MAX_ROWS = 32


class TimedKernels:
    """Takes the place of the library: notes how long calls of each entry point took."""

    def __init__(self, library):
        self.library, self.seconds = library, {}

    def __getattr__(self, name):
        call = getattr(self.library, name)

        def timed(*arguments):
            began = time.perf_counter()
            found = call(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return found

        return timed


class Bench:
    """A model and its drafter with one sequence of ``context`` tokens."""

    def __init__(self, options):
        spec = open_spec(options.model.resolve())
        paths = draft_paths(options.draft.resolve()) if options.draft else ()
        drafter = read_draft_spec(open_draft(paths), spec, DraftKind.DFLASH) if paths else None
        n_pages = (options.context + 2 * MAX_ROWS) // PAGE_TOKENS + 1
        pools, layers = PoolSizes(n_pages, n_pages, 2 + MAX_ROWS), LayerRange(0, spec.n_layers)
        captures = list(drafter.captures) if drafter else []
        stage = StagePlan(
            0, [ShardPlan(0, layers)], source=None, target=None, embedding=True, output=True, captures=captures
        )
        plan = None
        if drafter:
            source = CaptureSource(0, captures, None)
            plan = DraftPlan(1, DraftKind.DFLASH, [str(p) for p in paths], 0, drafter.layers, [source])
        files = [str(path) for path in spec.files.paths]
        load = Load(
            files, Dtype.BFLOAT16, Dtype.BFLOAT16, [stage], [], pools, 4, 512, threads=options.threads, draft=plan,
            max_drafts=MAX_ROWS,
        )  # fmt: skip
        self.stage = LoadedStage.load(spec, stage, load, Backend.CPU, lambda _: None)
        self.draft = DraftStage.load(spec, load, Backend.CPU, lambda _: None, self.stage) if plan else None
        self.sampler, self.kv_groups, self.context = Sampler(spec.vocabulary, torch.device("cpu")), spec.kv_groups(), 0
        self.sampler.open(0, SamplingParams(temperature=0.0), [])
        states = [ZeroState(0)] if KvGroup.RECURRENT in self.kv_groups else []
        tables = [
            SetPages(0, s, 0, list(range(n_pages))) for s in (KvGroup.FULL, KvGroup.WINDOW) if s in self.kv_groups
        ]
        self.apply([*states, OpenSequence(0, 0, SamplingParams()), *tables])
        while self.context < options.context:
            n = min(256, options.context - self.context)
            self.run(Slice(0, self.context, [5 + i for i in range(n)], sample=False))
            self.context += n

    def apply(self, operations):
        self.stage.apply(operations)
        if self.draft:
            self.draft.apply(operations)

    @torch.inference_mode()
    def run(self, one):
        """A step of one slice; returns the step, its captures and the tokens sampled."""
        step = Step(0, 0, [], [one])
        out = self.stage.forward(step, None)
        if not one.sample:
            self.extend(step, out.captures, [])
            return None
        n = len(one.tokens)
        found = self.sampler.sample([one], self.stage.logits(out.rows, list(range(n - 1 - one.n_drafts, n))))
        return step, out.captures, [sampled.token for sampled in found]

    def extend(self, step, captures, tokens):
        return self.draft.run(step, [captures], [tokens]) if self.draft else None

    def slice_of(self, n, num_draft_tokens=0):
        """``n`` rows that verify n - 1 drafts, and leave the sequence's state as it was."""
        states = list(range(2, 2 + n)) if KvGroup.RECURRENT in self.kv_groups else []
        return Slice(0, self.context, [7] * n, True, n_drafts=n - 1, states=states, num_draft_tokens=num_draft_tokens)

    def steps(self, rows):
        """The cases: a step of ``rows``."""
        one = self.slice_of(rows)
        return lambda: self.run(one)

    def drafts(self, n):
        """A draft of ``n`` behind a step of n + 1 rows, all accepted."""
        one = self.slice_of(n + 1, num_draft_tokens=n)
        step, captures, _ = self.run(one)
        captures, tokens = captures.clone(), [7] * (n + 1)
        return lambda: self.extend(step, captures, tokens)


def measured(cases, rounds, seconds):
    """Seconds of each case, in turns: [rounds] of processor time."""
    found = {name: [] for name in cases}
    began = time.perf_counter()
    for i in range(rounds + 5):
        for name, run in cases.items():
            start = time.process_time()
            run()
            if i >= 5:
                found[name].append(time.process_time() - start)
        if time.perf_counter() - began > seconds and i > 10:
            break
    return found


def parts(bench, cases, rounds):
    """Milliseconds in each entry point of the kernels, by case: medians of steps that are not captured."""
    bench.stage.graphs = [None] * len(bench.stage.graphs)
    if bench.draft:
        bench.draft.graphs = None
    kernels, found = cpu_kernels(), {}
    for name, run in cases.items():
        all_rounds = []
        for _ in range(rounds):
            kernels.calls = TimedKernels(kernels.library)
            run()
            all_rounds.append(kernels.calls.seconds)
        kernels.calls = kernels.library
        found[name] = {
            entry: round(1e3 * statistics.median(r[entry] for r in all_rounds), 3) for entry in all_rounds[0]
        }
    return found


def counts(text):
    return [int(part) for part in text.split(",") if part]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "demo-qwen35-22m-q4_k_m.gguf")
    parser.add_argument("--draft", type=Path, default=None, help="a DFlash drafter; default: the demo's")
    parser.add_argument("--rows", type=counts, default=[1, 2, 4, 8, 16])
    parser.add_argument("--drafts", type=counts, default=[1, 3, 7])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40.0, help="of all rounds at most")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--name", default=f"demo-cpu-{platform.machine()}")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.draft is None and options.model.parent == DEMO:
        options.draft = DEMO / "demo-qwen35-22m-dflash2-q4_0.gguf"
    bench = Bench(options)
    cases = {f"{n} rows": bench.steps(n) for n in options.rows}
    if bench.draft:
        cases |= {f"draft of {n}": bench.drafts(n) for n in options.drafts}
    seconds = measured(cases, options.rounds, options.seconds)
    found = {
        name: {"best_ms": round(1e3 * min(s), 3), "median_ms": round(1e3 * statistics.median(s), 3)}
        for name, s in seconds.items()
    }
    if options.parts:
        for name, medians in parts(bench, cases, 50).items():
            found[name]["parts_ms"] = medians
    for name, one in found.items():
        print(f"{name:12} {one['best_ms']:7.3f} {one['median_ms']:7.3f} ms  {one.get('parts_ms', '')}")
    if options.save:
        settings = {"model": options.model.name, "context": options.context, "threads": options.threads}
        settings["load_average"] = os.getloadavg()[0]
        path = ROOT / "bench" / "results" / f"rows-{options.name}.json"
        path.write_text(json.dumps({**settings, **conditions(), "cases": found}, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
