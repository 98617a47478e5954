"""Draw the figures of docs/performance.md from bench/results.

    python bench/plots.py [NAME ...]          (pip install 'lucevisor[bench]')

Writes docs/images/NAME.svg.  Each contains the hash of the results it was drawn from, which
docs/performance.md compares.  Draw again after a new measurement.
"""

import argparse
import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "bench" / "results", ROOT / "docs" / "images"
OURS, THEIRS = "#1f6f8b", "#d98032"


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


PLOTS = {
    "decode-by-streams": Plot(decode, ("speed-h200-27b-seventh.json", "speed-h200-35b-a3b-seventh.json")),
    "prefill": Plot(prefill, ("speed-h200-27b-seventh.json", "speed-h200-35b-a3b-seventh.json")),
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
