"""A terminal of any width that runs a command, knows what stands on its screen, and draws that as SVG."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from itertools import groupby

import pyte
from rich.console import Console
from rich.text import Text

from tests.e2e.process import Cli


class Terminal:
    """`with Terminal(cli, columns, "status") as terminal`: runs `lucevisor status`; leaving the block ends it."""

    def __init__(self, cli: Cli, columns: int, *arguments: str, rows: int = 50) -> None:
        self.columns = columns
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            env = {k: v for k, v in cli.env.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
            os.execve(sys.executable, [sys.executable, "-m", "lucevisor", *arguments], env)
        self.code: int | None = None
        self.written = b""
        """All that the command wrote."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGINT)
            self.read_until(lambda: False, 30)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def read_until(self, condition: Callable[[], object], seconds: float = 60.0) -> bool:
        """Show what the command writes until a condition holds (True), or the command ends or time is up (False)."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.code is not None or time.monotonic() > deadline:
                return False
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    data = os.read(self._fd, 1 << 16)
                except OSError:  # the command closed its end
                    self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                else:
                    self.written += data
                    self._stream.feed(data)
        return True

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._fd, keys.encode())

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, without empty ones at the end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def svg(self, title: str, name: str) -> str:
        """The screen as a picture; ``name`` is part of its ids."""
        console = Console(record=True, width=self.columns, file=io.StringIO(), force_terminal=True, color_system="256")
        for number in range(len(self.lines)):
            cells = [self._screen.buffer[number][column] for column in range(self.columns)]
            runs = [(style, "".join(cell.data for cell in run)) for style, run in groupby(cells, _style)]
            line = Text.assemble(*((text, style) for style, text in runs))
            line.rstrip()
            console.print(line, no_wrap=True, crop=True, highlight=False)
        svg = console.export_svg(title=title, unique_id=name)
        return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts of another site


def _style(cell: pyte.screens.Char) -> str:
    colour = {"default": "", "brown": "yellow"}.get(cell.fg, cell.fg)
    if colour.startswith("bright"):
        colour = f"bright_{colour.removeprefix('bright')}".replace("brown", "yellow")
    elif len(colour) == 6 and all(digit in "0123456789abcdef" for digit in colour):
        colour = f"#{colour}"
    return " ".join(filter(None, ("bold" if cell.bold else "", "italic" if cell.italics else "", colour)))
