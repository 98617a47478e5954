"""``lucevisor chat``: a conversation in the terminal, with line editing, history and markdown."""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lucevisor.app.rundir import find_supervisor
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import RangeOfNumbers, target_options
from lucevisor.errors import ExitCode, LucevisorError, NotReadyError, nearest

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionChunk
    from rich.console import Console

HELP = """\
/new                  begin a new conversation
/system TEXT          set the system prompt and begin a new conversation; without TEXT: none
/temperature NUMBER   0 is the likeliest answer, 2 the most varied
/think on|off         let the model think first, if it can
/help                 this list
/quit, Ctrl-D         end
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""
COMMANDS = ("/new", "/system", "/temperature", "/think", "/help", "/quit")


@dataclass
class Conversation:
    """Messages and settings that are sent with a question."""

    system: str = ""
    think: bool = False
    temperature: float = 0.7
    messages: list[dict[str, Any]] = field(default_factory=list)

    def sent(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def run_command(self, line: str) -> str | None:
        """Carry out a line that begins with a slash; return what to say, or None for the end."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return None
        if name in ("/new", "/system"):
            self.messages.clear()
            if name == "/new":
                return "a new conversation"
            self.system = rest
            return "a new conversation with this system prompt" if rest else "a new conversation without system prompt"
        if name == "/think" and rest in ("on", "off"):
            self.think = rest == "on"
            return f"thinking is {rest}"
        if name == "/temperature":
            with contextlib.suppress(ValueError):
                if 0 <= (value := float(rest)) <= 2:
                    self.temperature = value
                    return f"temperature {value:g}"
            return "/temperature takes a number from 0 to 2"
        if name == "/think":
            return "/think takes on or off"
        if name == "/help":
            return HELP
        near = nearest(name, COMMANDS)
        return f"there is no command {name}; " + (f"did you mean {near}?" if near else "/help lists them")


@click.command()
@target_options
@click.option("--model", default="", help="One of several models, or a LoRA adapter (default: the first model).")
@click.option("--system", default="", help="System prompt.")
@click.option("--think", is_flag=True, help="Enable thinking, if the model supports it.")
@click.option("--temperature", type=RangeOfNumbers(0, 2), default=0.7, show_default=True)
def chat(name: str | None, socket: Path | None, model: str, system: str, think: bool, temperature: float) -> int:
    """Talk to the model; /help lists the commands of the chat, Ctrl-D ends it.  LUCEVISOR_API_KEY is the API key, if
    any."""
    from rich.console import Console

    status = AdminClient(find_supervisor(name, socket).socket).call("GET", "/status")
    client = connect(status, os.environ.get("LUCEVISOR_API_KEY", ""))
    conversation = Conversation(system, think, temperature)
    console = Console(highlight=False)
    model = model or status["model"]["name"]
    names = [part["name"] for part in status["models"] if not part.get("replica")]
    others = f" (--model chooses of {', '.join(names)})" if len(names) > 1 else ""
    click.echo(f"{model} at {status['url']}{others}; /help lists commands, Ctrl-D ends", err=True)
    with _line_editing():
        while (line := _read()) is not None:
            if not line:
                continue
            if line.startswith("/"):
                reply = conversation.run_command(line)
                if reply is None:
                    break
                click.echo(reply, err=True)
                continue
            conversation.messages.append({"role": "user", "content": line})
            if answer := _answer(client, console, model, conversation):
                conversation.messages.append({"role": "assistant", "content": answer})
            else:
                conversation.messages.pop()
    return ExitCode.DONE


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Edit lines with the keys of readline, and keep their history for later chats."""
    if not sys.stdin.isatty():
        yield
        return
    import readline

    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = state / "lucevisor" / "chat_history"
    readline.set_history_length(1000)
    readline.set_completer_delims(" ")
    readline.set_completer(_completion)
    readline.parse_and_bind("tab: complete")
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a chat is no reason to fail for its history
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(0o600)
            readline.write_history_file(file)


def _completion(text: str, index: int) -> str | None:
    names = [name for name in COMMANDS if name.startswith(text)] if text else []
    return names[index] if index < len(names) else None


def _read() -> str | None:
    lines: list[str] = []
    try:
        while True:
            line = input("… " if lines else "> ")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines).strip()
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None


def _answer(client: OpenAI, console: Console, model: str, conversation: Conversation) -> str:
    """Stream an answer to the terminal and return it; empty if there is none."""
    import openai

    shown = _AnswerView(console)
    messages: Any = conversation.sent()  # the API takes plain dicts, its types do not
    try:
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=conversation.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"chat_template_kwargs": {"enable_thinking": conversation.think}},
        )
        with shown:
            for chunk in stream:
                shown.add(chunk)
    except openai.OpenAIError as error:
        click.echo(f"[{error}]", err=True)
    except KeyboardInterrupt:
        click.echo("[stopped]", err=True)
    return shown.text


class _AnswerView:
    """View of a streamed answer: markdown on a terminal, plain text elsewhere, and its speed at the end."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self.text = ""
        self._thought = ""
        self._console = console
        self._first_s = 0.0
        self._speed = ""
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, transient=True, refresh_per_second=8, vertical_overflow="ellipsis")

    def __enter__(self) -> _AnswerView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is None:
            click.echo()
            return
        self._live.stop()
        self._console.print(self._view())
        if self._speed:
            self._console.print(self._speed, style="dim")

    def add(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            content = choice.delta.content or ""
            if (thought or content) and not self._first_s:
                self._first_s = time.monotonic()
            self._thought += thought
            self.text += content
            if self._live is None:
                click.echo(content, nl=False)
        if chunk.usage is not None:
            n, seconds = chunk.usage.completion_tokens, time.monotonic() - self._first_s
            self._speed = f"{chunk.usage.prompt_tokens} → {n} tokens"
            if self._first_s and n > 1 and seconds > 0:
                self._speed += f", {(n - 1) / seconds:.1f} tokens/s"
        if self._live is not None:
            self._live.update(self._view())

    def _view(self) -> Any:
        from rich.console import Group
        from rich.markdown import Markdown
        from rich.text import Text

        parts = [Text(self._thought.strip(), style="dim")] if self._thought.strip() else []
        return Group(*parts, Markdown(self.text))


def connect(status: dict[str, Any], key: str = "") -> OpenAI:
    """Return a client of the supervisor with that status.  Raises LucevisorError if the `openai` package is missing."""
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError as e:
        raise LucevisorError("this command needs the `openai` package: pip install 'lucevisor[client]'") from e
    if not status["url"]:
        raise NotReadyError(f"{status['name']} starts and does not listen yet: {status['reason']}; try again later")
    http_client = DefaultHttpxClient(verify=_trust_certificate(cert)) if (cert := status["tls_cert_file"]) else None
    return OpenAI(base_url=f"{status['url']}/v1", api_key=key or "none", max_retries=0, http_client=http_client)


def _trust_certificate(cert_file: str) -> ssl.SSLContext:
    """Return a context that trusts this certificate of the local supervisor, for any host name."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
