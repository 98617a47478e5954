"""Which pages would KV Flash keep, and how much of the attention is in them?  The demo model on long texts, on a cpu.

    python bench/page_recall.py [--tokens 3072] [--texts 6] [--pools 0.25 0.125] [--save]

Texts are the documentation's pages, in which much is said twice.  The model computes each with all pages resident; the
last 16 queries before its last token rank the pages as policy ``qk`` does.  For each pool (a share of the text's pages)
recorded is the share of the attention of the last token, the mean over full-attention layers, heads and texts, that
lies in the pages that stay: under ``lru``, under ``qk``, under the best choice in hindsight; and the same for what lies
outside of the protected pages, which every policy keeps.
"""

import argparse
import json
import statistics

import torch
from records import save
from services import DEMO, ROOT

from daemons.kv.batch import Batch, Layout
from daemons.models.stage import LoadedStage
from daemons.ops.page_scores import log_sums, queries_by_head, scores_of, sketches_of
from daemons.ops.paged import Pages
from lucevisor.kv.residency import Residency
from lucevisor.model.families import open_spec
from lucevisor.model.pages import HEAD_PAGES, TAIL_PAGES
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, ZeroState
from lucevisor.text.tokenizer import Tokenizer

CHUNK = 512
N_QUERIES = 16


def loaded(spec, n_pages):
    plan = StagePlan(
        0, [ShardPlan(0, LayerRange(0, spec.n_layers))], source=None, target=None, embedding=True, output=True
    )
    files = [str(path) for path in spec.files.paths]
    load = Load(files, Dtype.FLOAT32, Dtype.FLOAT32, [plan], [], PoolSizes(n_pages, 0, 1), 1, CHUNK)
    return LoadedStage.load(spec, plan, load, Backend.CPU, lambda _: None)


def attend(stage, tokens):
    """Compute a text; return by layer the last queries [1 + N_QUERIES, H, D], all keys [n, K, D], and the scale."""
    seen, n = [], len(tokens)
    opening = [
        ZeroState(0),
        OpenSequence(0, 0, SamplingParams()),
        SetPages(0, KvGroup.FULL, 0, list(range(-(-n // PAGE_TOKENS)))),
    ]
    stage.reset()
    stage.apply(opening)
    rows = torch.zeros(0)
    for start in range(0, n, CHUNK):
        part = tokens[start : start + CHUNK]
        stage.sequences.flush()
        layout = Layout([Slice(0, start, part, False)], stage.sequences, stage.spec)
        batch = Batch(layout, stage.sequences.tables(stage.device), layout.on(stage.device))
        if start + CHUNK >= n:
            batch.probe = lambda attention, q: seen.append((attention, q[-1 - N_QUERIES :].clone()))
        stage.shards[0].run(rows, batch, None)
    pages = Pages(None, 1, 0, n)
    return [
        (q, a.keys.read(pages, torch.float32)[0], a.shape.scale) for a, q in seen if a.shape.kv_group is KvGroup.FULL
    ]


def by_page(weights):
    """Sum the weights [..., n] of each page: [..., pages]."""
    n_pages = -(-weights.shape[-1] // PAGE_TOKENS)
    padded = torch.nn.functional.pad(weights, (0, n_pages * PAGE_TOKENS - weights.shape[-1]))
    return padded.unflatten(-1, (n_pages, PAGE_TOKENS)).sum(-1)


def shares_and_scores(layers):
    """The last token's attention by page, by layer and head [L, H, pages], and the pages' scores as ``qk`` has them."""
    shares, scores = [], torch.zeros(())
    for q, keys, scale in layers:
        n_heads, n_kv_heads = q.shape[1], keys.shape[1]
        repeated = keys.repeat_interleave(n_heads // n_kv_heads, dim=1)
        logits = torch.einsum("hd,nhd->hn", q[-1], repeated) * scale
        shares.append(by_page(torch.softmax(logits, dim=-1)))
        whole = (len(keys) - 2) // PAGE_TOKENS
        pages = keys[: whole * PAGE_TOKENS].view(whole, PAGE_TOKENS, *keys.shape[1:])
        sums = log_sums(queries_by_head(q[:-1], n_kv_heads, scale), sketches_of(pages))
        scores += scores_of(sums, len(q) - 1)
    return torch.stack(shares), scores.tolist()


def kept_by(policy, shares, scores, n_pool):
    """The pages that a policy keeps of a text."""
    n_pages = shares.shape[-1]
    head, tail = list(range(HEAD_PAGES)), list(range(n_pages - TAIL_PAGES, n_pages))
    recent = head + list(range(n_pages - n_pool + HEAD_PAGES, n_pages))
    if policy == "lru":
        return recent
    if policy == "best":
        scores = shares.mean(dim=(0, 1)).tolist()
    out = sorted({*range(n_pages)} - {*recent})
    leaving, back = Residency(n_pool, "qk").swap(recent, out, scores)
    kept = sorted({*recent} - {*leaving} | {*back})
    assert {*head, *tail} <= {*kept}
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--pools", type=float, nargs="+", default=[0.25, 0.125])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write bench/results/page-recall-demo.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = open_spec(DEMO)
    tokenizer, n_pages = Tokenizer.from_gguf(spec.files.metadata), -(-options.tokens // PAGE_TOKENS)
    stage = loaded(spec, n_pages)
    ids = tokenizer.encode("".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    step, found = (len(ids) - options.tokens) // options.texts, {}
    for i in range(options.texts):
        with torch.inference_mode():
            shares, scores = shares_and_scores(attend(stage, ids[i * step : i * step + options.tokens]))
        protected = [*range(HEAD_PAGES), *range(n_pages - TAIL_PAGES, n_pages)]
        always = shares[..., protected].sum(-1)
        for pool in options.pools:
            for policy in ("lru", "qk", "best"):
                kept = shares[..., kept_by(policy, shares, scores, int(pool * n_pages))].sum(-1)
                row = found.setdefault(f"{policy} {pool}", {"attention": [], "outside_of_protected": []})
                row["attention"].append(float(kept.mean()))
                row["outside_of_protected"].append(float((kept - always).sum() / (1 - always).sum()))
        print(i, {name: round(row["outside_of_protected"][-1], 3) for name, row in found.items()}, flush=True)
    out = {"tokens": options.tokens, "texts": options.texts}
    out |= {name: {k: round(statistics.mean(v), 4) for k, v in row.items()} for name, row in found.items()}
    print(json.dumps(out, indent=1))
    if options.save:
        save("page-recall-demo", out)


if __name__ == "__main__":
    main()
