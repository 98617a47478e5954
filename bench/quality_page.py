"""The page docs/quality.md, from the figures of quality.py."""

import statistics
import textwrap

OF_ALL = ("perplexity", "greedy", "needle", "arms")
PARTS = {
    "SmolLM2-135M-Instruct-Q4_1": OF_ALL,
    "gemma-3-270m-Q4_K_M": OF_ALL,
    "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M": (*OF_ALL, "code", "tools"),
    "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M": (*OF_ALL, "code", "tools", "drafts"),
}
AIMS = {"perplexity": 0.5, "tasks": 2, "drafts": 1.4}
INTRODUCTION = """# Quality: real models beside llama.cpp

<!-- Written by bench/quality.py from bench/results/quality-cpu.json. Change it there. -->

Do models with trained weights answer as well as with llama.cpp? Both servers had the same file in the same run, ours
with a configuration of four lines and its defaults, in bfloat16 on a cpu. `python -m tests.real.models FOLDER`
downloads the files, `bench/quality.py FOLDER --llama DIRECTORY --save` repeats this page.

- *Perplexity* of a public-domain text (`bench/data/alice.txt`) in windows of 512 tokens, of whose second halves each
  token counts; ± is the standard error of the difference. Both round activations that meet quantised matrices to 8
  bits. Ours keeps the others in bfloat16, llama.cpp in float32; our float32 rounds none.
- *Greedy answers*: the first 64 tokens. Where two answers part, our float32, which rounds no activations, says by how
  much each server's rounding moves the distance of the two candidates' logits. Two servers that round as llama.cpp does
  may part where llama.cpp's candidates are no farther apart than twice its largest rounding there. The record has each
  case.
- *Code*: functions in Python whose assertions pass. *Tools*: requests answered with the right call, by `tool_choice`.
  These and greedy answers were asked four at once. llama-server infers from a template's past calls how a model writes
  calls. Qwen2.5-Coder writes blocks of Markdown, not its template's tags, so it had the template with past calls in
  such blocks (`--chat-template-file`); no prompt here has past calls. With the file's own template it sent all calls
  of the 0.5B as text, also with `required`.
- *Arms*: ours alone in float32, a conversation of twenty turns. A turn counts if all its tokens are those of the
  service with nothing on.
"""


def page(record):
    sections = [INTRODUCTION]
    for name, parts in record["models"].items():
        rows = [row for part, rows in ROWS.items() if part in parts for row in rows(parts[part])]
        table = ["| | Lucevisor | llama.cpp | aim | met |", "|---|---:|---:|---|---|"]
        table += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        sections.append("\n".join([f"## {name}", "", *table, ""]))
    known = {name: record["models"].get(name, {}) for name in PARTS}
    left = {name: [part for part in parts if part not in known[name]] for name, parts in PARTS.items()}
    if missing := [f"- {name}: {', '.join(parts)}" for name, parts in left.items() if parts]:
        sections.append("\n".join(["## Not measured yet", "", *missing, ""]))
    about = [part["conditions"] for parts in record["models"].values() for part in parts.values()]
    dates, commits = ([*dict.fromkeys(one[key] for one in about)] for key in ("date", "commit"))
    cores = max(one["cores"] for one in about)
    words = (
        f"{', '.join(dates)}; commits {', '.join(commits)}; {about[0]['cpu']}, cores for threads: {cores}, which other "
        "programs used, too: of speeds only ratios count, which are of runs in turns. llama.cpp: commit 0c1e57098 out "
        "of llama-cpp-python 0.3.36, built with `-DGGML_NATIVE=ON` and GELU in float32."
    )
    sections.append(f"## Conditions\n\n{textwrap.fill(words, 120)}\n")
    return "\n".join(sections)


def _met(is_met):
    return "yes" if is_met else "**no**"


def _perplexity_rows(f):
    beside, exact, their = (
        f[name] for name in ("default beside llama.cpp", "default beside float32", "llama.cpp beside float32")
    )
    shown = "{percent:+.2f} ± {error:.2f} %".format
    yield f"perplexity, {f['windows']} windows", f"{f['default']:.3f}", f"{f['llama.cpp']:.3f}", "", ""
    yield (
        "difference",
        shown(**beside),
        "",
        f"{AIMS['perplexity']} %",
        _met(abs(beside["percent"]) <= AIMS["perplexity"]),
    )
    yield f"beside our float32 ({f['float32']:.3f})", shown(**exact), shown(**their), "", ""


def _greedy_rows(f):
    n, parted = f["prompts"], f["parted"]
    yield (
        "prompts rendered and tokenised alike",
        f"{f['templates_equal']}, {f['ids_equal']} of {n}",
        "",
        "all",
        _met(f["templates_equal"] == f["ids_equal"] == n),
    )
    yield "first 64 tokens equal", f"{f['answers_equal']} of {n}", "", "", ""
    apart = [[*case["apart"].values()] for case in parted if None not in case["apart"].values()]
    errors = [[abs(pair - exact) for pair in (ours, theirs)] for ours, theirs, exact in apart]
    bound = 2 * max((theirs for _, theirs in errors), default=0)
    close = sum(-theirs <= bound for _, theirs, _ in apart)
    yield (
        f"the others part where llama.cpp's candidates are at most {bound:.2f} apart",
        f"{close} of {len(parted)}",
        "",
        "all",
        _met(close == len(parted)),
    )
    columns = [f"{statistics.median(column):.2f}, {max(column):.2f}" for column in zip(*errors, strict=True)]
    yield "rounding there, median and most", *columns, "", ""
    ours = sum(exact > 0 for *_, exact in apart)
    yield "our float32 chooses as", f"{ours} times", f"{len(apart) - ours} times", "", ""


def _task_row(what, ours, theirs, n):
    return what, f"{ours} of {n}", f"{theirs} of {n}", "within 2, or more", _met(ours >= theirs - AIMS["tasks"])


def _code_rows(f):
    yield _task_row("code", f["ours"], f["llama.cpp"], f["tasks"])


def _tools_rows(f):
    for choice in sorted({"auto", "required"} & f.keys()):
        yield _task_row(f"tools, `{choice}`", f[choice]["ours"], f[choice]["llama.cpp"], f["tasks"])


def _needle_rows(f):
    ours, theirs = sum(f["ours"]), sum(f["llama.cpp"])
    yield (
        "needle, found at depths",
        f"{ours} of {len(f['depths'])}",
        f"{theirs} of {len(f['depths'])}",
        "as many",
        _met(ours >= theirs),
    )


def _arms_rows(f):
    for name, arm in f["arms"].items():
        seen = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in arm["seen"].items())
        yield f"{name} ({seen})", f"{arm['equal']} of {f['turns']} turns", "", "all", _met(arm["equal"] == f["turns"])


def _drafts_rows(f):
    speeds = f["tokens_per_s"]
    for name in ("", ", drafts"):
        yield (
            f"code{name or ', no drafts'}, tokens/s",
            f"{speeds['ours' + name]:.1f}",
            f"{speeds['llama.cpp' + name]:.1f}",
            "",
            "",
        )
    yield "answers equal with drafts", *(f"{n} of {f['prompts']}" for n in f["answers_equal"].values()), "", ""
    yield (
        f"ratio, threads of each server: {f['conditions']['cores']}",
        f"{f['ratio']['ours']:.2f}",
        f"{f['ratio']['llama.cpp']:.2f}",
        AIMS["drafts"],
        _met(f["ratio"]["ours"] >= AIMS["drafts"]),
    )


ROWS = {
    "perplexity": _perplexity_rows, "greedy": _greedy_rows, "code": _code_rows, "tools": _tools_rows,
    "needle": _needle_rows, "arms": _arms_rows, "drafts": _drafts_rows,
}  # fmt: skip
