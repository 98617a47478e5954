"""What a round on a GPU is to show, by part: aim, measured, met or missed; from what its measurements wrote."""

import json
import math
from collections import Counter

from gpu_round_tests import outcomes

LLAMA_27B = {"pp512": 2506, "pp3581": 2612, "tg64": 85, "tg64 x8": 280, "tg64 x16": 508, "tg64 x32": 674}
LLAMA_35B = {"pp512": 5531, "pp3581": 9168, "tg64": 253, "tg64 x32": 1112}
"""llama.cpp's tokens/s on such a GPU on another day, where none ran beside us."""
AIMS_27B = {
    "tg64": 2.0, "tg64 @ d16384": 1.9, "tg64 @ d65536": 1.9, "tg64 x8": 3.0, "tg64 x16": 3.0, "tg64 x32": 3.0,
    "pp512": 1.5, "pp3581": 3.3,
}  # fmt: skip
AIMS_35B = {"tg64": 2.0, "tg64 x32": 3.0, "pp512": 1.2, "pp3581": 1.5}


def line(what, aim, value, *, at_most=False, unit="", beside=""):
    """A row: name, aim, measured, verdict.  ``value``: None where nothing was measured; ``aim``: None for a figure
    that has none.
    """
    if value is None or not math.isfinite(value):
        return what, "" if aim is None else f"{aim:g}{unit}", "-", "not measured"
    verdict = ""
    if aim is not None:
        verdict = "met" if (value <= aim if at_most else value >= aim) else "missed"
    sign = "" if aim is None else "<= " if at_most else ">= "
    return what, "" if aim is None else f"{sign}{aim:g}{unit}", f"{number(value)}{unit}{beside}", verdict


def number(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def read(out, name):
    """A result; empty when it is not there or was cut off while it was written."""
    try:
        return json.loads((out / name).read_text())
    except (OSError, ValueError):
        return {}


def dig(record, *keys):
    """A number in nested records, whose keys JSON made strings; None without."""
    for key in keys:
        record = record.get(str(key), record.get(key)) if isinstance(record, dict) else None
    return record


def speeds(found):
    return {test["name"]: test for test in found.get("tests", [])}


def against_llama(told, tests, aims, elsewhere):
    """Ratios to llama.cpp in the same run, else to its figures of another day."""
    for name, aim in aims.items():
        test = tests.get(name, {})
        ours, theirs = test.get("tokens_per_s"), test.get("against_tokens_per_s")
        day = "" if theirs else " (another day)"
        theirs = theirs or elsewhere.get(name)
        ratio = ours / theirs if ours and theirs else None
        beside = f" x llama.cpp: {ours:.5g} and {theirs:.5g} tokens/s{day}" if ratio else ""
        yield line(f"{told} {name}", aim, ratio, beside=beside)


def part_a(out):
    counts = Counter(outcomes(out / "tests.jsonl").values())
    said = f" of {sum(counts.values())}, {counts['skipped']} skipped"
    yield line(
        "GPU tests that failed",
        0,
        counts["failed"] if counts["passed"] or counts["failed"] else None,
        at_most=True,
        beside=said,
    )
    for told, size, aims, elsewhere in (("27B", "27b", AIMS_27B, LLAMA_27B), ("35B-A3B", "35b", AIMS_35B, LLAMA_35B)):
        tests = speeds(read(out, f"speed-{size}.json")) | speeds(read(out, f"speed-{size}-deep.json"))
        yield from against_llama(told, tests, aims, elsewhere)
        prompts = {name: aim for name, aim in aims.items() if name.startswith("pp")}
        yield from against_llama(
            f"{told}, ubatch of 2048,", speeds(read(out, f"speed-{size}-ub2048.json")), prompts, {}
        )


def part_b(out):
    found = read(out, "speculation.json")
    for kind, n_drafts in (("mtp", 3), ("dflash2", 7)):
        row = found.get(kind, {})
        for rows, aim in ((4, None), (8, 1.25), (16, 1.4)):
            if rows < 16 or kind == "mtp":
                ratio = dig(row, "step_ratio", rows)
                yield line(f"{kind}: step of {rows} rows", aim, ratio, at_most=True, unit=" steps")
        draft, verify = dig(row, "draft_s", n_drafts), dig(row, "step_s", 8)
        share = draft / verify if draft and verify else None
        yield line(f"{kind}: a draft of {n_drafts}", 0.12, share, at_most=True, unit=" of 8 rows")
        for n, aim in ((3, 2.2), (5, None), (8, 4.5)):
            yield line(f"{kind}: speed-up at {n} tokens a step", aim, dig(row, "speed_up", f"accepted_{n}"))
        for key, what in (("streams", "adaptive"), ("streams_useless", "all wrong"), ("streams_plain", "not asked")):
            yield line(f"{kind}: 16 streams over without, {what}", 1.0, dig(row, "streams_ratio", key))
    found = read(out, "kv-flash.json")
    for policy, aims in (("qk", (0.95, 0.10)), ("off", (None, None))):
        row = found.get(policy, {})
        yield line(f"{policy}: slowest over fastest context", aims[0], row.get("slowest_of_fastest"))
        for context in row.get("contexts", []):
            yield line(f"{policy}: decode behind {context['context']}", None, context["tokens_per_s"], unit=" tokens/s")
        share = max((c.get("above_median", 0.0) for c in row.get("contexts", [])), default=None)
        if policy == "qk":
            yield line("qk: time above the median token", aims[1], share, at_most=True)
        used = row.get("used_mib") or [None]
        yield line(f"{policy}: GPU memory", None, used[-1], unit=" MiB")
    yield from recovered(read(out, "recovery.json"))
    for name, row in (read(out, "recovery-move.json").get("moves") or {}).items():
        beside = f", {row['same tokens']} of {row['streams']} streams with the same tokens"
        yield line(f"pause of 8 streams, {name}", None, row["pause_s"], unit=" s", beside=beside)
    for told, size in (("27B", "27b"), ("35B-A3B", "35b")):
        before, after = (speeds(read(out, f"speed-{size}{suffix}.json")) for suffix in ("", "-tuned"))
        for name, test in after.items():
            plain = before.get(name, {}).get("tokens_per_s")
            ratio = test["tokens_per_s"] / plain if plain else None
            yield line(f"{told} {name}: tuned over built-in", None, ratio)


def recovered(found):
    for what in ("prefill", "decode"):
        yield line(f"journal: {what} over without", 0.98, dig(found, "cost", what, "ratio"))
    kills = found.get("kills", [])
    alone = {kill["group"]: kill["load_s"] for kill in kills if kill["beside"] == "alone"}
    paused = [kill for kill in kills if kill["beside"] != "alone"]
    if not paused:
        yield line("pause of 8 streams of 4,096 tokens", None, None)
    for kill in paused:
        load_s = alone.get(kill["group"])
        aim = None if load_s is None else round(load_s + 1, 2)
        yield line(f"pause of 8 streams, {kill['group']} lost", aim, kill["pause_s"], at_most=True, unit=" s")


def of_groups(found, told, *, judged):
    """One stream, many, a hop and a prompt; two daemons on one GPU are not judged."""
    one, two = found.get("one", {}), found.get("two", {})
    middle = {name: {n: median(s) for n, s in f.get("streams", {}).items()} for name, f in (("1", one), ("2", two))}
    alone, halved = dig(middle, "1", "1"), dig(middle, "2", "1")
    bound = round(1e3 * (1.03 * alone + 120e-6), 3) if alone and judged else None
    yield line(f"{told}: a token, one stream", bound, halved and 1e3 * halved, at_most=True, unit=" ms")
    half, full = dig(middle, "1", "4"), dig(middle, "2", "8")
    share = half / full if half and full else None
    yield line(f"{told}: 8 streams of n / T(n / 2)", 0.95 if judged else None, share)
    hop = median(two.get("hop_s", []))
    yield line(f"{told}: hop", 60, hop and 1e6 * hop, at_most=True, unit=" us")
    a, b = median(one.get("prompt_s", [])), median(two.get("prompt_s", []))
    yield line(f"{told}: prompt of 16,384", 1.85 if judged else None, a / b if a and b else None, unit=" x")


def of_steps(found, captured):
    for step in found.get("steps", []):
        beside = f", launched in {1e3 * step['launched_s']:.3g} ms"
        told = f"35B-A3B, {found['layers']} layers: {step['tokens']} tokens at {step['start']}{captured}"
        yield line(told, None, 1e3 * step["known_s"], unit=" ms", beside=beside)


def median(values):
    values = sorted(values)
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2 if n else None


def part_c(out):
    found = read(out, "groups.json")
    apart = len(set(found.get("devices", []))) > 1
    yield from of_groups(found, "two groups" if apart or not found else "two groups on one GPU", judged=apart)
    if (out / "groups-same.json").exists():
        yield from of_groups(read(out, "groups-same.json"), "two groups on one GPU", judged=False)
    for suffix, captured in (("", ""), ("-eager", " without a graph")):
        yield from of_steps(read(out, f"steps-35b{suffix}.json"), captured)
    rows = read(out, "perplexity.json").get("rows", [])
    worst = max((abs(row["difference"]) for row in rows), default=None)
    yield line(
        "largest change of perplexity", 0.5, None if worst is None else 100 * worst, at_most=True, unit=" %",
        beside=f" of {len(rows)} rows",
    )  # fmt: skip
    found = read(out, "hop.json")
    link = {row["contender"]: row["p50_us"] for row in found.get("rows", []) if row["metric"] == "empty step"}
    limit = found.get("limit_us")
    yield line("an empty step over the link", limit and round(limit, 1), link.get("link"), at_most=True, unit=" us")


PARTS = {"a": part_a, "b": part_b, "c": part_c}


def table(part, out):
    """The lines of a part's table: figure | aim | measured | verdict."""
    rows = [("figure", "aim", "measured", "verdict"), *PARTS[part](out)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [" | ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
