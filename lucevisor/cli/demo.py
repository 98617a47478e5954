"""``lucevisor demo``: a tour of the features in half a minute, on any machine with a cpu."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.openai_client import connect
from lucevisor.errors import ExitCode, LucevisorError, NotRunningError
from lucevisor.source_tree import locate

if TYPE_CHECKING:
    from openai import OpenAI

_STOP_S = 10.0
QUESTIONS = [
    "What does os.path.join do?",
    "Which function of module math returns the square root?",
    "How do I reverse a string in Python?",
]


def demo_config() -> Path:
    """etc/demo.toml, of the source tree or of the installed package."""
    path = locate("etc") / "demo.toml"
    if not path.is_file():
        raise LucevisorError(f"{path} is missing: install lucevisor again, or give a configuration with --config")
    return path


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Configuration instead of etc/demo.toml.",
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key.")
@click.option("--max-tokens", type=click.IntRange(1), default=120, show_default=True, help="Of an answer.")
def demo(config: Path | None, overrides: tuple[str, ...], max_tokens: int) -> int:
    """Start the bundled model over two daemons on a free port, ask three questions, restart one daemon, ask again,
    stop."""
    from lucevisor.cli.start import start

    with tempfile.TemporaryDirectory(prefix="lucevisor-demo-") as directory:
        os.environ |= dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), directory)  # leave nothing behind
        arguments = [str(config or demo_config()), "--name", "demo", "--daemon", "--set", "server.port=0"]
        arguments += ["--starter", str(os.getpid())]
        for override in overrides:
            arguments += ["--set", override]
        began = time.monotonic()
        run_dir = Path(directory) / "lucevisor" / "demo"
        admin = AdminClient(run_dir / "admin.sock")
        try:
            code = int(start.main(arguments, standalone_mode=False))
            return _run(admin, began, max_tokens) if code == ExitCode.DONE else code
        finally:
            if run_dir.exists():
                _stop(admin, run_dir)


def _run(admin: AdminClient, began: float, max_tokens: int) -> int:
    status = admin.call("GET", "/status")
    click.echo(
        f"started in {time.monotonic() - began:.1f} s: {status['model']['name']}, {status['model']['layers']} layers"
    )
    _print_shards(status)
    client = connect(status)
    first = [_ask(client, status, question, max_tokens) for question in QUESTIONS]
    victim = status["groups"][-1]["name"]
    began = time.monotonic()
    after = admin.call("POST", "/restart", {"groups": [victim], "now": False}, timeout_s=120.0)
    pids = [(a["pid"], b["pid"]) for a, b in zip(status["groups"], after["groups"], strict=True) if a["name"] == victim]
    click.echo(f"\nrestarted group {victim} in {time.monotonic() - began:.1f} s: pid {pids[0][0]} is now {pids[0][1]}")
    again = _ask(client, after, QUESTIONS[0], max_tokens)
    if again != first[0]:
        raise LucevisorError("the answer after the restart differs from the one before")
    click.echo("the same answer as before the restart")
    return ExitCode.DONE


def _print_shards(status: dict[str, Any]) -> None:
    for group in status["groups"]:
        for device in group["devices"]:
            start, stop = device["layers"]
            where = f"group {group['name']} (pid {group['pid']}): {device['device']}"
            click.echo(f"  {where} layers [{start},{stop}), {device['weight_bytes']} bytes of weights")


def _ask(client: OpenAI, status: dict[str, Any], question: str, max_tokens: int) -> str:
    import openai

    began = time.monotonic()
    try:
        answer = client.chat.completions.create(
            model=status["model"]["name"],
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
        )
    except openai.OpenAIError as error:
        raise LucevisorError(f"no answer to {question!r}: {error}") from error
    seconds = time.monotonic() - began
    text = (answer.choices[0].message.content or "").strip()
    n = answer.usage.completion_tokens if answer.usage is not None else 0
    path = " -> ".join(
        f"{d['device']} [{d['layers'][0]},{d['layers'][1]})" for g in status["groups"] for d in g["devices"]
    )
    click.echo(
        f"\nQ: {question}\nA: {text}\n   {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s, computed by {path}"
    )
    if not text:
        raise LucevisorError(f"no answer to {question!r}")
    return text


def _stop(admin: AdminClient, directory: Path) -> None:
    with contextlib.suppress(NotRunningError):
        admin.call("POST", "/stop")
    deadline = time.monotonic() + _STOP_S
    while directory.exists():
        if time.monotonic() > deadline:
            raise LucevisorError(f"the demo's supervisor did not stop within {_STOP_S:.0f} s; see {directory}")
        time.sleep(0.02)
    click.echo("stopped")
