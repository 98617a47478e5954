"""Why a daemon ended, in one line: from its last output, and from the kernel's count of out-of-memory kills.

Knows no processes. Invariant: `cause` quotes the output and never guesses.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

N_LINES_AFTER = 100
"""A traceback that this many lines follow is an old one: the process went on."""

_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
_OUR_PATH = re.compile(r".*/(?P<path>(?:daemons|lucevisor)/.+)")
_PACKAGE_PATH = re.compile(r".*/(?:site-packages|lib/python3\.\d+)/(?P<path>.+)")
_ABORTED = re.compile(  # what the C and C++ libraries print before they abort
    r"\s+what\(\):  (?P<what>.+)"
    r"|(?P<libc>(?:free|malloc|realloc|double free|corrupted|munmap_chunk|malloc_consolidate)\b.*"
    r"|\*\*\* .+ \*\*\*.*|.*[Aa]ssertion .*failed.*)"
)


def cause(output: Iterable[str]) -> str:
    """Return the line of stderr that says why the process ended, with the innermost frame of this project, or "".

    That is faulthandler's fatal error rather than the modules it lists below; a traceback's exception rather than the
    hints that torch prints below; otherwise the last line.
    """
    lines = list(output)
    for at in reversed(range(len(lines))):
        if lines[at].startswith(_FATAL):
            return _fatal(lines, at)
    return _exception(lines) or next((line for line in reversed(lines) if line.strip()), "")


def _fatal(lines: Sequence[str], at: int) -> str:
    what = lines[at].removeprefix(_FATAL)
    said = next((found for line in reversed(lines[:at]) if (found := _ABORTED.fullmatch(line))), None)
    if what == "Aborted" and said is not None:
        what = f"Aborted: {(said['what'] or said['libc']).strip()}"
    current = next((n for n in range(at, len(lines)) if lines[n].startswith("Current thread")), None)
    return what if current is None else what + _place(list(_frames(lines[current + 1 :])))


def _exception(lines: Sequence[str]) -> str:
    heads = (n for n in reversed(range(len(lines))) if lines[n].startswith("Traceback (most recent call last)"))
    head = next((n for n in heads if n == 0 or not lines[n - 1].startswith("Exception ignored")), None)
    if head is None:
        return ""
    end = next((n for n in range(head + 1, len(lines)) if not lines[n].startswith(" ")), None)
    if end is None or len(lines) - end > N_LINES_AFTER:
        return ""
    return lines[end] + _place([found for line in lines[head:end] if (found := _FRAME.fullmatch(line))][::-1])


def _frames(lines: Sequence[str]) -> Iterator[re.Match[str]]:
    """Yield the frames at the beginning of `lines`."""
    for line in lines:
        found = _FRAME.fullmatch(line)
        if found is None:
            return
        yield found


def _place(frames: Sequence[re.Match[str]]) -> str:
    """Return the innermost frame of this project, and the innermost of all; `frames` come innermost first."""
    if not frames:
        return ""
    ours = next((frame for frame in frames if _OUR_PATH.fullmatch(frame["path"])), None)
    inner = f"{_short(frames[0]['path'])}:{frames[0]['line']} in {frames[0]['function']}"
    if ours is None:
        return f" (at {inner})"
    place = f"{_short(ours['path'])}:{ours['line']} in {ours['function']}"
    return f" (at {place})" if ours is frames[0] else f" (at {place}, inside {inner})"


def _short(path: str) -> str:
    found = _PACKAGE_PATH.fullmatch(path) or _OUR_PATH.fullmatch(path)
    return found["path"] if found is not None else path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes the kernel's out-of-memory killer has ended in this process's control group, which
    daemons share, or on the whole machine where that is not counted. None when neither is known.
    """
    for path in (*_counters(proc, cgroups), proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _counters(proc: Path, cgroups: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield cgroups / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                yield cgroups / "memory" / path.lstrip("/") / "memory.oom_control"


def explain_kill(before: int | None, after: int | None) -> str:
    """Explain a SIGKILL that the supervisor did not send, by the counts of `oom_kills` at the spawn and now."""
    if before is not None and after is not None and after > before:
        return (
            "the kernel was out of memory and killed it; give the group fewer layers (placement.target_layer_split) "
            "or the machine more memory"
        )
    return "the supervisor did not send it: a person, a memory watcher or the kernel did (see `dmesg`)"
