"""Draw the figures of docs/performance.md from bench/results.

    python bench/plots.py [NAME ...]          (pip install 'lucevisor[bench]')

Writes docs/images/NAME.svg.  Each names the hash of the results it was drawn from, which tests/docs/test_performance.py
compares: after a new measurement, draw again.
"""

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import gguf

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "bench" / "results", ROOT / "docs" / "images"
OURS, THEIRS, OTHER, BOUND = "#1f6f8b", "#d98032", "#8a8a8a", "#444444"
READ_BYTES_PER_S = 4.38e12
"""What a device-to-device read reaches on an H200."""


@dataclass(frozen=True)
class Plot:
    """``draw(figure, *contents)``: contents of ``sources``, parsed where they are JSON."""

    draw: object
    sources: tuple[str, ...]
    size: tuple[float, float] = (7.2, 3.6)

    def digest(self):
        """Hash of the sources."""
        return sha256(b"".join((RESULTS / name).read_bytes() for name in self.sources)).hexdigest()[:16]

    def contents(self):
        texts = [(RESULTS / name).read_text() for name in self.sources]
        return [
            json.loads(text) if name.endswith(".json") else text for name, text in zip(self.sources, texts, strict=True)
        ]


def by_model(runs):
    """Runs of the same model as one; a later run's test takes the place of an earlier one's."""
    found = {}
    for run in runs:
        found.setdefault(run["model"], {}).update({test["name"]: test for test in run["tests"]})
    return [{"model": model, "tests": list(tests.values())} for model, tests in found.items()]


def decode(figure, *runs):
    """Tokens/s of all streams by their number, beside llama.cpp."""
    models = by_model(runs)
    for axes, found in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        tests = sorted((t for t in found["tests"] if t["answer"] and not t["depth"]), key=lambda t: t["streams"])
        for key, label, color in (("tokens_per_s", "Lucevisor", OURS), ("against_tokens_per_s", "llama.cpp", THEIRS)):
            points = [(t["streams"], t[key]) for t in tests if key in t]
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
            for x, y in points:
                axes.annotate(f"{y:,.0f}", (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=8)
        streams = [t["streams"] for t in tests]
        axes.set(title=found["model"], xlabel="streams", xscale="log", yscale="log", ylabel="tokens/s, all streams")
        axes.set_xticks(streams, [str(n) for n in streams])
        axes.minorticks_off()
        axes.margins(y=0.15)
        axes.legend(frameon=False, loc="upper left")


def prefill(figure, *runs):
    """Prompt tokens/s by length, beside llama.cpp."""
    axes, places, names = figure.subplots(), [], []
    for found in by_model(runs):
        for test in (t for t in found["tests"] if t["prompt"]):
            at = len(places)
            places.append(at)
            names.append(f"{found['model'].replace(' shape', '')}\n{test['prompt']:,} tokens")
            for shift, key, color in ((-0.2, "tokens_per_s", OURS), (0.2, "against_tokens_per_s", THEIRS)):
                if key in test:
                    axes.bar(at + shift, test[key], 0.38, color=color)
                    axes.annotate(f"{test[key]:,.0f}", (at + shift, test[key]), (0, 2), textcoords="offset points",
                                  ha="center", fontsize=8)  # fmt: skip
    axes.set_xticks(places, names, fontsize=8)
    axes.set(ylabel="prompt tokens/s")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.12)
    axes.legend(handles=keys(("Lucevisor", OURS), ("llama.cpp", THEIRS)), frameon=False, loc="upper left")


def keys(*labels):
    """Handles of a legend."""
    from matplotlib.patches import Patch

    return [Patch(color=color, label=label) for label, color in labels]


PRODUCT = re.compile(r"^(Q\w+) (\d+)x(\d+): c\+\+ ([\d.]+) us [\d.]+ TB/s \| triton ([\d.]+)", re.MULTILINE)

NOW = re.compile(r"^(Q\w+) (\d+)x(\d+): now ([\d.]+) us", re.MULTILINE)


def products(text):
    """(kind, bytes, us in C++, us in Triton) of the products of one row in gemv-h200.txt."""
    return [
        (kind, matrix_bytes(kind, n, k), float(ours), float(triton))
        for kind, n, k, ours, triton in PRODUCT.findall(text)
    ]


def matrix_bytes(kind, n, k):
    weights, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(n) * int(k) // weights * n_bytes


def roofline(figure, text, newer):
    """Time of products of one row over the bytes of the matrix, and the time that reading them takes."""
    axes, rows = figure.subplots(), products(text)
    now = [(matrix_bytes(kind, n, k), float(us)) for kind, n, k, us in NOW.findall(newer)]
    line = [min(r[1] for r in rows), max(r[1] for r in rows)]
    axes.plot(
        [n / 1e6 for n in line], [n / READ_BYTES_PER_S * 1e6 for n in line], color=BOUND, label="bytes / 4.38 TB/s"
    )
    axes.scatter([n / 1e6 for n, _ in now], [us for _, us in now], color=OURS, marker="o", label="CUDA C++", s=22)
    for column, label, color, marker in ((2, "the first CUDA C++", THEIRS, "."), (3, "Triton", OTHER, "^")):
        axes.scatter(
            [r[1] / 1e6 for r in rows], [r[column] for r in rows], color=color, marker=marker, label=label, s=22
        )
    axes.set(xscale="log", yscale="log", xlabel="MB of the matrix", ylabel="us, one row")
    axes.legend(frameon=False)


def kv_flash(figure, found):
    """Milliseconds of a decode by context, with a pool and with all pages on the device."""
    axes = figure.subplots()
    contexts = [row["context"] for row in found["lru"]]
    for key, label, color in (("pool_ms", f"pool of {found['pool']:,} tokens", OURS), ("all_ms", "all pages", OTHER)):
        axes.plot(contexts, [row[key] for row in found["lru"]], marker="o", color=color, label=label)
    axes.set(xscale="log", xlabel="tokens of context", ylabel="ms a decode, 16 layers", ylim=(0, None))
    axes.set_xticks(contexts, [f"{n // 1024}K" for n in contexts])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower left")


def recovery(figure, *runs):
    """What a pause after a killed daemon consists of, medians of the kills beside streams."""
    axes, parts = figure.subplots(), (("start_s", "start"), ("load_s", "load"), ("rebuild_s", "replay of the journal"))
    colors = ("#9bbcc8", OURS, THEIRS, "#dddddd")
    for at, found in enumerate(runs):
        kills = [one for one in found["kills"] if not one.get("alone") and one.get("beside") != "alone"]
        left = 0.0
        spans = [(label, statistics.median(k.get(key, 0.0) for k in kills)) for key, label in parts]
        pause = statistics.median(k["pause_s"] for k in kills)
        spans.append(("all else", pause - sum(s for _, s in spans)))
        for (_, seconds), color in zip(spans, colors, strict=True):
            axes.barh(at, seconds, left=left, color=color, height=0.5)
            left += seconds
        axes.annotate(f"{pause:.2f} s", (left, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [
        f"{Path(r['options']['model']).stem}\n{r['options']['backend']}, {r['options']['streams']} streams"
        for r in runs
    ]
    axes.set_yticks(range(len(runs)), names, fontsize=8)
    axes.set(xlabel="seconds without a token")
    axes.margins(x=0.1)
    labels = [*(label for _, label in parts), "all else"]
    axes.legend(handles=keys(*zip(labels, colors, strict=True)), frameon=False, ncols=4, loc="upper center",
                bbox_to_anchor=(0.45, 1.2), fontsize=8)  # fmt: skip


PLOTS = {
    "decode-by-streams": Plot(decode, ("speed-h200-27b-seventh.json", "speed-h200-35b-a3b-seventh.json")),
    "prefill": Plot(prefill, ("speed-h200-27b-seventh.json", "speed-h200-35b-a3b-seventh.json")),
    "roofline": Plot(roofline, ("gemv-h200.txt", "gemv-instructions-h200.txt"), (6.0, 3.6)),
    "kv-flash": Plot(kv_flash, ("kv-flash-h200-27b.json",), (6.0, 3.2)),
    "recovery": Plot(recovery, ("recovery-h200-27b.json", "recovery-cpu.json"), (7.2, 2.4)),
}


def save(plot, path):
    """Draw to a file, the same bytes for the same sources and version of matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    look = {"svg.hashsalt": "lucevisor", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    with matplotlib.rc_context(look | {"axes.spines.right": False}):
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.draw(figure, *plot.contents())
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": f"results {plot.digest()}"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLOTS)}; all without")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PLOTS):
        parser.error(f"no plot {', '.join(sorted(unknown))}: name some of {', '.join(PLOTS)}")
    for name in options.names or PLOTS:
        save(PLOTS[name], IMAGES / f"{name}.svg")
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
