"""The project's exceptions and their exit codes.

Invariant: every message says what happened, where (the key, field or file) and what to do about it, and every error has
exactly one exit code.

    LucevisorError              1  it failed while running
      ConfigError               2  one wrong setting
        ConfigErrors            2  several of them, found at once
      AdminError                2  an operator asked for what does not exist
      NotRunningError           3  there is no supervisor to talk to
      NotReadyError             4  the pipeline was not ready in time
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from pathlib import Path
from typing import ClassVar, Final


class ExitCode(IntEnum):
    """Exit status of the commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    NOT_READY = 4


class _Absent(Enum):
    VALUE = "no value"


NO_VALUE: Final = _Absent.VALUE
"""Stands for the value of a setting that is missing, so that None stays a value."""


class LucevisorError(Exception):
    """An error whose message is for the user of a command; `exit_code` is the exit status of the process."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class ConfigError(LucevisorError):
    """A wrong setting: its key, its value, why it is refused and what to write instead.

    `key` is dotted (`placement.target_devices[1]`) or empty when the whole file is meant; `value` is `NO_VALUE` when
    there is none to show.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, key: str, value: object, why: str, hint: str = "", *, file: str = "") -> None:
        self.key = key
        self.value = value
        self.why = why
        self.hint = hint
        self.file = file
        super().__init__(format_error(key, value, why, hint, file))

    @property
    def errors(self) -> tuple[ConfigError, ...]:
        """This error alone."""
        return (self,)


class ConfigErrors(ConfigError):
    """Several wrong settings, in the order they were found; its attributes are those of the first."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        if not errors:
            raise ValueError("ConfigErrors holds at least one error")
        self._errors = tuple(single for error in errors for single in error.errors)
        first = self._errors[0]
        super().__init__(first.key, first.value, first.why, first.hint, file=first.file)

    @property
    def errors(self) -> tuple[ConfigError, ...]:
        """The errors, at least one."""
        return self._errors

    def __str__(self) -> str:
        """Return one line for each of the first 50 errors."""
        lines = [str(error) for error in self._errors[:50]]
        if more := len(self._errors) - len(lines):
            lines.append(f"and {more} more")
        return "\n".join(lines)


class AdminError(LucevisorError):
    """A command asked a running supervisor for what it does not have."""

    exit_code = ExitCode.USAGE


class NotRunningError(LucevisorError):
    """There is no supervisor to talk to."""

    exit_code = ExitCode.NOT_RUNNING


class NotReadyError(LucevisorError):
    """The pipeline was not ready before the deadline."""

    exit_code = ExitCode.NOT_READY


class VisionError(LucevisorError):
    """The vision encoder did not encode an image.  The message has the reason."""


class ScoringError(LucevisorError):
    """The scoring model did not score a window.  The message has the reason."""


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the choice most similar to `word`, or an empty string if none is close."""
    folded = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(word.lower()[:100], folded, n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else ""


def suggest(word: str, choices: Sequence[str], noun: str = "choices") -> str:
    """Return the hint for an invalid word: the nearest choice, then all of them if they are few."""
    near = nearest(word, choices)
    parts = [f"nearest: {near}"] if near else []
    if len(choices) <= 16:
        parts.append(f"{noun}: {', '.join(choices)}")
    return "; ".join(parts)


def format_error(key: str, value: object, why: str, hint: str = "", file: str = "") -> str:
    """Return `FILE: KEY = VALUE: WHY; HINT` on one line, without the parts that are empty."""
    name = _cut(key, 120)
    subject = name if value is NO_VALUE else f"{name} = {show(value)}"
    text = f"{why}; {hint}" if hint else why
    return _one_line(": ".join(part for part in (file, subject, text) if part))


def show(value: object) -> str:
    """Return a value as a configuration file would write it, on one line and shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError, TypeError):  # too deep, an integer too long, keys that are not text
        text = f"a {type(value).__name__}"
    return _one_line(_cut(text, 160))  # a path, mostly


def _cut(text: str, n_chars: int) -> str:
    return text if len(text) <= n_chars else f"{text[:n_chars]}..."


def _one_line(text: str) -> str:
    """Escape characters that break the line or move a terminal's cursor."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def unusable(path: Path, error: OSError) -> ConfigError:
    """Return the error for a run directory that cannot be used."""
    where = f" ({error.filename})" if error.filename is not None and str(error.filename) != str(path) else ""
    return ConfigError(
        "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "run directory",
        str(path),
        f"cannot be used{where}: {error.strerror or error}",
        "make room or give write permission there, or set XDG_RUNTIME_DIR to another directory",
    )
