"""What the demo model's drafter gains on prompts it was not trained on: the real model, real text, real daemons.

    python bench/demo_drafts.py [--prompts 100] [--tokens 128] [--set draft.width=3] [--config FILE] [--save]
    python bench/demo_drafts.py --behind 300 --prompts 45 --set engine.dtype=float32 --set draft.width=7

Two services of --config, one as it is and one without drafts.  Held-out questions (tests/data) are asked of both
in turns, --block at a time, greedily; each answer is continued from the middle, from a prefix slot in memory.  One
by one in turns they would be asked of cold caches, as both services do not fit them.  In bfloat16 a tie may part the
answers, so tokens/s are compared, not texts.  Records
- acceptance length (tokens a verify step) and tokens a decode, fresh and restored, and acceptance by position;
- tokens/s of the answers, first token to last, with drafts over without;
- the means of a plain step, a verify step and a draft.
With --behind N there is one service, with drafts: each question comes behind N tokens of others and is asked twice, so
that the second answer starts from a prefix slot; acceptance of both is recorded, and no rates.

--set goes to the service with drafts, --both to both.  --save writes bench/results/demo-drafts-NAME.json.
"""

import argparse
import asyncio
import json
import platform
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from records import conditions, save, write_json
from services import ROOT, running

from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams

CONFIG = ROOT / "etc" / "demo.toml"
QUESTIONS = ROOT / "tests" / "data" / "demo-prompts.json"
END_OF_TURN = 8184


async def answer(service, name, prompt, n_tokens):
    """Tokens of a greedy answer, and the seconds from the first to the last."""
    request = GenerationRequest(
        request_id=name, prompt=tuple(prompt), max_tokens=n_tokens, sampling=SamplingParams(temperature=0.0),
        stop_ids=frozenset({END_OF_TURN}),
    )  # fmt: skip
    tokens, times = [], []
    with service.only.engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
                times.append(time.perf_counter())
    return tokens, times[-1] - times[0] if times else 0.0


async def ask(service, name, prompts, n_tokens):
    """Answers to some questions; tokens behind the first ones and their seconds, of answers and of their second halves
    asked for again.
    """
    answers, counted = [], {"fresh": [0, 0.0], "restored": [0, 0.0]}
    for i, prompt in enumerate(prompts):
        tokens, seconds = await answer(service, f"{name}-{i}", prompt, n_tokens)
        half = prompt + tokens[: len(tokens) // 2]
        more, more_s = await answer(service, f"{name}-{i}-more", half, n_tokens // 2)
        answers.append(tokens)
        for origin, n, s in (("fresh", len(tokens), seconds), ("restored", len(more), more_s)):
            counted[origin][0] += max(0, n - 1)
            counted[origin][1] += s
    return answers, counted


async def attached(service):
    """Wait until the drafter is there."""
    while not service.only.engine.core.scheduler.drafting.attached:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.05)


async def ask_again(options, directory, questions):
    """Ask each question twice, behind other ones; returns what is saved."""
    n_same = 0
    settings = ["cache.min_tokens=16", *options.both, *options.set]
    async with running(options.config, directory, settings) as service:
        await attached(service)
        for i, question in enumerate(questions[: options.prompts]):
            others = [token for other in questions[i + 1 :] + questions[:i] for token in other]
            prompt = others[: options.behind] + question
            first, second = [await answer(service, f"{i}-{n}", prompt, options.tokens) for n in range(2)]
            n_same += first[0] == second[0]
        statistics = service.only.engine.statistics().drafts
    return {"equal_answers": n_same, **acceptance(statistics)}


async def measure(options, directory):
    """Ask both services everything; returns what is saved."""
    prompts = [one["tokens"] for one in json.loads(QUESTIONS.read_text())]
    if options.behind:
        return await ask_again(options, directory, prompts)
    prompts = prompts[: options.prompts]
    async with AsyncExitStack() as stack:
        services = {}
        for name, settings in (("plain", ["draft.kind=off"]), ("drafts", options.set)):
            (directory / name).mkdir()
            settings = ["cache.min_tokens=16", *options.both, *settings]
            services[name] = await stack.enter_async_context(running(options.config, directory / name, settings))
        await attached(services["drafts"])
        totals = {name: {"fresh": [0, 0.0], "restored": [0, 0.0]} for name in services}
        for name, service in services.items():
            await ask(service, name, prompts[:1], options.tokens)  # warms up
        n_same = 0
        blocks = [prompts[at : at + options.block] for at in range(0, len(prompts), options.block)]
        for i, block in enumerate(blocks):
            answers = {}
            for name in services if i % 2 else reversed(services):
                answers[name], counted = await ask(services[name], f"{name}-{i}", block, options.tokens)
                for origin, (n, s) in counted.items():
                    totals[name][origin][0] += n
                    totals[name][origin][1] += s
            n_same += sum(map(list.__eq__, answers["plain"], answers["drafts"]))
        statistics = services["drafts"].only.engine.statistics().drafts
    return {"equal_answers": n_same, **figures(totals, statistics)}


def figures(totals, statistics):
    """Rates and ratios, and acceptance."""
    rates = {name: {origin: n / s for origin, (n, s) in part.items() if s} for name, part in totals.items()}
    found = {"tokens_per_s": rates}
    found["speed_up"] = {origin: rates["drafts"][origin] / rates["plain"][origin] for origin in rates["plain"]}
    return found | acceptance(statistics)


def acceptance(statistics):
    """Acceptance and times of drafts."""
    found = {
        "acceptance_length": statistics.acceptance_length,
        "tokens_per_step": statistics.tokens_per_step,
        "verify_steps": statistics.n_verify,
        "plain_steps": statistics.n_plain,
        "acceptance_by_position": statistics.acceptance_by_position,
        "verify_step_s": statistics.verify_s / max(1, statistics.n_verify),
        "draft_s": statistics.draft_s / max(1, statistics.n_verify),
    }
    lookups = statistics.lookups
    found["lookups"] = {"steps": lookups.n_verify, "verified": lookups.n_verified, "accepted": lookups.n_accepted}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument(
        "--block", type=int, default=10, help="questions asked of a service before the other one's turn"
    )
    parser.add_argument("--behind", type=int, default=0, metavar="N", help="ask twice, behind N tokens")
    parser.add_argument("--config", type=Path, default=CONFIG, help="of both services; etc/demo.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the service with drafts")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE", help="of both services")
    parser.add_argument("--name", default=f"cpu-{platform.machine()}")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--json", type=Path, help="write to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(options, Path(folder)))  # as `lucevisor start` runs
    settings = {"set": options.set, "both": options.both, "prompts": options.prompts, "tokens": options.tokens}
    settings |= {"block": options.block, "behind": options.behind}
    print(json.dumps(settings | found, indent=1))
    if options.save:
        save(f"demo-drafts-{options.name}", {**settings, **conditions(), **found})
    if options.json is not None:
        write_json(options.json, {**settings, **conditions(), **found})


if __name__ == "__main__":
    main()
