"""Models that people run, with their trained weights, beside llama.cpp on the same file.

Both have float32 keys and values.  llama.cpp rounds activations that meet quantised matrices to 8 bits and ours do not,
so its log-probabilities are off by that, to both sides: perplexities agree, and likeliest tokens where the second best
is not close.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer
from tests.families.pipeline import Pipeline, load_stages
from tests.oracles.peer import Peer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

TEXT = Path(__file__).parents[1] / "data/alice.txt"
WINDOW, N_WINDOWS, N_GREEDY = 512, 3, 64
CLOSE = 1.0
"""Logits that llama.cpp's rounding of activations may swap, with the weights of these files."""
MAX_RATIO = 0.015
"""By how much perplexities may differ for that reason: 0.9 % with the smallest Gemma 3."""
EXACT = 2e-3
"""How far log-probabilities of two float32 runs may be apart."""
MAX_EXPANDED = 1 << 29
"""Bytes of a file that llama.cpp is also given in F32, in four to seven times as many."""
QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Explain in one sentence why the sky is blue.",
    "Count from one to ten.",
    "Translate to German: The weather is nice today.",
    "Give three synonyms of happy.",
    "Write a SQL query that counts the rows of the table users.",
    "What is 17 plus 25?",
]
BEGINNINGS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5,",
    "The most important thing about water is",
    "Monday, Tuesday, Wednesday,",
    "import numpy as np\n\n",
    "Dear Sir or Madam,",
]


def read(path: Path) -> tuple[ModelSpec, Tokenizer]:
    spec = open_spec(path)
    assert spec.files is not None
    return spec, Tokenizer.from_gguf(spec.files.metadata)


def prompts_of(spec: ModelSpec, tokenizer: Tokenizer) -> list[list[int]]:
    """Questions in the model's own template, or beginnings of texts where it has none."""
    assert spec.files is not None
    template = ChatTemplate.from_gguf(spec.files.metadata)
    if template is None:
        return [tokenizer.encode_prompt(text) for text in BEGINNINGS]
    return [template.render([{"role": "user", "content": text}]).ids(tokenizer) for text in QUESTIONS]


def in_float32(path: Path, peer: Peer) -> Path | None:
    """The same numbers in F32, with which llama.cpp rounds no activations; None: they would take too much memory."""
    if path.stat().st_size >= MAX_EXPANDED:
        return None
    peer.quantize(path, (expanded := peer.folder / "expanded.gguf", "F32"))
    return expanded


def test_perplexity(model, path, peer, measured):
    spec, tokenizer = read(path)
    ids = tokenizer.encode_prompt(TEXT.read_text())
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(N_WINDOWS)]
    pipeline, found = Pipeline(spec, load_stages(spec)), []
    for i, window in enumerate(windows):
        pipeline.open(i)
        logits = pipeline.run((i, window))[:-1].double()
        pipeline.close(i)
        found.append(torch.log_softmax(logits, dim=-1)[torch.arange(len(window) - 1), window[1:]].numpy())
    ours, theirs = np.stack(found), peer.scores(path, windows)
    if (expanded := in_float32(path, peer)) is not None:
        exact = np.abs(ours - peer.scores(expanded, windows))
        measured.append(
            f"{model.file}: log-probabilities beside llama.cpp with the same numbers in F32 {exact.max():.1e} apart"
        )
        assert exact.max() < EXACT
    perplexities = [float(np.exp(-x.mean())) for x in (ours, theirs)]
    ratio = perplexities[0] / perplexities[1]
    apart = np.abs(ours - theirs)
    measured.append(
        f"{model.file}: perplexity {perplexities[0]:.3f}, llama.cpp {perplexities[1]:.3f} ({100 * (ratio - 1):+.2f} %)"
    )
    measured.append(f"{model.file}: log-probabilities {apart.mean():.4f} apart on average, {apart.max():.2f} at most")
    assert abs(ratio - 1) <= MAX_RATIO


def test_likeliest_tokens(model, path, peer, measured):
    spec, tokenizer = read(path)
    prompts = prompts_of(spec, tokenizer)
    pipeline = Pipeline(spec, load_stages(spec))
    tokens = []
    for i, prompt in enumerate(prompts):
        pipeline.open(i)
        tokens.append([int(pipeline.run((i, prompt))[-1].argmax())])
    while len(tokens[0]) < N_GREEDY:  # all of them in a step, which reads the weights once
        rows = pipeline.run(*((i, text[-1:]) for i, text in enumerate(tokens)))
        for text, token in zip(tokens, rows.argmax(dim=-1).tolist(), strict=True):
            text.append(token)
    expanded = in_float32(path, peer)
    theirs, n_equal, wrong = peer.greedy(expanded or path, prompts, N_GREEDY), 0, []
    for ours, their in zip(tokens, theirs, strict=True):
        parted = next((i for i, pair in enumerate(zip(ours, their["tokens"], strict=True)) if len(set(pair)) > 1), None)
        if parted is None:
            n_equal += 1
            continue
        margin = their["margins"][parted]
        before = tokenizer.decode(ours[:parted])[-40:]
        words = [tokenizer.decode([x[parted]]) for x in (ours, their["tokens"])]
        measured.append(f"{model.file}: token {parted} after {before!r} is {words}; the second is {margin:.3f} behind")
        if margin > (CLOSE if expanded is None else EXACT):
            wrong.append(measured[-1])
    measured.append(f"{model.file}: the first {N_GREEDY} tokens of {n_equal} of {len(prompts)} prompts are equal")
    assert not wrong


def test_it_answers(model, path, tmp_path, measured):
    """`lucevisor start FILE`, and a question whose answer is known."""
    name, environment = f"real-{tmp_path.name}", os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "lucevisor"]
    started = subprocess.run(
        [*command, "start", str(path), "--set", "server.port=0", "--name", name, "--daemon"],
        env=environment, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        shown = subprocess.run([*command, "status", "--name", name, "--json"], env=environment, capture_output=True)
        url = json.loads(shown.stdout)["url"]
        question = {"messages": [{"role": "user", "content": "Who wrote Romeo and Juliet?"}]}
        body = question if model.chats else {"prompt": "Paris is the capital of France. Rome is the capital of"}
        where = "chat/completions" if model.chats else "completions"
        request = urllib.request.Request(
            f"{url}/v1/{where}",
            json.dumps(body | {"temperature": 0, "max_tokens": 24}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            [choice] = json.load(response)["choices"]
    finally:
        subprocess.run([*command, "stop", "--name", name], env=environment, capture_output=True, timeout=300)
    answer = choice["message"]["content"] if model.chats else choice["text"]
    measured.append(f"{model.file}: {answer!r}")
    assert ("Shakespeare" if model.chats else "Italy") in answer
