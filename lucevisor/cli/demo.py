"""``lucevisor demo``: a tour of the features in half a minute, on any machine with a cpu."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.chat import connect
from lucevisor.config import merge_overrides
from lucevisor.errors import ExitCode, LucevisorError, NotRunningError
from lucevisor.source_tree import locate

if TYPE_CHECKING:
    from openai import OpenAI

_STOP_S = 60.0  # a stop takes two seconds, and more on a busy machine
KILL_AFTER = 4
"""Chunks of the answer before the kill."""
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
@click.option("--max-tokens", type=click.IntRange(32), default=120, show_default=True, help="Of an answer.")
def demo(config: Path | None, overrides: tuple[str, ...], max_tokens: int) -> int:
    """Start the bundled model over two daemons on a free port, ask three questions, kill one daemon in the middle of
    an answer, stop."""
    from lucevisor.cli.start import start

    with tempfile.TemporaryDirectory(prefix="lucevisor-demo-") as directory:
        os.environ |= dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), directory)  # leave nothing behind
        arguments = [str(config or demo_config()), "--name", "demo", "--daemon", "--set", "server.port=0"]
        arguments += ["--starter", str(os.getpid())]
        exact = (
            ["engine.dtype=float32"] if config is None else []
        )  # half precision may round another token after a kill
        for override in merge_overrides(exact, overrides):
            arguments += ["--set", override]
        began = time.monotonic()
        run_dir = Path(directory) / "lucevisor" / "demo"
        admin = AdminClient(run_dir / "admin.sock")
        try:
            code = int(start.main(arguments, standalone_mode=False))
            return _run(admin, began, max_tokens, exact=bool(exact)) if code == ExitCode.DONE else code
        finally:
            if run_dir.exists():
                _stop(admin, run_dir)


def _run(admin: AdminClient, began: float, max_tokens: int, *, exact: bool) -> int:
    status = admin.call("GET", "/status")
    click.echo(
        f"started in {time.monotonic() - began:.1f} s: {status['model']['name']}, {status['model']['layers']} layers"
    )
    _print_shards(status)
    client = connect(status)
    first = [_ask(client, status, question, max_tokens) for question in QUESTIONS]
    again = _ask(client, status, QUESTIONS[0], max_tokens, kill=True)
    after = admin.call("GET", "/status")["groups"][-1]
    click.echo(f"group {after['name']} has another process: pid {after['pid']}, restarts {after['restarts']}")
    if again == first[0]:
        click.echo("the same answer as without the kill")
    elif exact:
        raise LucevisorError("the answer with the kill differs from the one without it")
    else:
        click.echo("the answer differs from the one without the kill, as it may in half precision")
    return ExitCode.DONE


def _print_shards(status: dict[str, Any]) -> None:
    for group in status["groups"]:
        for device in group["devices"]:
            start, stop = device["layers"]
            where = f"group {group['name']} (pid {group['pid']}): {device['device']}"
            click.echo(f"  {where} layers [{start},{stop}), {device['weight_bytes']} bytes of weights")


def _ask(client: OpenAI, status: dict[str, Any], question: str, max_tokens: int, *, kill: bool = False) -> str:
    """Stream an answer and return it.  With `kill`, kill the last group's daemon in the middle, and show the gap."""
    import openai

    victim, text, n, n_tokens = status["groups"][-1], "", 0, 0
    began, last_s, gap_s = time.monotonic(), time.monotonic(), 0.0
    click.echo(f"\nQ: {question}\nA: ", nl=False)
    try:
        stream = client.chat.completions.create(
            model=status["model"]["name"],
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            n_tokens = chunk.usage.completion_tokens if chunk.usage is not None else n_tokens
            if not chunk.choices or not (content := chunk.choices[0].delta.content):
                continue
            now, n, text = time.monotonic(), n + 1, text + content
            gap_s, last_s = max(gap_s, now - last_s) if n > KILL_AFTER else 0.0, now
            click.echo(content, nl=False)
            if kill and n == KILL_AFTER:
                os.kill(victim["pid"], signal.SIGKILL)
                click.echo(f" [pid {victim['pid']} of group {victim['name']} is killed] ", nl=False)
    except openai.OpenAIError as error:
        raise LucevisorError(f"no answer to {question!r}: {error}") from error
    if not text.strip():
        raise LucevisorError(f"no answer to {question!r}")
    if kill and n < KILL_AFTER:
        raise LucevisorError("the answer ended before a daemon could be killed")
    seconds = time.monotonic() - began
    devices = (device for group in status["groups"] for device in group["devices"])
    path = " -> ".join("{} [{},{})".format(device["device"], *device["layers"]) for device in devices)
    result = f"{n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.1f} tokens/s, computed by {path}"
    click.echo(f"\n   the stream paused for {gap_s:.2f} s, and no token was lost" if kill else f"\n   {result}")
    return text.strip()


def _stop(admin: AdminClient, directory: Path) -> None:
    with contextlib.suppress(NotRunningError):
        admin.call("POST", "/stop")
    deadline = time.monotonic() + _STOP_S
    while directory.exists():
        if time.monotonic() > deadline:
            raise LucevisorError(f"the demo's supervisor did not stop within {_STOP_S:.0f} s; see {directory}")
        time.sleep(0.02)
    click.echo("stopped")
