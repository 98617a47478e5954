"""Swaps of models over HTTP: how long a request waits for a model that is loaded, parked or cold, and whether a long
session goes on after its model was away.

    python bench/model_swap.py A.gguf B.gguf ... [--context 50000] [--rounds 5] [--ttl 0] [--backend cuda]
                               [--python PYTHON] [--url URL --models A B ...] [--json PATH]

Starts a supervisor with the models, each of which needs all of the memory, so every alternate request swaps; or uses
the server at URL, any with an OpenAI endpoint that loads models by name, such as llama-server's router.

- cold: first requests for a model that was never loaded (its file may be in the page cache; --drop-caches drops it).
- warm: requests that alternate between the models: each waits until one has left and the other is back.
- resident: requests for the model that is loaded.
- session: a prompt of so many words on the first model, an answer of the last one, then the same prompt and a further
  sentence on the first: the time to its first token, the tokens that were cached, and whether the answer is that of
  before the swap.
- idle, with --ttl: what nvidia-smi says of the first GPU after --ttl seconds without a request, and how long the next
  request waits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from records import machine, write_json

MODEL = """
[models.{name}]
path = "{path}"
preload = false
memory_share = 1.0
ttl = {ttl}
"""
GROUP = """
[groups.device]
backend = "{backend}"
{python}
[server]
port = 0
"""
SENTENCES = (
    "The harbour master wrote the name of each ship, its cargo and the hour of the tide into the book.",
    "In the evening the lamps along the quay were lit one after the other, and the nets were taken in.",
    "Nobody remembered who had built the tower, but everybody knew how many steps led to its bell.",
)


def text(n_words):
    """Words that repeat only far apart."""
    parts, n = [], 0
    while n < n_words:
        parts.append(f"{len(parts)}. {SENTENCES[len(parts) % len(SENTENCES)]}")
        n += len(parts[-1].split())
    return " ".join(parts)


def ask(url, model, prompt, n_tokens=8):
    """Return the time to the first token, the whole time, the usage and the text of a streamed completion."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, usage, parts = time.monotonic(), None, {}, []
    with urllib.request.urlopen(request, timeout=3600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"{model}: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice.get("text"):
                    first = first or time.monotonic() - began
                    parts.append(choice["text"])
    whole = time.monotonic() - began
    return {"first_s": first or whole, "whole_s": whole, "usage": usage, "text": "".join(parts)}


def measure(url, models, options):
    cold, warm, resident = {}, [], []
    for model in models:
        cold[model] = ask(url, model, "Once upon a time", 1)["first_s"]
    for _ in range(options.rounds):
        for model in models:
            warm.append(ask(url, model, "Once upon a time", 1)["first_s"])
            resident.append(ask(url, model, "Once upon a time", 1)["first_s"])
    a, b = models[0], models[-1]
    prompt = text(options.context)
    first = ask(url, a, prompt)
    longer = prompt + first["text"] + " And then the captain said:"
    stayed = ask(url, a, longer)
    ask(url, b, "Once upon a time", 1)
    back = ask(url, a, longer + stayed["text"])
    details = back["usage"].get("prompt_tokens_details") or {}
    session = {
        "prompt_tokens": back["usage"].get("prompt_tokens"), "cached_tokens": details.get("cached_tokens"),
        "computed_s": first["first_s"], "stayed_first_s": stayed["first_s"], "back_first_s": back["first_s"],
    }  # fmt: skip
    ask(url, b, "Once upon a time", 1)
    again = ask(url, a, longer)
    session["same_answer"] = again["text"] == stayed["text"]
    return {"cold": cold, "warm": warm, "resident": resident, "session": session}


def smi(*query):
    """Lines of nvidia-smi's answer to a query."""
    command = ["nvidia-smi", "--id=0", *query, "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def idle(url, model, options):
    """The GPU after ``ttl`` seconds without a request, and the request after that."""
    device = "--query-gpu=memory.used,power.draw"
    busy, pause = smi(device)[0], options.ttl + 5
    time.sleep(pause)
    found = {"busy": busy, "idle": smi(device)[0], "processes": smi("--query-compute-apps=pid"), "waited_s": pause}
    return found | {"first_s": ask(url, model, "Once upon a time", 1)["first_s"]}


def report(found):
    cold = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found["cold"].items())
    warm, resident = found["warm"][len(found["cold"]) :] or found["warm"], found["resident"]
    session = found["session"]
    return "\n".join(
        [
            f"cold: {cold}",
            f"warm swap: median {statistics.median(warm):.3f} s, {min(warm):.3f} to {max(warm):.3f}",
            f"resident: median {statistics.median(resident):.3f} s",
            f"session of {session['prompt_tokens']} tokens: computed in {session['computed_s']:.2f} s, goes on after "
            f"{session['stayed_first_s']:.2f} s where it stayed, {session['back_first_s']:.2f} s after its model was "
            f"away ({session['cached_tokens']} tokens cached); same answer: {session['same_answer']}",
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--context", type=int, default=35_000, help="words of the session")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ttl", type=float, default=0.0)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--python", default="")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for the supervisor")
    parser.add_argument("--url", default="")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.url:
        found = measure(options.url, options.models, options)
        print(report(found))
        if options.json:
            write_json(options.json, {"machine": machine(), "url": options.url, **found})
        return
    models = {f"m{i}": str(Path(file).absolute()) for i, file in enumerate(options.files)}
    if options.drop_caches:
        for file in models.values():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "lucevisor"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        python = f'python = "{options.python}"' if options.python else ""
        sections = [MODEL.format(name=name, path=path, ttl=options.ttl) for name, path in models.items()]
        config.write_text("".join(sections) + GROUP.format(backend=options.backend, python=python))
        sets = [word for pair in options.set for word in ("--set", pair)]
        subprocess.run([*command, "start", config, "--daemon", "--name", "swap", *sets], check=True)
        try:
            status = [*command, "status", "--name", "swap", "--json"]
            now = json.loads(subprocess.run(status, check=True, capture_output=True).stdout)
            found = measure(now["url"], [*models], options)
            now = json.loads(subprocess.run(status, check=True, capture_output=True).stdout)
            found["residency"] = {model["name"]: model["residency"] for model in now["models"]}
            if options.ttl:
                found["idle"] = idle(now["url"], "m0", options)
        finally:
            subprocess.run([*command, "stop", "--name", "swap"], check=True)
    print(report(found))
    if options.ttl:
        print(f"idle: {found['idle']}")
    print("; ".join(f"{name}: {one['state']}, {one['loads']} loads, the last in {one['load_s']} s, "
                    f"{one['parked_bytes']} bytes parked" for name, one in found["residency"].items()))  # fmt: skip
    if options.json:
        write_json(options.json, {"machine": machine(), "files": options.files, **found})


if __name__ == "__main__":
    main()
