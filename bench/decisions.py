"""What many labels cost beside one: seconds and computed tokens of /v1/decisions.

    python bench/decisions.py MODEL.gguf [--words 700] [--labels 64] [--sequences auto] [--rounds 5]
        [--name NAME] [--save]

Each prompt is new, so nothing of it is cached.  One label, and `--labels` of one, two and three tokens take turns;
medians count.  --save writes bench/results/decisions-NAME.json.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import httpx
from records import conditions, save
from services import groups_toml, supervisor

WORDS = ("the", "supervisor", "starts", "one", "shard", "daemon", "per", "backend", "group", "and", "lost", "is")


def computed(url):
    """Tokens of all steps so far."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("lucevisor_step_tokens_total"))


def tokens(url, text):
    body = {"content": text, "add_special": False}
    return httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]


def label_sets(url, n):
    """One label, ``n`` of one token each, ``n`` of two, ``n`` of three."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    single = [f" {a}{b}" for a in letters for b in letters]
    single = [label for label in single if len(tokens(url, label)) == 1][:n]
    return {
        "one": single[:1],
        "single": single,
        "two": [f"{label} it" for label in single],
        "three": [f"{label} it is" for label in single],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--words", type=int, default=700)
    parser.add_argument("--labels", type=int, default=64)
    parser.add_argument("--sequences", default="auto", help="engine.max_sequences")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.model = str(options.model.resolve())
    rng, found = random.Random(0), {"one": [], "single": [], "two": [], "three": []}

    def config(folder):
        path = folder / "bench.toml"
        path.write_text(groups_toml(options) + "[server]\nport = 0\n")
        return path

    settings = [] if options.sequences == "auto" else [f"engine.max_sequences={options.sequences}"]
    with supervisor("decisions", config, *settings) as status:
        url = status["url"]
        sets = label_sets(url, options.labels)
        for turn in range(options.rounds + 1):
            for kind, labels in sets.items():
                prompt = " ".join(rng.choices(WORDS, k=options.words))
                before, began = computed(url), time.monotonic()
                answer = httpx.post(f"{url}/v1/decisions", json={"prompt": prompt, "labels": labels}, timeout=600)
                seconds = time.monotonic() - began
                answer.raise_for_status()
                if turn:  # the first round warms up
                    found[kind].append({"seconds": seconds, "tokens": computed(url) - before})
    options.model = Path(options.model).name
    record = {"conditions": conditions(), "options": vars(options), "n_labels": len(sets["single"])}
    for kind, rows in found.items():
        seconds, n_tokens = (statistics.median(row[what] for row in rows) for what in ("seconds", "tokens"))
        record[kind] = {"seconds": seconds, "tokens": n_tokens, "rounds": [row["seconds"] for row in rows]}
        ratio = seconds / record["one"]["seconds"], n_tokens / record["one"]["tokens"]
        print(
            f"{kind}: {1000 * seconds:.0f} ms, {n_tokens:.0f} tokens; {ratio[0]:.2f} and {ratio[1]:.2f} times one label"
        )
    if options.save:
        save(f"decisions-{options.name}", record)


if __name__ == "__main__":
    main()
