"""The command line.  A command's module is imported when the command is chosen, so that ``--help`` and ``status``
stay quick.

Exit codes: 0 done, 1 failed while running, 2 wrong usage or configuration, 3 nothing running, 4 not ready in time.
"""

from __future__ import annotations

import importlib
import sys

import click

from lucevisor import __version__
from lucevisor.errors import ExitCode, LucevisorError

COMMANDS = {
    "start": ("lucevisor.cli.start", "Start the daemons and serve an OpenAI-compatible endpoint."),
    "stop": ("lucevisor.cli.operate", "Stop a running supervisor."),
    "status": ("lucevisor.cli.operate", "Show groups, layers, memory, speed."),
    "top": ("lucevisor.cli.top", "Watch speed, load, memory and requests."),
    "restart": ("lucevisor.cli.operate", "Restart the daemon of a group."),
    "logs": ("lucevisor.cli.logs", "Print the log of a running supervisor."),
    "plan": ("lucevisor.cli.plan", "Show where layers, weights and state would go, without loading."),
    "doctor": ("lucevisor.cli.doctor", "Check each group's interpreter, devices, memory and numbers."),
    "logits": ("lucevisor.cli.logits", "Run token ids through the pipeline and save logits and hidden states."),
    "cache": ("lucevisor.cli.cache", "List, verify, prune and remove snapshots on disk."),
    "chat": ("lucevisor.cli.chat", "Talk to a running supervisor."),
    "demo": ("lucevisor.cli.demo", "Start the bundled model over two daemons, ask questions, restart one, ask again."),
}


class _Lazy(click.Group):
    """Knows the commands' names and one-line help; imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lucevisor")
def cli() -> None:
    """One machine for local language models out of GPUs that cannot share one process."""


def main() -> None:
    """Entry point: errors are printed without a traceback and become exit codes."""
    try:
        code = cli.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = ExitCode.FAILED
    except click.ClickException as e:
        e.show()
        code = ExitCode.USAGE
    except LucevisorError as e:
        click.echo(f"lucevisor: {e}", err=True)
        code = e.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone
        code = ExitCode.FAILED
    sys.exit(int(code) if isinstance(code, int) else 0)
