"""A start of three models that is stopped before it serves: by a signal at any moment, without waiting for the rest."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from lucevisor.errors import NotRunningError
from lucevisor.model.gguf_files import open_model
from tests.e2e.process import Cli, alive
from tests.e2e.service import MODELS
from tests.model.drafter_files import copy, tensors_of
from tests.waiting import wait_until

N_TOKENS = 200_000
STOP_S = 20.0
"""Far more than the 2 s that a stop takes on a quiet machine."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with a large vocabulary each: their tokenizers take seconds."""
    directory = tmp_path_factory.mktemp("stopped")
    embedding = tensors_of(MODELS["qwen3"])["token_embd.weight"]
    rows = np.pad(embedding, ((0, N_TOKENS - len(embedding)), (0, 0)))
    keys = {}
    for key, value in (("tokens", [f"<{i}>" for i in range(N_TOKENS)]), ("token_type", [1] * N_TOKENS)):
        known = open_model([MODELS["qwen3"]]).metadata[f"tokenizer.ggml.{key}"]
        assert isinstance(known, list)
        keys[f"tokenizer.ggml.{key}"] = known + value[len(known) :]
    model = copy(directory / "model.gguf", MODELS["qwen3"], keys=keys, extra={"token_embd.weight": rows})
    text = '[server]\nport = 0\n[engine]\npages = 64\nmax_sequences = 2\n[groups.left]\nbackend = "cpu"\nthreads = 1\n'
    text += "".join(f'[models.m{i}]\npath = "{model}"\n' for i in range(3))
    (directory / "config.toml").write_text(text)
    return directory / "config.toml"


def start(cli: Cli, config: Path) -> subprocess.Popen[str]:
    """A start that handles signals: it has claimed its run directory."""
    process = cli.popen("start", str(config), "--name", "t")
    wait_until(lambda: cli.socket().with_name("pid").exists(), 60, "the run directory is claimed")
    return process


def assert_stops(cli: Cli, process: subprocess.Popen[str], number: signal.Signals) -> list[str]:
    """Send a signal; return the events of the log."""
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - began < STOP_S) == (0, True), output
    wait_until(lambda: not any(alive(child.pid) for child in children), 20, "no process left")
    assert not cli.socket().parent.exists()
    return [json.loads(line)["event"] for line in output.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_wait_for_the_tokenizers_of_the_other_models(
    user_cli: Cli, config: Path, number: signal.Signals
) -> None:
    process = start(user_cli, config)

    def reason() -> str:
        try:
            status = user_cli.status()
        except NotRunningError:
            return ""
        assert (status["state"], status["url"]) == ("starting", "")
        return str(status["reason"])

    wait_until(reason, 60, "the admin socket answers before clients are served")
    events = assert_stops(user_cli, process, number)
    assert ("listening" in events, events[-1]) == (False, "stopped")


def test_a_stop_at_any_moment_leaves_nothing(user_cli: Cli, config: Path) -> None:
    for moment in (random.Random(7).uniform(0.0, 4.0) for _ in range(3)):
        process = start(user_cli, config)
        time.sleep(moment)
        assert_stops(user_cli, process, signal.SIGTERM)


def test_the_stop_command_works_while_tokenizers_are_built(user_cli: Cli, config: Path) -> None:
    process = start(user_cli, config)
    wait_until(user_cli.socket().exists, 60, "the admin socket")
    user_cli.stop()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, "listening" in output) == (0, False), output
