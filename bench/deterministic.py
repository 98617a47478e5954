"""What does engine.deterministic cost, and does it hold?  Some layers of a model on one device, without a service.

    python bench/deterministic.py [--model FILE] [--layers N] [--device cpu|cuda] [--dtype bfloat16] [--rounds 9]
                                  [--threads N] [--json PATH]

Loads the last ``--layers`` layers (default: all) with the output matrix twice, with the setting and without, and times
in turns: one token of one stream and of 32 streams, behind 512 tokens each, and 512 tokens of a prompt, its first and
behind 3,584.  Printed: median milliseconds of both and their ratio.  Then, in both: how many of 512 rows have other
bits in chunks of 64, token by token beside 31 other streams, and as verified drafts, than in one step.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from perplexity import DEMO
from records import conditions, write_json

from daemons.device import prepare, synchronize
from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import (
    OpenSequence,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    UseState,
    ZeroState,
)

STREAMS, LENGTH, MOST, DRAFTS = 32, 512, 4096, 4
PAGES = MOST // PAGE_TOKENS


class Arm:
    """A loaded stage, with one sequence open for each stream."""

    def __init__(self, spec, options, *, deterministic):
        last = spec.n_layers
        plan = ShardPlan(0, LayerRange(last - (options.layers or last), last))
        whole = plan.layers.start == 0
        stage = StagePlan(0, [plan], None if whole else 0, None, embedding=whole, output=True)
        files, dtype = [str(path) for path in spec.files.paths], Dtype(options.dtype)
        pools = PoolSizes(STREAMS * PAGES, STREAMS * PAGES, STREAMS, draft_states=DRAFTS)
        load = Load(files, dtype, dtype, [stage], [], pools, STREAMS, LENGTH, options.threads, max_drafts=DRAFTS,
                    deterministic=deterministic)  # fmt: skip
        self.stage, self.spec = LoadedStage.load(spec, stage, load, Backend(options.device), lambda _: None), spec
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, spec.vocabulary, (MOST,), generator=generator).tolist()
        rows = torch.randn(MOST, spec.boundary_width, generator=generator)
        self.rows = None if whole else rows.to(self.stage.device, self.stage.dtype)

    def open(self):
        self.stage.reset()
        kv_groups = self.spec.kv_groups()
        for i in range(STREAMS):
            states = [ZeroState(i)] if KvGroup.RECURRENT in kv_groups else []
            pages = list(range(i * PAGES, (i + 1) * PAGES))
            tables = [SetPages(i, s, 0, pages) for s in (KvGroup.FULL, KvGroup.WINDOW) if s in kv_groups]
            self.stage.apply([*states, OpenSequence(i, i, SamplingParams()), *tables])

    @torch.inference_mode()
    def run(self, *parts, drafts=0):
        """Logits of the rows of parts (sequence, start, count), which are the text from there on."""
        states = []
        if drafts and KvGroup.RECURRENT in self.spec.kv_groups():
            states = [parts[0][0], *range(STREAMS, STREAMS + drafts)]
        slices = [Slice(s, at, self.ids[at : at + n], True, drafts, states) for s, at, n in parts]
        rows = None if self.rows is None else torch.cat([self.rows[at : at + n] for _, at, n in parts])
        out = self.stage.forward(Step(0, 0, [], slices), rows)
        return self.stage.logits(out.rows, None)

    def seconds(self, *parts):
        synchronize(self.stage.device)
        began = time.perf_counter()
        self.run(*parts)[-1].argmax().item()
        return time.perf_counter() - began

    def differing(self):
        """Rows with other bits, by how they were computed."""
        self.open()
        wanted = self.run((0, 0, LENGTH)).clone()
        ways = {"chunks of 64": self.chunks, "beside 31 streams": self.beside, "verified": self.verified}
        found = {}
        for name, way in ways.items():
            self.open()
            found[name] = int((way() != wanted).any(dim=-1).sum())
        return found

    def chunks(self):
        return torch.cat([self.run((0, at, 64)).clone() for at in range(0, LENGTH, 64)])

    def beside(self):
        others = range(1, STREAMS)
        rows = [self.run(*((s, at, 1) for s in others), (0, at, 1))[-1:].clone() for at in range(LENGTH)]
        return torch.cat(rows)

    def verified(self):
        rows, at = [self.run((0, 0, 62)).clone()], 62
        while at < LENGTH:
            n = min(1 + DRAFTS, LENGTH - at)
            rows.append(self.run((0, at, n), drafts=n - 1).clone())
            if n > 1 and KvGroup.RECURRENT in self.spec.kv_groups():
                self.stage.apply([UseState(0, STREAMS + n - 2)])
            at += n
        return torch.cat(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prepare(Backend(options.device), options.threads)
    spec = open_spec(options.model.resolve())
    arms = {name: Arm(spec, options, deterministic=name == "deterministic") for name in ("default", "deterministic")}
    record = {**conditions(), "model": spec.name, "layers": options.layers or spec.n_layers, "dtype": options.dtype,
              "threads": torch.get_num_threads(), "ms": {}, "rows_that_differ": {}}  # fmt: skip
    cases = {"1 stream": [(0, LENGTH, 1)], "32 streams": [(s, LENGTH, 1) for s in range(STREAMS)],
             "512 of a prompt": [(0, 0, LENGTH)], "512 behind 3,584": [(0, MOST - LENGTH, LENGTH)]}  # fmt: skip
    for arm in arms.values():
        arm.open()
    for name, parts in cases.items():
        times = {arm: [] for arm in arms}
        for i in range(options.rounds + 3):
            for arm in arms if i % 2 else reversed(arms):
                taken = 1e3 * arms[arm].seconds(*parts)
                if i >= 3:  # graphs are captured, and kernels compiled
                    times[arm].append(taken)
        ms = record["ms"][name] = {arm: statistics.median(found) for arm, found in times.items()}
        ratio = ms["deterministic"] / ms["default"]
        print(
            f"{name}: {ms['default']:.2f} ms, deterministic {ms['deterministic']:.2f} ms, {ratio:.2f} times", flush=True
        )
    for name, arm in arms.items():
        record["rows_that_differ"][name] = found = arm.differing()
        print(f"{name}: of {LENGTH} rows differ", ", ".join(f"{way}: {n}" for way, n in found.items()), flush=True)
    if options.json is not None:
        write_json(options.json, record)


if __name__ == "__main__":
    main()
