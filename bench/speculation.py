"""What speculative decoding costs and gains on a full-size shape: random weights, known acceptance, real daemons.

    python bench/speculation.py --devices cuda:0 [cuda:0] --drafters none mtp dflash2 [--json PATH | --save] [--resume]

The target is a counting model (bench/make_gguf.py): its next token is the last one plus 1, so the benchmark can replace
the drafts, whose own tokens mean nothing, by ones of which as many are right as --accepted asks for.  Drafter and
verify steps run as always.  In one run of the service, for each drafter:
- plain decoding of one stream, and steps of 1, 4, 8 and 16 rows: medians of the stages' compute time;
- a draft: median of the draft stage's compute time; what a round takes beside its step and its drafts;
- tokens/s of one stream at each acceptance length, over those without;
- tokens/s of --streams streams with the adaptive width, drafts right and drafts useless, over those without.
"none" is the service without a drafter, which the others are compared with; where it is not asked for, it is plain
decoding beside the drafter.  Every kind is measured --repeats times in turns; medians.  A device named twice gets two
daemons.  --resume measures what the file of --json or --save does not have yet.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import structlog
import uvloop
from full_size import write_config
from make_gguf import SHAPES, write
from records import RESULTS, conditions, write_json
from services import running

from lucevisor.app.run import freeze_gc
from lucevisor.engine.drafting import placeholder_drafts
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.engine.spec_decode.controller import MAX_SUSPEND_STEPS, SpecDecodeController
from lucevisor.engine.step import ScheduledSlice
from lucevisor.protocol.steps import Drafted, SamplingParams

VERIFIED = (1, 4, 8, 16)  # rows
WIDTHS = {"mtp": 15, "dflash2": 7}  # the most drafts of a step


class FixedWidth(SpecDecodeController):
    """Drafts and verifies always as many tokens as it is told."""

    width = 0
    ahead = 0
    no_drafts = ""  # else the drafter is suspended after a while, and its drafts cost nothing

    def num_draft_tokens(self, own, n_decoding):
        return self.ahead

    def num_verify_tokens(self, drafts, n_decoding):
        return self.width


def forced_drafts(drafting, one, right, vocabulary, n=None):
    """Drafts in place of a slice's, of which the first ``right`` are what the model will count; ``n``: their number."""
    drafted, last = one.live.drafted or placeholder_drafts(drafting.outstanding, one.live), one.record.tokens[-1]
    n = len(drafted.tokens) if n is None else n
    return Drafted(one.live.sequence, [(last + 1 + i + (i >= right)) % vocabulary for i in range(n)])


def offer(drafting, candidates):
    """Have the scheduler verify the drafts that ``candidates`` returns for a slice."""
    drafting._candidates = candidates
    # The first of several stages waits for the drafter's own drafts before it computes those in their place.
    ScheduledSlice.drafts_pend = property(lambda one: len(one.drafts) > 0 and one.live.waiting_for_step > 0)


async def await_drafter(service):
    while not service.only.engine.core.scheduler.drafting.attached:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.1)


class Knob:
    """Replaces the drafts of a service's engine, and notes the times of its steps and drafts."""

    def __init__(self, service):
        self.drafting = service.only.engine.core.scheduler.drafting
        self.vocabulary = service.only.model.spec.vocabulary
        settings = self.drafting._settings
        # draft.width, for the widest step, fixes the service's
        self.adaptive, self.useless = (SpecDecodeController(settings.max_drafts, settings.kind) for _ in range(2))
        self.fixed = FixedWidth(settings.max_drafts)
        self.right = self.n_drafted = 0
        self.steps, self.drafts = defaultdict(list), defaultdict(list)
        applied, answered = self.drafting.on_step_applied, self.drafting.on_drafts

        def forced(one):
            own, n = one.record.drafts, self.fixed.width if self.drafting.speculation is self.fixed else None
            own.match_length, own.n_copied = 0, 0
            return forced_drafts(self.drafting, one, self.right, self.vocabulary, n)

        def noted(step, now, stages_s, upkeep_s, *, cold):
            sizes = {len(part.slice.tokens) for part in step.parts.values()}
            if step.only_decodes and len(sizes) == 1:
                self.steps[len(step.parts), sizes.pop()].append(stages_s)
            applied(step, now, stages_s, upkeep_s, cold=cold)

        def drafted(result):
            if result.drafts:
                self.n_drafted += 1
                self.drafts[len(result.drafts), len(result.drafts[0].tokens)].append(result.compute_s)
            return answered(result)

        self.drafting.on_step_applied, self.drafting.on_drafts = noted, drafted
        offer(self.drafting, forced)

    def resume(self):
        """Resume the drafter with the next step if it is suspended, else restart the count of its idle steps."""
        self.drafting.suspension._n_steps = MAX_SUSPEND_STEPS if self.drafting.suspended else 0

    def plain(self):
        self.resume()
        self.drafting.speculation, self.fixed.width, self.fixed.ahead = self.fixed, 0, 0

    @contextmanager
    def verify(self, width, accepted):
        """Verify ``width`` drafts a step, ``accepted`` - 1 of them right.  Raises RuntimeError if none are made."""
        self.resume()
        self.drafting.speculation, self.fixed.width, self.right = self.fixed, width, accepted - 1
        self.fixed.ahead, self.n_drafted = min(width, self.drafting._settings.max_drafts), 0
        yield
        if not self.n_drafted:
            raise RuntimeError(f"the drafter made none of {width} drafts a step: their cost is not in the rate")

    def adapt(self, accepted):
        self.resume()
        self.drafting.speculation = self.adaptive if accepted > 1 else self.useless
        self.right = accepted - 1


async def count(service, name, first, n_tokens):
    """Let the model count from ``first`` on: when each token came.  Raises RuntimeError for a wrong one."""
    vocabulary = service.only.model.spec.vocabulary
    prompt = tuple((first + i) % vocabulary for i in range(16))
    request = GenerationRequest(
        request_id=name, prompt=prompt, max_tokens=n_tokens, sampling=SamplingParams(temperature=0.0)
    )
    times = []
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if not isinstance(event, TokenEvent):
                break
            wanted = (prompt[-1] + 1 + len(times)) % vocabulary
            if event.token != wanted:
                raise RuntimeError(f"token {len(times)} of {name} is {event.token}, {wanted} is next")
            times.append(time.perf_counter())
    if len(times) != n_tokens:
        raise RuntimeError(f"request {name} gave {len(times)} tokens of {n_tokens}: {event}")
    return times


async def rate(service, name, streams, tokens):
    """Tokens/s of all streams while all of them decode: steps of fewer are captured before and behind."""
    began = time.perf_counter()
    runs = await asyncio.gather(*(count(service, f"{name}-{i}", 300 + 31 * i, tokens) for i in range(streams)))
    first, last = max(times[1] for times in runs), min(times[-2] for times in runs)
    if last <= first:
        spans = ", ".join(f"{times[0] - began:.3f} to {times[-1] - began:.3f}" for times in runs)
        raise RuntimeError(f"{name}: the streams never decode all at once: {spans} s")
    return sum(sum(first < t <= last for t in times) for times in runs) / (last - first)


async def measure_without(service, options):
    """Tokens/s of one stream and of many, of a service without a drafter."""
    rates = defaultdict(list)
    for turn in range(options.repeats + 1):
        if turn == 1:
            rates.clear()
        rates["plain"].append(await rate(service, f"plain-{turn}", 1, options.tokens))
        if options.streams > 1:
            rates["streams_plain"].append(await rate(service, f"many-{turn}", options.streams, options.tokens // 2))
    middle = {key: statistics.median(values) for key, values in rates.items()}
    return {"tokens_per_s": middle, "all_tokens_per_s": rates}


async def measure(service, options):
    """Everything of one drafter."""
    knob = Knob(service)
    most = knob.drafting._settings.max_drafts
    rates = defaultdict(list)
    for turn in range(options.repeats + 1):
        if turn == 1:  # the first round captures graphs
            rates.clear()
            knob.steps.clear()
            knob.drafts.clear()
        knob.plain()
        rates["plain"].append(await rate(service, f"plain-{turn}", 1, options.tokens))
        for rows in VERIFIED[1:]:
            if rows - 1 <= most:
                with knob.verify(rows - 1, 1):
                    await rate(service, f"rows-{rows}-{turn}", 1, options.tokens // 4)
        for accepted in options.accepted:
            width = max(options.width, accepted - 1)
            if width <= most:
                with knob.verify(width, accepted):
                    found = await rate(service, f"accepted-{accepted}-{turn}", 1, options.tokens)
                    rates[f"accepted_{accepted}"].append(found)
        if options.streams > 1:
            knob.plain()
            rates["streams_plain"].append(await rate(service, f"many-{turn}", options.streams, options.tokens // 2))
            knob.adapt(options.accepted[0])
            rates["streams"].append(await rate(service, f"adapt-{turn}", options.streams, options.tokens // 2))
            knob.adapt(1)
            rates["streams_useless"].append(await rate(service, f"vain-{turn}", options.streams, options.tokens // 2))
    middle = {key: statistics.median(values) for key, values in rates.items()}
    steps = {rows: statistics.median(knob.steps[1, rows]) for rows in VERIFIED if knob.steps[1, rows]}
    return {
        "tokens_per_s": middle,
        "all_tokens_per_s": rates,
        "step_s": steps,
        "step_ratio": {rows: seconds / steps[1] for rows, seconds in steps.items()},
        "draft_s": {n: statistics.median(values) for (b, n), values in knob.drafts.items() if b == 1},
        "all_draft_s": {f"{b}x{n}": statistics.median(values) for (b, n), values in knob.drafts.items()},
        "all_step_s": {f"{b}x{n}": statistics.median(values) for (b, n), values in knob.steps.items() if values},
    }


def compare(row, without):
    """Add what a drafter gains over the service without, or over plain decoding beside it."""
    rates, plain = row["tokens_per_s"], without["tokens_per_s"]
    row["speed_up"] = {k: v / plain["plain"] for k, v in rates.items() if k.startswith("accepted")}
    row["idle_ratio"] = rates["plain"] / plain["plain"]
    if "streams_plain" in plain:
        row["streams_ratio"] = {k: v / plain["streams_plain"] for k, v in rates.items() if k.startswith("streams")}


async def serve(config, run_dir, options, drafter):
    async with running(config, run_dir, timeout_s=options.timeout) as service:
        freeze_gc()
        if drafter == "none":
            return await measure_without(service, options)
        await await_drafter(service)
        return await measure(service, options)


def file_of(shape, directory, *, counting):
    path = directory / f"{shape}.gguf"
    if not path.exists():
        write(path, replace(SHAPES[shape](), counting=counting))
    return path


def run(options, directory, path):
    """One start of the service for each drafter; what was measured until then is printed, and written to ``path``."""
    found = {"shape": options.shape, "devices": options.devices, "settings": options.set, **conditions()}
    if options.resume and path is not None and path.exists():
        found = json.loads(path.read_text())
        if [found["shape"], found["devices"]] != [options.shape, options.devices]:
            raise SystemExit(f"{path} is of {found['shape']} on {found['devices']}: name another file")
    folder = options.files or directory
    target = file_of(f"{options.shape}-mtp", folder, counting=True)
    for drafter in options.drafters:
        if drafter in found:
            print("\n".join(summary(drafter, found[drafter])), flush=True)
            continue
        kind = {"none": "off", "mtp": "mtp"}.get(drafter, "dflash")
        settings = [*options.set, f"draft.kind={kind}", f"engine.max_sequences={max(8, options.streams)}"]
        if drafter in WIDTHS:
            settings.append(f"draft.width={WIDTHS[drafter]}")
        if kind == "dflash":
            settings.append(f"draft.path={file_of(f'{options.shape}-{drafter}', folder, counting=False)}")
        config = write_config(directory / f"{drafter}.toml", target, options.devices, settings)
        run_dir = directory / drafter
        run_dir.mkdir()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server runs
            found[drafter] = runner.run(serve(config, run_dir, options, drafter))
        if drafter != "none":
            compare(found[drafter], found.get("none", found[drafter]))
        print("\n".join(summary(drafter, found[drafter])), flush=True)
        if path:
            write_json(path, found)


def summary(drafter, row):
    rates = ", ".join(f"{k} {v:.1f}" for k, v in row["tokens_per_s"].items())
    yield f"{drafter}: tokens/s: {rates}"
    if drafter == "none":
        return
    yield "  step of n rows over 1: " + ", ".join(f"{n}: {r:.3f}" for n, r in row["step_ratio"].items())
    steps, drafts = ({int(n): s for n, s in row[key].items()} for key in ("step_s", "draft_s"))  # of a file: strings
    step, drafts = steps.get(8, steps[1]), sorted(drafts.items())
    yield "  draft over a step of 8 rows: " + ", ".join(f"{n}: {seconds / step:.3f}" for n, seconds in drafts)
    yield "  speed-up: " + ", ".join(f"{k}: {v:.2f}" for k, v in row["speed_up"].items())
    yield f"  not asked, over without: {row['idle_ratio']:.3f}"
    if "streams_ratio" in row:
        yield "  many streams over without: " + ", ".join(f"{k}: {v:.3f}" for k, v in row["streams_ratio"].items())


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-27b", choices=["qwen3.6-27b", "tiny-qwen3.6-27b"])
    drafters = ["none", "mtp", "dflash2"]
    parser.add_argument("--drafters", nargs="+", default=drafters, choices=drafters, help="none first")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="BACKEND:INDEX, one daemon each")
    parser.add_argument("--files", type=Path, help="folder of the GGUF files: used when there, else made and kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the configuration")
    parser.add_argument("--width", type=int, default=3, help="drafts a step, where no more are needed")
    parser.add_argument("--accepted", type=int, nargs="+", default=[3, 5, 8], help="tokens a verify step gives")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="tokens a sequence decodes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start")
    parser.add_argument("--save", action="store_true", help="write bench/results/speculation-SHAPE.json")
    parser.add_argument("--json", type=Path, help="write to this file")
    parser.add_argument("--resume", action="store_true", help="leave out the drafters that the file has")
    return parser.parse_args(arguments)


def main():
    options = parse(sys.argv[1:])
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    path = RESULTS / f"speculation-{options.shape}.json" if options.save else options.json
    if options.files is not None:
        options.files.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="speculation-", dir=options.files) as folder:
        run(options, Path(folder), path)


if __name__ == "__main__":
    main()
