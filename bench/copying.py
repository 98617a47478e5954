"""How fast a model copies a document: lookups as long as a slice takes, beside lookups as long as the drafter's block.

    python bench/copying.py --devices cuda:0 [--drafter dflash2] [--document 25000] [--save]
    python bench/copying.py --devices cpu:0 --model qwen2.5-coder-0.5b.gguf --text FILE --document 1500

Without --model the target is a counting model (bench/make_gguf.py): its prompt is a document of consecutive numbers and
the first numbers of it again, so that the answer copies what follows them.  The drafter's own tokens mean nothing;
--right of each block are replaced by right ones.  With --model (and --draft, its drafter) the document is a text, and
nothing is replaced.  Both lengths are measured in turns in one service, --repeats times after one that compiles and
captures.  Printed and saved: tokens/s from the first token to the last, and tokens a step.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import uvloop
from full_size import write_config
from model_shapes import SHAPES
from records import RESULTS, conditions, write_json
from services import running
from speculation import await_drafter, file_of, forced_drafts, offer

from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.tokenizer import Tokenizer

BEGINNING = 16  # tokens of the document that the prompt ends with
FIRST = 300  # the document's first number


def make_right(drafting, right, vocabulary):
    """Replace the first ``right`` tokens of each of the drafter's blocks by those that the model will count."""

    def forced(one):
        offered = forced_drafts(drafting, one, right, vocabulary)
        return drafting.speculation.candidates(one.record.drafts, offered, drafting._n_decoding)

    offer(drafting, forced)


def document_of(model, options):
    """The tokens to copy."""
    if options.text is None:
        return [(FIRST + i) % model.spec.vocabulary for i in range(options.document)]
    tokenizer = Tokenizer.from_gguf(model.spec.files.metadata)
    return tokenizer.encode(options.text.read_text())[: options.document]


async def copy(service, name, document, n_tokens):
    """Tokens/s of a copy, and how many of its tokens are the document's, up to the first other one."""
    request = GenerationRequest(
        request_id=name, prompt=(*document, *document[:BEGINNING]), max_tokens=n_tokens,
        sampling=SamplingParams(temperature=0.0),
    )  # fmt: skip
    tokens, times = [], []
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
                times.append(time.perf_counter())
    wanted = document[BEGINNING : BEGINNING + n_tokens]
    n_right = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), len(tokens))
    return (len(times) - 1) / (times[-1] - times[0]), n_right


def n_decodes(engine):
    """Decodes until now, with drafts or without."""
    drafts = engine.statistics().drafts
    return drafts.n_plain + drafts.n_verify


async def measure(service, options):
    engine = service.only.engine
    drafting = engine.core.scheduler.drafting
    controller = drafting.speculation
    document = document_of(service.only.model, options)
    if options.model is None:
        make_right(drafting, options.right, service.only.model.spec.vocabulary)
    lengths = {"block": controller.max_drafts, "slice": controller.max_lookup}
    rates, steps, right = defaultdict(list), defaultdict(list), []
    for turn in range(options.repeats + 1):
        for name, length in lengths.items():
            controller.max_lookup, n_before = length, n_decodes(engine)
            rate, n_right = await copy(service, f"{name}-{turn}", document, options.tokens)
            n_steps = n_decodes(engine) - n_before
            if turn:
                rates[name].append(rate)
                steps[name].append(options.tokens / n_steps)
                right.append(n_right)
    return {
        "most_drafts": lengths,
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "tokens_per_step": {name: statistics.median(values) for name, values in steps.items()},
        "all_tokens_per_s": rates,
        "copied": right,
    }


async def serve(config, run_dir, options):
    async with running(config, run_dir, timeout_s=options.timeout) as service:
        if options.drafter != "none":
            await await_drafter(service)
        return await measure(service, options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-27b", choices=SHAPES)
    parser.add_argument("--drafter", default="dflash2", choices=["none", "mtp", "dflash2"], help="of --shape")
    parser.add_argument("--model", type=Path, help="a GGUF file in place of --shape, which copies --text")
    parser.add_argument("--draft", type=Path, help="its drafter")
    parser.add_argument("--text", type=Path, help="the document")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="BACKEND:INDEX, one daemon each")
    parser.add_argument("--files", type=Path, help="folder of the GGUF files: used when there, else made and kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the configuration")
    parser.add_argument("--document", type=int, default=25000, help="tokens of the document")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens that are copied")
    parser.add_argument("--right", type=int, default=5, help="right ones of the drafter's tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start")
    parser.add_argument("--save", action="store_true", help="write bench/results/copying-SHAPE-DRAFTER.json")
    options = parser.parse_args()
    if options.model is not None:
        options.shape, options.drafter = options.model.stem, options.draft.stem if options.draft is not None else "none"
    if options.files is not None:
        options.files.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="copying-", dir=options.files) as folder:
        directory = Path(folder)
        files = options.files or directory
        shape = f"{options.shape}-mtp" if options.drafter == "mtp" else options.shape
        target = options.model or file_of(shape, files, counting=True)
        draft = options.draft
        if options.drafter == "dflash2":
            draft = file_of(f"{options.shape}-dflash2", files, counting=False)
        n_tokens = options.document + BEGINNING + options.tokens + 64
        settings = [f"engine.max_context={n_tokens}", *options.set]
        settings.append(f"draft.kind={'lookup' if options.drafter == 'none' else 'auto'}")
        settings += [f"draft.path={draft}"] if draft is not None else []
        config = write_config(directory / "copying.toml", target, options.devices, settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server runs
            found = runner.run(serve(config, directory, options))
    found = {"shape": options.shape, "drafter": options.drafter, "devices": options.devices} | found
    found |= {"document": options.document, "tokens": options.tokens, "right": options.right, **conditions()}
    for name, n_drafts in found["most_drafts"].items():
        rate, per_step = found["tokens_per_s"][name], found["tokens_per_step"][name]
        print(f"lookups of {n_drafts}: {rate:.1f} tokens/s, {per_step:.2f} tokens a step")
    print(f"copied before another token: {found['copied']} of {options.tokens}")
    if options.save:
        write_json(RESULTS / f"copying-{options.shape}-{options.drafter}.json", found)


if __name__ == "__main__":
    main()
