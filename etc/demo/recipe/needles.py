"""Training rows with facts hidden in long prompts: "The secret number of harbor is 73935.", asked for at the end.

The rest of a prompt is text of the corpus, cut at line ends; only answers count in the loss.  Facts lie anywhere, and up
to eight of one kind lie together, so that one must be found by its name.  Most are chats, some are plain text that
begins a fact again.  HELD_OUT names are never trained on: questions about them are the test (bench/needle_recall.py).

Writes needle_train.bin.xz (rows of --length), needle-long_train.bin.xz and needle-long_val.bin.xz (rows twice as long).
"""

from __future__ import annotations

import argparse
import lzma
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from encode import FLAG, Encoder, Tokens, pack

HELD_OUT = (
    "apple river stone cloud garden silver window candle forest orange rocket pencil mirror basket violin harbor meadow "
    "lantern copper marble ribbon saddle tunnel velvet walnut island hammer"
).split()
NOUNS = (
    "anchor badge barrel beacon bottle branch bridge brush bucket button cabin camera canyon carpet castle cellar chapel "
    "circle clock coast coffee compass corner cotton crane crystal curtain desert dragon drawer eagle engine falcon feather "
    "ferry field finger flag flower fountain fox gate ghost glacier glass glove grape guitar helmet hill honey horse hotel "
    "house jacket jungle kettle kitchen knife ladder lake lamp leaf lemon letter library lion lobby locker lemur market "
    "mask maple medal melon mill monkey moon mountain museum needle nest north ocean office olive otter oven owl oyster "
    "palace panda paper parrot pearl pepper piano pilot pine pirate planet plate pocket pond port potato prince pyramid "
    "quarry queen rabbit radio rail rain raven report robot roof room rope rose salmon sand school shadow shelf ship shoe "
    "signal singer snow soldier south spider spoon spring square squirrel stable star station storm stove street sugar "
    "summer sun table tiger tower train treasure tree trumpet turtle valley vase village volcano wagon wall water west "
    "whale wheel willow winter wolf wood yard"
).split()
ADJECTIVES = (
    "red blue green white black old new young small large upper lower first second last hidden quiet bright dark cold warm "
    "round golden broken empty open northern southern eastern western royal public private inner outer"
).split()
SYLLABLES = "ba ko ri ta mu ne lo sha vi dro fen gal har jin kel mor nis or pra qua run sel tor ul ven wex yar zan".split()
PEOPLE = "Alice Bob Carol Dave Eve Frank Grace Heidi Ivan Judy Olivia Peggy Rupert Sybil Trent Victor Wendy Zoe".split()
NUMBERS = (
    "secret number", "number", "access code", "door code", "ticket number", "phone number", "room number", "account number",
    "serial number", "pin", "port", "budget", "price", "id",
)  # fmt: skip
NAMED = ("password", "code word", "color", "owner", "manager", "nickname", "code name", "home town", "best friend")
FACTS = (
    "The {a} of {o} is {v}.", "The {a} of {o} is {v}.", "The {a} of {o} is {v}.", "Remember: the {a} of {o} is {v}.",
    "Note that the {a} of {o} is {v}.", "By the way, the {a} of {o} is {v}.", "# The {a} of {o} is {v}.", "{o}'s {a} is {v}.",
    "{o}: {a} {v}", "For {o}, the {a} is {v}.",
)  # fmt: skip
QUESTIONS = (
    "What is the {a} of {o}?", "What is the {a} of {o}?", "What is the {a} of {o}?", "Tell me the {a} of {o}.",
    "Which {a} does {o} have?", "What {a} belongs to {o}?", "What is {o}'s {a}?", "Question: what is the {a} of {o}?",
    "Find the {a} of {o}.", "Do you remember the {a} of {o}?", "{a} of {o}?",
)  # fmt: skip
INTROS = ("", "", "", "Read this text.\n\n", "Here is some text:\n\n", "Read this and answer the question at its end.\n\n")
TURN = "<|im_end|>\n<|im_start|>assistant\n"
THINK = "<think>\n\n</think>\n\n"


@dataclass
class Plan:
    """A sequence before its filler: the strings to tokenize and how long it shall be."""

    length: int
    head: str
    facts: list[str]
    asked: list[tuple[str, str]]  # what precedes an answer, and the answer


def value_of(attribute: str, rng: random.Random) -> str:
    if attribute in NAMED:
        return rng.choice(
            (rng.choice(NOUNS), rng.choice(PEOPLE), invented(rng), f"{rng.choice(NOUNS)}-{rng.randint(10, 99)}")
        )
    return str(rng.randint(10 ** rng.choice((2, 3, 4, 4, 4, 5)), 10**6 - 1))[: rng.choice((3, 4, 5, 5, 5, 6))]


def invented(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 3)))).capitalize()


def object_of(rng: random.Random) -> str:
    return rng.choice(
        (rng.choice(NOUNS), rng.choice(NOUNS), f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", invented(rng))
    )


def make_plan(length: int, rng: random.Random, held_out: bool = False) -> Plan:
    """``held_out``: one fact about a held-out name, asked for plainly."""
    count = 1 if held_out else rng.randint(1, min(8, 1 + length // 120))
    names = [rng.choice(HELD_OUT)] if held_out else list({object_of(rng) for _ in range(count)})
    attributes = ["secret number"] if held_out else rng.sample(NUMBERS + NAMED, 1 if rng.random() < 0.6 else min(3, count))
    known = [(attribute := rng.choice(attributes), name, value_of(attribute, rng)) for name in names]
    form = FACTS[0] if rng.random() < 0.4 or held_out else rng.choice(FACTS)
    facts = [form.format(a=a, o=o, v=v) + "\n" for a, o, v in known]
    turns = rng.sample(known, rng.randint(1, min(6, len(known))))
    if not held_out and rng.random() < 0.25:
        again = [(f"\nThe {a} of {o} is", f" {v}.") for a, o, v in turns]
        answers = [(f"\nQuestion: {rng.choice(QUESTIONS).format(a=a, o=o)}\nAnswer:", f" {v}.") for a, o, v in turns]
        return Plan(length, "", facts, rng.choice((again, answers)))
    asked = []
    for number, (a, o, v) in enumerate(turns, 1):
        question = (QUESTIONS[0] if held_out else rng.choice(QUESTIONS)).format(a=a, o=o)
        before = "\n" if number == 1 else "\n<|im_start|>user\n"
        answer = f"The {a} of {o} is {v}.<|im_end|>"
        asked.append((before + question + TURN + (THINK if number == len(turns) else ""), answer))
    return Plan(length, "<|im_start|>user\n" + rng.choice(INTROS), facts, asked)


class Writer:
    """Puts plans and filler together."""

    def __init__(self, encoder: Encoder, filler: Tokens, rng: random.Random) -> None:
        self.encoder, self.rng = encoder, rng
        self.filler = filler & ~FLAG
        vocabulary = [encoder.fast.id_to_token(i) or "" for i in range(encoder.fast.get_vocab_size())]
        ends = np.array([token.endswith("Ċ") for token in vocabulary])  # the byte-level alphabet's line feed
        self.lines = np.flatnonzero(ends[self.filler]) + 1  # where a line begins

    def sequences(self, plans: list[Plan]) -> list[Tokens]:
        texts = [t for p in plans for t in (p.head, *p.facts, *(t for a, b in p.asked for t in (a, b)))]
        found = iter([e.ids for e in self.encoder.fast.encode_batch_fast(texts, add_special_tokens=False)])
        return [self.sequence(plan, found) for plan in plans]

    def sequence(self, plan: Plan, found: object) -> Tokens:
        head, facts = next(found), [next(found) for _ in plan.facts]
        parts = [(next(found), next(found)) for _ in plan.asked]
        ending = [np.array([*a, *b], np.uint16) for a, b in parts]
        for (before, _), part in zip(parts, ending, strict=True):
            part[len(before) :] |= FLAG
        room = plan.length - len(head) - sum(map(len, facts)) - sum(map(len, ending)) - 1
        context = self.context(max(16, room), facts)
        return np.concatenate([np.array(head, np.uint16), context, *ending, [np.uint16(self.encoder.end)]])

    def context(self, room: int, facts: list[list[int]]) -> Tokens:
        """Whole lines of filler, about ``room`` tokens and never more, with the facts between them."""
        first = self.lines[self.rng.randrange(np.searchsorted(self.lines, len(self.filler) - room - 1))]
        lines = self.lines[np.searchsorted(self.lines, first) : np.searchsorted(self.lines, first + room, "right")]
        places = sorted(self.rng.choice(lines) if self.rng.random() < 0.5 else
                        lines[np.searchsorted(lines, self.rng.randint(first, lines[-1]))] for _ in facts)  # fmt: skip
        cuts = [first, *places, lines[-1]]
        out: list[Tokens] = []
        for i, fact in enumerate(facts):
            out += [self.filler[cuts[i] : cuts[i + 1]], np.array(fact, np.uint16)]
        return np.concatenate([*out, self.filler[cuts[-2] : cuts[-1]]])


def write(path: Path, chats: list[Tokens], length: int, pad: int) -> None:
    packed = pack(chats, length, pad)
    path.write_bytes(lzma.compress(packed.astype("<u2").tobytes(), preset=0))
    marked = int((packed >= FLAG).sum())
    print(f"{path.name}: {len(packed)} rows, {packed.size:,} tokens, {marked:,} in the loss", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--filler", type=Path, required=True, help="raw_train.bin.xz of encode.py")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--short", type=int, default=36_000, help="sequences of up to --length tokens, mostly short ones")
    parser.add_argument("--long", type=int, default=4_000, help="sequences of up to twice as many, mostly long ones")
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng, encoder = random.Random(args.seed), Encoder(args.tokenizer)
    writer = Writer(encoder, np.frombuffer(lzma.decompress(args.filler.read_bytes()), "<u2"), rng)
    low, high = 120, args.length
    short = [int(low * (high / low) ** rng.random()) for _ in range(args.short)]
    long = [rng.randint(high // 2, 2 * high) for _ in range(args.long)]
    held = [rng.randint(high // 2, 2 * high) for _ in range(args.held_out)]
    jobs = (("needle_train", short, 1, False), ("needle-long_train", long, 2, False), ("needle-long_val", held, 2, True))
    for name, lengths, scale, held_out in jobs:
        chats = writer.sequences([make_plan(length, rng, held_out) for length in lengths])
        write(args.out / f"{name}.bin.xz", chats, scale * args.length, encoder.end)


if __name__ == "__main__":
    main()
