"""The command line.  A command's module is imported when the command is chosen, so that ``status`` stays quick."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO

import click

from lucevisor import __version__
from lucevisor.errors import ExitCode, LucevisorError, nearest

COMMANDS = {
    "start": ("lucevisor.cli.start", "Start the daemons and serve an OpenAI-compatible endpoint."),
    "init": ("lucevisor.cli.plan", "Print a configuration for a model on the devices of this machine."),
    "stop": ("lucevisor.cli.operate", "Stop a running supervisor."),
    "status": ("lucevisor.cli.operate", "Show groups, layers, memory, speed."),
    "top": ("lucevisor.cli.top", "Watch speed, load, memory and requests."),
    "restart": ("lucevisor.cli.operate", "Restart the daemon of a group."),
    "reload": ("lucevisor.cli.operate", "Apply a changed configuration, such as another split, while requests run."),
    "load": ("lucevisor.cli.operate", "Load a model."),
    "unload": ("lucevisor.cli.operate", "Free the memory of a model until a request names it."),
    "logs": ("lucevisor.cli.logs", "Print the log of a running supervisor."),
    "plan": ("lucevisor.cli.plan", "Show where layers, weights and state would go, without loading."),
    "doctor": ("lucevisor.cli.plan", "Check each group's interpreter, devices, memory and numbers."),
    "logits": ("lucevisor.cli.logits", "Run token ids through the pipeline and save logits and hidden states."),
    "bench": ("lucevisor.cli.bench", "Measure prompts and answers a second, also beside llama.cpp."),
    "cluster": ("lucevisor.cli.cluster", "Prepare daemons on other hosts."),
    "serve-config": ("lucevisor.cli.serve_config", "Write a Ray Serve application of whole services."),
    "cache": ("lucevisor.cli.cache", "List, verify, prune and remove snapshots on disk."),
    "chat": ("lucevisor.cli.chat", "Talk to a running supervisor."),
    "chaos": ("lucevisor.chaos.run", "Inject random faults beside real traffic, and check every answer."),
    "demo": ("lucevisor.cli.demo", "Start the bundled model over two daemons, ask questions, kill one in mid-answer."),
}


EXAMPLES = {
    "start": (
        "lucevisor start etc/demo.toml",
        "lucevisor start MODEL.gguf --python /opt/rocm-env/bin/python",
        "lucevisor start hf:unsloth/Qwen3-4B-GGUF:Q4_K_M",
        "lucevisor start box.toml --daemon --set server.port=0",
    ),
    "init": ("lucevisor init MODEL.gguf > box.toml", "lucevisor init > sample.toml"),
    "stop": ("lucevisor stop --name box",),
    "status": ("lucevisor status", "lucevisor status --json | jq .engine.tokens_per_s", "lucevisor status --kernels"),
    "top": ("lucevisor top --every 0.5",),
    "restart": ("lucevisor restart hip", "lucevisor restart --rolling --now"),
    "reload": ("lucevisor reload", "lucevisor reload --set placement.target_layer_split=0.3,0.7"),
    "load": ("lucevisor load small",),
    "unload": ("lucevisor unload small",),
    "logs": ("lucevisor logs -f -n 20", "lucevisor logs hip --since 10m --level warning"),
    "plan": ("lucevisor plan box.toml", "lucevisor plan box.toml --set placement.target_layer_split=0.3,0.7"),
    "doctor": ("lucevisor doctor box.toml",),
    "logits": ("lucevisor logits box.toml --ids ids.json --out logits.npz",),
    "bench": (
        "lucevisor bench etc/demo.toml",
        "lucevisor bench box.toml -p 512,4096 -d 0,16384 -s 1,8 --against llama-bench --against-args '-ngl 99'",
    ),
    "cluster": (
        "lucevisor cluster secret ~/.config/lucevisor/secret",
        "lucevisor cluster start --address 10.0.0.1",
        "lucevisor cluster join 10.0.0.1:6379 --address 10.0.0.2 --resource amd=1",
        "lucevisor cluster status",
    ),
    "serve-config": ("lucevisor serve-config box.toml --services 1 4 --gpus 2",),
    "cache": ("lucevisor cache ls", "lucevisor cache prune --to 10GiB"),
    "chat": ("lucevisor chat --system 'Answer in one sentence.'",),
    "chaos": ("lucevisor chaos --minutes 20", "lucevisor chaos box.toml --seed 7"),
    "demo": ("lucevisor demo",),
}
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no supervisor runs, 4 not ready in time."


class _Lazy(click.Group):
    """Group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[cmd_name])])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; one that does not exist is refused with the nearest that does."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            ctx.fail(f"there is no command {args[0]!r}" + (f"; did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command.  For a supervisor's name given as an argument, the usage error points to --name."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            takes_name = error.ctx is not None and any(param.name == "name" for param in error.ctx.command.params)
            if takes_name and "unexpected extra argument" in error.message:
                raise click.UsageError(f"{error.message}; use --name to choose a supervisor", error.ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lucevisor")
def cli() -> None:
    """Serve a local language model over GPUs of any vendor."""


def main() -> None:
    """Entry point: errors are printed without a traceback and become exit codes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # commands end as at Ctrl-C, and clean up
    try:
        code = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as e:  # a full disk behind standard output, a directory that was removed
        _discard(sys.stdout)
        if not isinstance(e, BrokenPipeError):  # the reader of the output has left, as `head` does
            where = f"{e.filename}: " if e.filename is not None else ""
            _complain(partial(click.echo, f"lucevisor: {where}{e.strerror or e}", err=True))
        code = ExitCode.FAILED
    if sys.stderr is not None:
        _complain(sys.stderr.flush)  # its terminal may have been closed
    sys.exit(int(code) if isinstance(code, int) else 0)


def _run() -> object:
    """Run the command and return its exit code.  Raises OSError."""
    try:
        return cli.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return ExitCode.FAILED
    except click.ClickException as e:
        _complain(e.show)
        return ExitCode.USAGE
    except LucevisorError as e:
        _complain(partial(click.echo, f"lucevisor: {e}", err=True))
        return e.exit_code


def _complain(show: Callable[[], None]) -> None:
    """Write an error to standard error, if that takes it."""
    try:
        show()
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO | None) -> None:
    """Redirect a stream to /dev/null, so that the interpreter's last flush does not fail again."""
    if stream is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
