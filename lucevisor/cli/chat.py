"""``lucevisor chat``: a conversation in the terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lucevisor.app.rundir import find
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.openai_client import connect
from lucevisor.cli.options import target_options
from lucevisor.errors import ExitCode

if TYPE_CHECKING:
    from openai import OpenAI


@click.command()
@target_options
@click.option("--system", help="System prompt.")
@click.option("--think", is_flag=True, help="Enable thinking, if the model supports it.")
@click.option("--temperature", default=0.7, show_default=True)
def chat(name: str | None, socket: Path | None, system: str | None, think: bool, temperature: float) -> int:
    """Talk to the model.  An empty line or Ctrl-D ends the chat; /new starts a new conversation.  LUCEVISOR_API_KEY
    is the API key, if any."""
    status = AdminClient(find(name, socket).socket).call("GET", "/status")
    client = connect(status["url"], os.environ.get("LUCEVISOR_API_KEY", ""))
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    click.echo(f"{status['model']['name']} at {status['url']}; an empty line ends", err=True)
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return ExitCode.DONE
        if not said:
            return ExitCode.DONE
        if said == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": said})
        answer = _answer(client, status["model"]["name"], messages, think, temperature)
        messages.append({"role": "assistant", "content": answer})


def _answer(client: OpenAI, model: str, messages: list[dict[str, Any]], think: bool, temperature: float) -> str:
    import openai
    from openai.types.chat import ChatCompletionChunk

    parts: list[str] = []
    try:
        stream = client.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]  # the API takes plain dicts
            temperature=temperature,
            stream=True,
            extra_body={"chat_template_kwargs": {"enable_thinking": think}},
        )
        for chunk in stream:
            assert isinstance(chunk, ChatCompletionChunk)
            for choice in chunk.choices:
                thought = getattr(choice.delta, "reasoning_content", None)
                if thought:
                    click.secho(thought, nl=False, dim=True)
                if choice.delta.content:
                    parts.append(choice.delta.content)
                    click.echo(choice.delta.content, nl=False)
    except openai.OpenAIError as e:
        click.echo(f"\n[{e}]", err=True)
    except KeyboardInterrupt:
        click.echo("\n[interrupted]", err=True)
    click.echo()
    return "".join(parts)
