"""Are the answers of real models as good as llama.cpp's?  Every question is asked of both servers in the same run.

    python bench/quality.py FOLDER --llama DIRECTORY [--models NAME ...] [--parts NAME ...] [--at-once 4] [--save]
    python bench/quality.py --page

FOLDER has the files that `python -m tests.real.models FOLDER` downloads, DIRECTORY the programs llama-server and
llama-perplexity.  Ours is started as a user starts it, with a configuration of four lines and its defaults.  Parts:

    perplexity  a public-domain text (bench/data/alice.txt) in windows of 512, as llama-perplexity reads it
    greedy      templates, token ids, and the first 64 tokens; where they part, the logits of the two candidates, by
                our float32, too, which rounds no activations
    code        40 functions in Python, whose assertions are run in a process with limits
    tools       30 requests that need one call: its name and arguments
    needle      a number at four depths of a text
    arms        ours alone, in float32: a conversation of twenty turns is the same with and without what may change it
    drafts      tokens a second with the 0.5B as draft model of the 1.5B, of both servers in turns

--save writes bench/results/quality-cpu.json, keeping the parts that are not run now, and from it docs/quality.md
(quality_page.py); --page writes the page alone.
"""

import argparse
import contextlib
import json
import math
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

import quality_page
from records import RESULTS, machine, write_json
from services import ROOT, supervisor

from lucevisor.model.gguf_files import open_model

DATA = Path(__file__).parent / "data"
TEXT = DATA / "alice.txt"
RECORD, PAGE = RESULTS / "quality-cpu.json", ROOT / "docs" / "quality.md"
WINDOW, N_GREEDY, N_TOP = 512, 64, 5
DRAFTED, DRAFTER = "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M", "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M"
DEPTHS = (0.1, 0.4, 0.7, 0.95)
NEEDLES = (("harbor", "73935"), ("lantern", "20418"), ("violin", "58162"), ("meadow", "91647"))
PAST_CALLS = {r"'\n<tool_call>\n{": r"'\n```json\n{", r"}\n</tool_call>'": r"}\n```'"}
"""What writes past calls in the template of Qwen2.5-Coder, and what writes them as the models write calls."""
CORES = len(os.sched_getaffinity(0))
"""Threads of each server, as by default; `taskset` gives both fewer where others use the machine."""


def data(name):
    return json.loads((DATA / f"quality-{name}.json").read_text())


@dataclass(frozen=True)
class Model:
    """A file, and what can be asked of it."""

    path: Path

    @property
    def name(self):
        return self.path.stem

    @cached_property
    def template(self):
        return open_model([self.path]).metadata.get("tokenizer.chat_template", "")

    @property
    def has_tools(self):
        return "tools" in self.template

    def fenced_template(self):
        """The template with past calls in blocks of Markdown, which changes no prompt here: none has past calls.
        llama-server infers from them how the model writes calls, and these models write blocks, not the tags."""
        template = self.template
        for tagged, fenced in PAST_CALLS.items():
            if template.count(tagged) != 1:
                raise SystemExit(f"{self.path}: {tagged} must be in its chat template once: adapt PAST_CALLS")
            template = template.replace(tagged, fenced)
        return template

    def parts(self):
        coder = ["code", "tools"] if self.has_tools else []
        return ["perplexity", "greedy", *coder, "needle", "arms", *(["drafts"] if self.name == DRAFTED else [])]


# Servers


@dataclass(frozen=True)
class Server:
    """An endpoint that both kinds of servers have."""

    url: str

    def ask(self, path, body=None):
        with self._open(path, body) as answer:
            return json.load(answer)

    def stream(self, path, body):
        """Yield the events of a streamed answer."""
        with self._open(path, {**body, "stream": True}) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def _open(self, path, body):
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=1800)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self.url}{path}: {error.code} {error.read().decode()[:500]}") from None


def four_lines(path):
    return f'[model]\npath = "{path}"\n[groups.main]\nbackend = "cpu"\n'


def two_groups(path):
    groups = "".join(f'[groups.g{i}]\nbackend = "cpu"\nthreads = 1\n' for i in range(2))
    return f'[model]\npath = "{path}"\n{groups}'


@contextlib.contextmanager
def ours(model, *overrides, config=four_lines):
    """Our server, as `lucevisor start` starts it with a file of four lines."""
    with tempfile.TemporaryDirectory(prefix="lv-quality-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(config(model.path))
        with supervisor(
            f"quality-{os.getpid()}-{len(model.name)}-{time.time_ns()}", file, "server.port=0", *overrides
        ) as status:
            yield Server(status["url"])


@contextlib.contextmanager
def llama_server(options, model, *arguments):
    """llama-server on the same file and as many threads, with a slot for each request at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [options.llama / "llama-server", "-m", model.path, "--port", port, "-t", CORES]
    command += ["-np", options.at_once, "-c", 8192 * options.at_once]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        if model.has_tools:
            (template := Path(folder) / "template.jinja").write_text(model.fenced_template())
            command += ["--chat-template-file", template]
        process = subprocess.Popen([*map(str, command), *arguments], stdout=log, stderr=log)
        try:
            server = Server(f"http://127.0.0.1:{port}")
            while not _is_ready(server):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"llama-server ended: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            process.wait()


def _is_ready(server):
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


# Perplexity


def perplexity(model, own, their, options):
    """Perplexities by windows of 512, of whose second halves each token counts, as in llama-perplexity."""
    ids = own.ask("/tokenize", {"content": TEXT.read_text().rstrip("\n"), "add_special": True})["tokens"]
    same = ids == their.ask("/tokenize", {"content": TEXT.read_text().rstrip("\n"), "add_special": True})["tokens"]
    begin = open_model([model.path]).metadata
    bos = begin["tokenizer.ggml.bos_token_id"] if begin.get("tokenizer.ggml.add_bos_token", ids[0] == 2) else None
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)][: options.windows]
    if bos is not None:
        windows = [[bos, *window[1:]] for window in windows]
    scores = {"default": [_surprise(own, window) for window in windows]}
    with ours(model, "engine.dtype=float32", "engine.max_context=1024") as exact:
        scores["float32"] = [_surprise(exact, window) for window in windows]
    scores["llama.cpp"] = _llama_perplexity(options, model, len(windows))
    found = {"windows": len(windows), "token_ids_equal": same}
    for name, values in scores.items():
        found[name] = math.exp(statistics.fmean(values))
    for name, base in (("default", "llama.cpp"), ("default", "float32"), ("llama.cpp", "float32")):
        apart = [a - b for a, b in zip(scores[name], scores[base], strict=True)]
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        found[f"{name} beside {base}"] = {"percent": 100 * math.expm1(statistics.fmean(apart)), "error": 100 * error}
    return found


def _surprise(server, window):
    """Mean of -log p over the second half of a window."""
    body = {"prompt": window, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    [choice] = server.ask("/v1/completions", body)["choices"]
    return -statistics.fmean(choice["logprobs"]["token_logprobs"][WINDOW // 2 + 1 : WINDOW])


def _llama_perplexity(options, model, n):
    """The same of each window, from the running estimates that llama-perplexity prints."""
    command = [
        options.llama / "llama-perplexity",
        "-m",
        model.path,
        "-f",
        TEXT,
        "-c",
        WINDOW,
        "--chunks",
        n,
        "-t",
        CORES,
    ]
    said = subprocess.run([*map(str, command)], capture_output=True, text=True, errors="replace", check=True)
    running = [float(value) for value in re.findall(r"\[\d+\](\d+\.\d+),", said.stdout + said.stderr)]
    sums = [i * math.log(value) for i, value in enumerate(running, 1)]
    return [after - before for before, after in zip([0.0, *sums], sums, strict=False)]


# Greedy answers


def greedy(model, own, their, options):
    """Equal templates, ids and tokens; of unequal answers the two candidates where they part."""
    prompts, templates, ids_equal = [], 0, 0
    for question in _questions(options.prompts):
        rendered = [question, question]
        if model.template:
            chat = {"messages": [{"role": "user", "content": question}]}
            rendered = [server.ask("/apply-template", chat)["prompt"] for server in (own, their)]
        templates += rendered[0] == rendered[1]
        body = {"content": rendered[0], "add_special": True, "parse_special": True}
        ids = [server.ask("/tokenize", body)["tokens"] for server in (own, their)]
        ids_equal += ids[0] == ids[1]
        prompts.append(ids[0])
    parted = []
    eos = open_model([model.path]).metadata["tokenizer.ggml.eos_token_id"]
    own_answers = at_once(options, lambda ids: _tokens(own, ids, eos), prompts)
    their_answers = at_once(options, lambda ids: _tokens(their, ids, eos), prompts)
    for ids, a, b in zip(prompts, own_answers, their_answers, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x["id"] != y["id"]), None)
        if at is not None:
            parted.append((ids, at, a[at], b[at], [token["id"] for token in a[:at]]))
    cases = []
    with ours(model, "engine.dtype=float32", "engine.max_context=4096") as exact:
        for ids, at, x, y, before in parted:
            pair = [x["id"], y["id"]]
            texts = [own.ask("/detokenize", {"tokens": part})["content"] for part in (ids, before, pair[:1], pair[1:])]
            apart = {
                "ours": _distance_after(own, [*ids, *before], pair) if x["id"] == eos else distance(x, pair),
                "llama.cpp": distance(y, pair),
                "float32": _distance_after(exact, [*ids, *before], pair),
            }
            cases.append({
                "prompt": texts[0][-80:], "token": at, "before": texts[1][-40:], "candidates": texts[2:],
                "apart": apart,
            })  # fmt: skip
    return {
        "prompts": len(prompts), "templates_equal": templates, "ids_equal": ids_equal,
        "answers_equal": len(prompts) - len(parted), "parted": cases,
    }  # fmt: skip


def _questions(n):
    """Questions, then paragraphs of the text."""
    paragraphs = [part for part in TEXT.read_text().split("\n\n") if len(part) > 80]
    return [*data("prompts")["questions"], *(" ".join(part.split()[:40]) for part in paragraphs)][:n]


def _tokens(server, ids, eos):
    """The likeliest tokens with the best candidates of each, to the one that ends the answer: our server omits that."""
    answer = _ask_tokens(server, ids, N_GREEDY)
    tokens = answer["completion_probabilities"]
    if answer["stop_type"] == "limit" or tokens[-1]["id"] == eos:
        return tokens
    text = [*ids, *(token["id"] for token in tokens)]
    [end] = _ask_tokens(server, text, 1, ignore_eos=True)["completion_probabilities"]
    return [*tokens, {**end, "id": eos}]


def _ask_tokens(server, ids, n, **fields):
    body = {"prompt": ids, "n_predict": n, "temperature": 0, "n_probs": N_TOP, "cache_prompt": False, **fields}
    return server.ask("/completion", body)


def distance(token, pair):
    """How far the logit of one candidate is above another's; None if they are not among the best."""
    known = {top["id"]: top["logprob"] for top in token["top_logprobs"]}
    return known[pair[0]] - known[pair[1]] if set(pair) <= known.keys() else None


def _distance_after(server, ids, pair):
    """The same of our server, which has no candidates of the token that ends an answer."""
    logprobs = []
    for token in pair:
        body = {"prompt": [*ids, token], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
        [choice] = server.ask("/v1/completions", body)["choices"]
        logprobs.append(choice["logprobs"]["token_logprobs"][-1])
    return logprobs[0] - logprobs[1]


def at_once(options, ask, items):
    """Answers in the order of ``items``, asked a few at once."""
    with ThreadPoolExecutor(options.at_once) as pool:
        return [*pool.map(ask, items)]


# Tasks


def code(model, own, their, options):
    """Functions whose assertions pass, by server.  The task's own solution must pass them, too."""
    tasks = data("code")
    for task in tasks:
        if verdict := run_code(task["solution"], task["tests"]):
            raise SystemExit(f"{task['signature']}: its own solution fails: {verdict}")
    found, unlike = {"tasks": len(tasks), "ours": 0, "llama.cpp": 0}, []

    def verdict_of(server, task):
        question = f"Write a Python function `{task['signature']}` that {task['task']}. Answer with one block of code."
        messages = [{"role": "user", "content": question}]  # what is said behind the block would only take time
        said = _chat(server, messages, max_tokens=300, stop=["\n```\n"])["content"] or ""
        return run_code(said.split("```python")[-1].split("```")[0], task["tests"])

    verdicts = [at_once(options, partial(verdict_of, server), tasks) for server in (own, their)]
    for task, *pair in zip(tasks, *verdicts, strict=True):
        for name, verdict in zip(("ours", "llama.cpp"), pair, strict=True):
            found[name] += not verdict
        if bool(pair[0]) != bool(pair[1]):
            unlike.append({"task": task["signature"], "verdicts": pair})
    return {**found, "unlike": unlike}


def run_code(text, tests, seconds=5):
    """The last line of what a program with its assertions reports; empty if all pass."""
    raises = (
        "def raises(kind, f, *a):\n    try:\n        f(*a)\n    except kind:\n        return True\n    return False\n"
    )
    lines = "\n".join(f"assert {test}" for test in tests)

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.py"
        file.write_text(f"{text}\n\n{raises}{lines}\n")
        try:
            done = subprocess.run(
                [sys.executable, "-I", file], cwd=folder, env={}, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=4 * seconds, preexec_fn=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "takes too long"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def tools(model, own, their, options):
    """Right calls by server and choice: with `auto` the model may answer without a call."""
    asked = data("tools")
    found, unlike = {"tasks": len(asked["tasks"])}, []

    def answer_of(server, choice, task):
        """True, or the wrong answer."""
        messages = [{"role": "user", "content": task["question"]}]
        fields = {"tools": asked["tools"], "tool_choice": choice, "parallel_tool_calls": False}
        said = _chat(server, messages, max_tokens=160, **fields)
        return _is_right(said.get("tool_calls") or [], task) or said.get("tool_calls") or said.get("content")

    for choice in ("auto", "required"):
        both = [at_once(options, partial(answer_of, server, choice), asked["tasks"]) for server in (own, their)]
        answers = dict(zip(("ours", "llama.cpp"), both, strict=True))
        found[choice] = {name: sum(answer is True for answer in given) for name, given in answers.items()}
        for i, task in enumerate(asked["tasks"]):
            right = {name: given[i] for name, given in answers.items()}
            if (right["ours"] is True) != (right["llama.cpp"] is True):
                unlike.append({"question": task["question"], "choice": choice, **right})
    return {**found, "unlike": unlike}


def _is_right(calls, task):
    if len(calls) != 1 or calls[0]["function"]["name"] != task["name"]:
        return False
    arguments = json.loads(calls[0]["function"]["arguments"])

    def plain(value):
        return value.strip().casefold() if isinstance(value, str) else value

    for name, wanted in task["arguments"].items():
        choices = wanted if isinstance(wanted, list) else [wanted]
        if plain(arguments.get(name)) not in [plain(choice) for choice in choices]:
            return False
    return True


def needle(model, own, their, options):
    """A number found at each depth, by server."""
    paragraphs = TEXT.read_text()[:6000].split("\n\n")[5:]
    found = {"depths": list(DEPTHS), "ours": [], "llama.cpp": []}
    for depth, (word, number) in zip(DEPTHS, NEEDLES, strict=True):
        at = round(depth * len(paragraphs))
        text = "\n\n".join([*paragraphs[:at], f"The secret number of {word} is {number}.", *paragraphs[at:]])
        for name, server in (("ours", own), ("llama.cpp", their)):
            if model.template:
                question = f"{text}\n\nWhat is the secret number of {word}?"
                said = _chat(server, [{"role": "user", "content": question}], max_tokens=32)["content"]
            else:
                body = {"prompt": f"{text}\n\nThe secret number of {word} is", "n_predict": 12, "temperature": 0}
                said = server.ask("/completion", body)["content"]
            found[name].append(number in said)
    return found


def _chat(server, messages, **fields):
    body = {"messages": messages, "temperature": 0, **fields}
    return server.ask("/v1/chat/completions", body)["choices"][0]["message"]


# Arms: ours alone


class Conversation:
    """Turns with one server after the other, greedy; each asks for an answer to all before it."""

    def __init__(self, model, n_tokens):
        asked = data("prompts")["conversation"]
        self.model, self.n_tokens, self.system, self.turns = model, n_tokens, asked["system"], asked["turns"]
        self.answers, self.texts, self.cached = [], [], []

    def go_on(self, server, n=None, in_answer=None):
        """``n`` turns more; ``in_answer(turn)`` is called once in each, when a third of it is there."""
        for turn in range(len(self.answers), len(self.turns))[:n]:
            tokens, text, cached, due = [], "", 0, in_answer
            for event in server.stream(*self._request()):
                cached = cached or ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or []
                    text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if due is not None and len(tokens) >= self.n_tokens // 3:
                    due(turn)
                    due = None
            self.answers.append(tokens)
            self.texts.append(text)
            self.cached.append(cached or 0)
        return self

    def _request(self):
        body = {"temperature": 0, "max_tokens": self.n_tokens, "return_token_ids": True, "ignore_eos": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        turns, answers = self.turns[: len(self.answers) + 1], [*self.texts, ""]
        if not self.model.template:
            talk = "".join(f"\n\nQuestion: {t}\nAnswer:{a}" for t, a in zip(turns, answers, strict=True))
            return "/v1/completions", {**body, "prompt": self.system + talk}
        messages = [{"role": "system", "content": self.system}]
        for turn, answer in zip(turns, answers, strict=True):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return "/v1/chat/completions", {**body, "messages": messages[:-1]}


def arms(model, options):
    """Turns of a conversation with the same tokens as with nothing on; ``seen`` shows that an arm was at work."""
    found = {"turns": 0, "tokens": options.turn_tokens, "arms": {}}
    plain = ["engine.dtype=float32", "engine.max_context=4096", "engine.max_sequences=2"]
    off, no_drafts = "cache.prefix_slots=0", "draft.kind=off"

    def talk(server, n=None, in_answer=None):
        return Conversation(model, options.turn_tokens).go_on(server, n, in_answer)

    def status(server):
        return server.ask("/status")

    with ours(model, *plain, off, no_drafts) as server:
        reference = talk(server).answers
    found["turns"], found["total_tokens"] = len(reference), sum(map(len, reference))

    def note(name, conversation, seen):
        equal = sum(map(list.__eq__, conversation.answers, reference))
        found["arms"][name] = {"equal": equal, "seen": seen}
        print(f"  {name}: {equal} of {len(reference)} turns equal; {seen}", flush=True)

    with ours(model, *plain, no_drafts) as server:
        note("cache in memory", done := talk(server), {"cached_tokens": sum(done.cached)})
    with tempfile.TemporaryDirectory() as folder:
        on_disk = [*plain, no_drafts, f"cache.dir={folder}"]
        with ours(model, *on_disk) as server:
            done = talk(server, n=(half := len(reference) // 2))
        with ours(model, *on_disk) as server:
            done.go_on(server)
            note(f"cache on disk, restarted after {half} turns", done, {"cached_at_restart": done.cached[half]})
    with ours(model, *plain, no_drafts, config=two_groups) as server:
        layers = [group["devices"][0]["layers"] for group in status(server)["groups"]]
        note("two daemons", talk(server), {"layers": layers})
    with ours(model, *plain, no_drafts, config=two_groups) as server:

        def kill(turn):
            os.kill(status(server)["groups"][turn % 2]["pid"], signal.SIGKILL)

        done = talk(server, in_answer=kill)
        note("a daemon killed in each answer", done, {"restarts": [g["restarts"] for g in status(server)["groups"]]})
    with ours(model, *plain, off, no_drafts, "kvflash.pool_tokens=512", "kvflash.policy=exact") as server:
        most = []
        done = talk(server, in_answer=lambda turn: most.append(status(server)["engine"]["pages"]["out"]))
        note("KV Flash, policy exact, 512 tokens", done, {"pages_out": max(most)})
    with ours(model, *plain, "draft.kind=lookup", "draft.width=4") as server:
        note("drafts by lookup, width 4", talk(server), {"accepted": status(server)["draft"]["lookups"]["accepted"]})
    if model.name == DRAFTED:
        with ours(model, *plain, "draft.kind=model", f"draft.path={drafter_of(model)}") as server:
            note("drafts by the 0.5B", talk(server), {"tokens_per_step": status(server)["draft"]["tokens_per_step"]})
    return found


# Drafts


def drafter_of(model):
    return model.path.with_name(f"{DRAFTER}.gguf")


def drafts(model, options):
    """Tokens a second of the same answers with and without a draft model, of both servers in turns."""
    drafter = drafter_of(model)
    with contextlib.ExitStack() as stack:
        pair = ["--spec-type", "draft-simple", "-md", str(drafter), "--spec-draft-n-max", "8"]
        few = ["engine.max_context=4096", "engine.max_sequences=2", "cache.prefix_slots=0"]
        starts = {
            "ours": ours(model, *few, "draft.kind=off"),
            "ours, drafts": ours(model, *few, "draft.kind=model", f"draft.path={drafter}"),
            "llama.cpp": llama_server(options, model),
            "llama.cpp, drafts": llama_server(options, model, *pair),
        }
        servers = {name: stack.enter_context(server) for name, server in starts.items()}
        seconds, n_tokens, answers = Counter(), Counter(), {}
        prompts = [_rendered(servers["ours"], model, text) for text in data("prompts")["long_code"]]
        for i in range(options.rounds):
            for j, ids in enumerate(prompts):
                names = list(servers)
                names = names[(i + j) % 4 :] + names[: (i + j) % 4]
                for name in names:
                    body = {
                        "prompt": ids,
                        "n_predict": 200,
                        "temperature": 0,
                        "ignore_eos": True,
                        "cache_prompt": False,
                    }
                    began = time.monotonic()
                    answer = servers[name].ask("/completion", {**body, "return_tokens": True})
                    if i or j:  # the first question warms up
                        seconds[name] += time.monotonic() - began
                        n_tokens[name] += answer["tokens_predicted"]
                    answers[name, j] = answer["tokens"]
        status = servers["ours, drafts"].ask("/status")["draft"]
    speeds = {name: n_tokens[name] / seconds[name] for name in seconds}
    equal = {
        name: sum(answers[name, j] == answers[f"{name}, drafts", j] for j in range(len(prompts)))
        for name in ("ours", "llama.cpp")
    }
    return {
        "prompts": len(prompts), "rounds": options.rounds, "tokens_per_s": speeds, "answers_equal": equal,
        "ratio": {name: speeds[f"{name}, drafts"] / speeds[name] for name in ("ours", "llama.cpp")},
        "tokens_per_step": status["tokens_per_step"], "width": status["width"],
    }  # fmt: skip


def _rendered(server, model, question):
    text = server.ask("/apply-template", {"messages": [{"role": "user", "content": question}]})["prompt"]
    return server.ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]


BESIDE = {"perplexity": perplexity, "greedy": greedy, "code": code, "tools": tools, "needle": needle}
ALONE = {"arms": arms, "drafts": drafts}


def measure(model, parts, options):
    """Yield each part's name and figures."""
    if beside := [part for part in parts if part in BESIDE]:
        with ours(model) as own, llama_server(options, model) as their:
            for part in beside:
                yield part, BESIDE[part](model, own, their, options)
    for part in parts:
        if part in ALONE:
            yield part, ALONE[part](model, options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--llama", type=Path, help="the directory of llama-server and llama-perplexity")
    parser.add_argument("--models", nargs="+", help="beginnings of file names; all")
    parser.add_argument("--parts", nargs="+", choices=[*BESIDE, *ALONE], default=[*BESIDE, *ALONE])
    parser.add_argument("--prompts", type=int, default=200, help="of the greedy answers")
    parser.add_argument("--at-once", type=int, default=4, help="requests, of greedy answers, code and tools")
    parser.add_argument("--windows", type=int, default=24, help="of the perplexity")
    parser.add_argument("--turn-tokens", type=int, default=32, help="of each answer in a conversation")
    parser.add_argument("--rounds", type=int, default=2, help="of all prompts for drafts")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        for path in sorted(options.folder.glob("*.gguf"), key=lambda path: path.stat().st_size):
            if options.models and not path.name.startswith(tuple(options.models)):
                continue
            model = Model(path)
            for part, figures in measure(model, [p for p in model.parts() if p in options.parts], options):
                print(model.name, part, json.dumps(figures), flush=True)
                about = {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip(), **machine()}
                if options.save:
                    keep(model.name, part, {**figures, "conditions": about})
    if options.save or options.page:
        PAGE.write_text(quality_page.page(json.loads(RECORD.read_text())))


def keep(name, part, figures):
    """Write a part at once: a run that is cut short has its parts, and two runs may have parts of their own."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"models": {}}
    record["models"].setdefault(name, {})[part] = figures
    write_json(RECORD, record)


if __name__ == "__main__":
    main()
