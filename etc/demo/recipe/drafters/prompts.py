"""Tokenize the drafters' prompts: chats cut before an assistant turn, chats about recombined names, raw text.

A drafter must follow the target where it knows the answer by heart and where it invents one. So some of the training
prompts are the target's own training chats, and most are such chats with the names of their objects replaced by names
that do not exist (the module of one object, the last part of another). The hold-out rule is
build_corpus.py's: a chat about a held-out object gives a held-out prompt, and a training prompt that mentions one is dropped.

Writes docs_train.bin.xz (the documentation, as encode.py would), held-out.json for tests, and prompts.npz: ``tokens``
(uint16), ``starts`` (offsets, n + 1), ``expected`` (length of the corpus's answer, to batch prompts of like length),
``kinds`` and ``split`` (0 train, 1 held out).
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

MAX_PROMPT = 640
Chat = dict[str, Any]


class Renderer:
    """Chats to token ids, as the server renders them."""

    def __init__(self, folder: Path) -> None:
        self.hf = PreTrainedTokenizerFast.from_pretrained(folder)

    def text(self, chat: Chat, stop: int) -> str:
        return self.hf.apply_chat_template(
            chat["messages"][:stop],
            tools=chat["tools"] or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=chat["thinking"],
        )

    def ids(self, texts: list[str]) -> list[list[int]]:
        found = self.hf.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [e.ids for e in found]


def turns(chat: Chat) -> list[int]:
    return [i for i, m in enumerate(chat["messages"]) if m["role"] == "assistant"]


def answer_chars(chat: Chat, turn: int) -> int:
    message = chat["messages"][turn]
    return len(json.dumps({k: v for k, v in message.items() if k != "role"}))


def recombine(chat: Chat, names: list[str], titles: list[str], rng: random.Random) -> tuple[Chat, str]:
    """The chat about something that does not exist, and its name: the module of one object and the last part of another,
    or the beginning of one section's title and the end of another's."""
    topic = chat["topic"]
    if chat["kind"] == "section":
        first, second = (rng.choice(titles).split() for _ in range(2))
        new = " ".join(first[: (len(first) + 1) // 2] + second[len(second) // 2 :])
        swaps = [(topic.rstrip("?."), new.rstrip("?.")), (topic.rstrip("?.").lower(), new.rstrip("?.").lower())]
    else:
        new = f"{rng.choice(names).rpartition('.')[0]}.{rng.choice(names).rpartition('.')[2]}"
        (old_owner, _, old_last), (new_owner, _, new_last) = topic.rpartition("."), new.rpartition(".")
        swaps = [(topic, new), (old_last, new_last), (old_owner, new_owner)]

    def swap(text: str) -> str:
        for old, fresh in swaps:
            if len(old) > 2:
                text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", lambda _, to=fresh: to, text)
        return text

    messages = [
        {**m, "content": swap(m["content"])} if m["role"] in {"user", "tool", "assistant"} else m
        for m in chat["messages"]
    ]
    return {**chat, "messages": messages}, new


def raw_prompts(path: Path, tokenizer: Renderer, count: int, rng: random.Random) -> list[list[int]]:
    with path.open() as file:
        lines = [line for line in file if not json.loads(line)["val"]]
    texts = []
    for line in rng.choices(lines, k=count):
        text = json.loads(line)["text"]
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        texts.append(text[start : start + 1200])
    return [ids[: rng.randint(16, 160)] for ids in tokenizer.ids(texts) if len(ids) > 160]


def write_docs(corpus: Path, path: Path, tokenizer: Renderer, length: int) -> None:
    """The documentation as encode.py writes texts: pieces of ``length`` tokens, all of which count."""
    end = tokenizer.hf.convert_tokens_to_ids("<|endoftext|>")
    with (corpus / "raw.jsonl").open() as file:
        texts = [row["text"] for row in map(json.loads, file) if row["kind"] == "docs" and not row["val"]]
    rows = [ids[a : a + length] for ids in tokenizer.ids(texts) for a in range(0, len(ids), length)]
    tokens = np.array([t | 0x8000 for row in rows for t in (*row, end)], "<u2")
    path.write_bytes(lzma.compress(tokens.tobytes(), preset=9))
    print(f"{path.name}: {len(rows):,} pieces, {len(tokens):,} tokens, {path.stat().st_size:,} bytes")


def read_chats(path: Path) -> tuple[list[Chat], list[Chat]]:
    train: list[Chat] = []
    held: list[Chat] = []
    with path.open() as file:
        for line in file:
            chat = json.loads(line)
            (held if chat["val"] else train).append(chat)
    return train, held


def mentions(text: str, held_words: set[str]) -> bool:
    return not held_words.isdisjoint(re.findall(r"[A-Za-z_][\w.]*\w", text))


def choose(
    train: list[Chat], held: list[Chat], args: argparse.Namespace, rng: random.Random
) -> tuple[list[tuple[str, Chat, int]], list[tuple[str, Chat, int]]]:
    """(kind, chat, turn) of training and of held-out prompts."""
    topics = {c["topic"] for c in held if c["topic"]}
    held_words = {t for t in topics if "." in t or len(t) > 8}
    names = sorted({c["topic"] for c in train if re.fullmatch(r"[\w.]+\.\w+", c["topic"] or "")})
    picked = rng.sample(train, min(args.chats, len(train)))
    chosen = [(c["kind"], c, rng.choice(turns(c))) for c in picked]
    named = [c for c in train if re.fullmatch(r"[\w.]+\.\w+", c["topic"] or "")]
    sections = [c for c in train if c["kind"] == "section"]
    titles = sorted({c["topic"] for c in sections})
    for chat in rng.choices(named, k=args.recombined - args.recombined // 8) + rng.choices(
        sections, k=args.recombined // 8
    ):
        fresh, name = recombine(chat, names, titles, rng)
        if name not in topics:
            chosen.append(("recombined", fresh, rng.choice(turns(fresh))))
    chosen = [x for x in chosen if not any(mentions(m["content"], held_words) for m in x[1]["messages"][: x[2]])]
    # the numbered chats (tools, expressions) are held out by their place in the corpus, which may differ between builds
    rng = random.Random(1)  # whatever was drawn before and whichever seed
    about = [c for c in held if c["topic"]]
    rng.shuffle(about)
    return chosen, [(c["kind"], c, rng.choice(turns(c))) for c in about[: args.held_out]]


def write_tests(path: Path, rows: list[tuple[str, Chat, int]], ids: list[list[int]], count: int) -> None:
    """Held-out prompts as chats and as token ids, for tests of the product."""
    out = []
    for (kind, chat, turn), tokens in list(zip(rows, ids, strict=True))[:count]:
        entry = {
            "kind": kind,
            "object": chat["topic"],
            "messages": chat["messages"][:turn],
            "thinking": chat["thinking"],
        }
        out.append({**entry, **({"tools": chat["tools"]} if chat["tools"] else {}), "tokens": tokens})
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in out)
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by build_corpus.py")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=20_000)
    parser.add_argument("--recombined", type=int, default=120_000)
    parser.add_argument("--raw", type=int, default=4_000)
    parser.add_argument("--held-out", type=int, default=1024)
    parser.add_argument("--tests", type=int, default=100, help="held-out prompts in held-out.json")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng, renderer = random.Random(args.seed), Renderer(args.tokenizer)
    write_docs(args.corpus, args.out / "docs_train.bin.xz", renderer, 300)
    train, held = choose(*read_chats(args.corpus / "chat.jsonl"), args, rng)

    rows: list[tuple[list[int], int, str, int]] = []  # ids, expected answer tokens, kind, split
    seen: set[tuple[int, ...]] = set()
    for split, part in enumerate((train, held)):
        ids = [
            i
            for n in range(0, len(part), 5000)
            for i in renderer.ids([renderer.text(c, t) for _, c, t in part[n : n + 5000]])
        ]
        if split:
            write_tests(args.out / "held-out.json", part, ids, args.tests)
        for (kind, chat, turn), tokens in zip(part, ids, strict=True):
            if len(tokens) <= MAX_PROMPT and tuple(tokens) not in seen:
                seen.add(tuple(tokens))
                rows.append((tokens, answer_chars(chat, turn) // 4, kind, split))
    for tokens in raw_prompts(args.corpus / "raw.jsonl", renderer, args.raw, rng):
        rows.append((tokens, 10_000, "raw", 0))
    np.savez_compressed(
        args.out / "prompts.npz",
        tokens=np.concatenate([np.array(r[0], np.uint16) for r in rows]),
        starts=np.cumsum([0] + [len(r[0]) for r in rows]),
        expected=np.array([r[1] for r in rows], np.int32),
        kinds=np.array([r[2] for r in rows]),
        split=np.array([r[3] for r in rows], np.uint8),
    )
    lengths = np.array([len(r[0]) for r in rows])
    print(f"{len(rows):,} prompts, {lengths.sum():,} tokens, longest {lengths.max()}, mean {lengths.mean():.0f}")


if __name__ == "__main__":
    main()
