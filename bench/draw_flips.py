"""Tokens drawn otherwise because a prompt was computed in other chunks: by the product's draws and by inverse sums.

    python bench/draw_flips.py [--device cpu|cuda] [--dtypes float32 bfloat16] [--model FILE] [--texts 16]
                               [--tokens 1024] [--chunks 512 64 1] [--seeds 8] [--json PATH]

The same texts are read in chunks of the first size and of each other size; every position that counts is drawn at
temperature 1 from both rows of logits with the same seed and position.  Printed: flips a token, beside the total
variation distance of the two distributions, which no way of drawing independently of the other row can undercut.
"""

import argparse
from datetime import UTC, datetime
from pathlib import Path

import torch
from perplexity import DEMO, Path_, held_out, loaded
from records import conditions, write_json

from daemons.device import prepare
from daemons.random_sampling import draw, draw_key, uniform
from lucevisor.model.families import open_spec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step, ZeroState


@torch.inference_mode()
def logits(stage, text, n):
    """Logits [tokens - 1, V] of one text that is read ``n`` tokens at a time."""
    kv_groups = stage.spec.kv_groups()
    stage.reset()
    pages = list(range(-(-len(text) // PAGE_TOKENS)))
    states = [ZeroState(0)] if KvGroup.RECURRENT in kv_groups else []
    tables = [SetPages(0, kv_group, 0, pages) for kv_group in kv_groups - {KvGroup.RECURRENT}]
    stage.apply([*states, OpenSequence(0, 0, SamplingParams()), *tables])
    rows = []
    for at in range(0, len(text) - 1, n):
        out = stage.forward(Step(0, 0, [], [Slice(0, at, text[at : min(at + n, len(text) - 1)], True)]), None)
        rows.append(stage.logits(out.rows, None).float().clone())
    return torch.cat(rows)


def inverse_sums(x, seed, positions):
    """Draws by the inverse cumulative sum in the order of ids."""
    u = torch.tensor([uniform(seed, position) for position in positions], dtype=torch.float64, device=x.device)
    sums = x.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, u[:, None]).squeeze(1).tolist()


def gumbel(x, seed, positions):
    sampling = SamplingParams(temperature=1.0, seed=seed)
    return draw(x, [sampling] * len(x), [draw_key(seed, position) for position in positions])


DRAWS = {"gumbel-max": gumbel, "inverse sums": inverse_sums}


def compare(stage, texts, counted, chunks, n_seeds):
    """Yield a row for each further chunk size."""
    first, *others = chunks
    sums = {n: {"n": 0, "tv": 0.0, "argmax": 0, **dict.fromkeys(DRAWS, 0)} for n in others}
    for i, text in enumerate(texts):
        where = counted[i].nonzero().squeeze(1)
        exact = logits(stage, text, first)[where]
        for n in others:
            found, row = logits(stage, text, n)[where], sums[n]
            row["n"] += len(where)
            row["tv"] += float((exact.double().softmax(-1) - found.double().softmax(-1)).abs().sum() / 2)
            row["argmax"] += int((exact.argmax(-1) != found.argmax(-1)).sum())
            for name, drawn in DRAWS.items():
                for seed in range(n_seeds):
                    pair = (drawn(x, 1000 * i + seed, where.tolist()) for x in (exact, found))
                    row[name] += sum(a != b for a, b in zip(*pair, strict=True))
    for n, row in sums.items():
        drawn = row["n"] * n_seeds
        rates = {name: row[name] / drawn for name in DRAWS}
        yield {"chunks": [first, n], "tokens": row["n"], "drawn": drawn, "greedy": row["argmax"] / row["n"],
               "total_variation": row["tv"] / row["n"], **rates}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 64, 1])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    backend = Backend(options.device)
    prepare(backend, 0)
    spec = open_spec(options.model, None)
    texts, counted = held_out(options.texts, options.tokens)
    record = {"date": datetime.now(UTC).date().isoformat(), **conditions(), "model": options.model.name, "rows": []}
    for name in options.dtypes:
        stage = loaded(spec, Path_(name, Dtype(name)), backend, 1, options.tokens)
        for row in compare(stage, texts, counted, options.chunks, options.seeds):
            record["rows"].append({"dtype": name, **row})
            print(f"{name} {row['chunks']}: {row['tokens']:,} tokens, {row['drawn']:,} draws; flips a token: "
                  + ", ".join(f"{key} {row[key]:.2e}" for key in (*DRAWS, "greedy"))
                  + f"; total variation {row['total_variation']:.2e}", flush=True)  # fmt: skip
            if options.json is not None:
                write_json(options.json, record)
        del stage


if __name__ == "__main__":
    main()
