"""Interpreters with torch, the devices they see, and a configuration for a model on them."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from lucevisor.app.rundir import NAME, log_path
from lucevisor.config import load
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.deployment.cache_files import cache_directory, read_json, write_atomically, write_json
from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.model.gguf_files import part_paths
from lucevisor.model.gguf_header import GgufError

_HARDWARE = ("/proc/sys/kernel/random/boot_id", "/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvidia-caps/*", "/dev/dri/render*", "/dev/kfd")
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_PROBE = """
import json
try:
    import gguf, msgspec, numpy, torch
    backend = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    n_devices = torch.cuda.device_count() if backend != "cpu" else 0
    devices = [torch.cuda.get_device_properties(i) for i in range(n_devices)]
    names, memory = [device.name for device in devices], sum(device.total_memory for device in devices)
    known = {"torch": torch.__version__, "backend": backend, "devices": names, "memory_bytes": memory}
    print(json.dumps(known | {"file": torch.version.__file__}))
except Exception as error:
    print(json.dumps({"problem": f"{type(error).__name__}: {error}"}))
"""


class Interpreter(msgspec.Struct):
    """Answer of an interpreter.  ``devices``: names of its GPUs, of ``memory_bytes`` in all.  ``file``: one that a new
    torch would replace.  ``problem``: why it cannot run a daemon, or ""."""

    torch: str = ""
    backend: Literal["cpu", "cuda", "hip"] = "cpu"
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0
    file: str = ""
    problem: str = ""
    python: str = ""

    def as_cpu(self) -> Interpreter:
        return msgspec.structs.replace(self, backend="cpu", devices=())

    def toml(self) -> str:
        lines = [f"[groups.{self.backend}]", f'backend = "{self.backend}"']
        if self.python != sys.executable:
            lines.append(f"python = {json.dumps(self.python)}")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        devices = ", ".join(self.devices) or "this machine's processor"
        return f"group {self.backend}: {devices}; torch {self.torch} of {self.python}"


class KnownInterpreters(msgspec.Struct):
    """Earlier answers, by path, each with the ``state_of`` what it depends on."""

    answers: dict[str, tuple[list[str], Interpreter]] = {}


def model_name(model: str) -> str:
    stem = model.removeprefix(HUB_PREFIX).partition(":")[0] if model.startswith(HUB_PREFIX) else model
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(stem).name.removesuffix(".gguf")).lstrip("_.-")[:64]
    return name if NAME.match(name) else "model"


def choose_groups(model: str, pythons: Sequence[str]) -> list[Interpreter]:
    """Return groups that hold ``model``: all GPUs of this machine, and its processor where those are too small or none.

    Queries ``pythons``, this interpreter, and virtual environments beside it and in the current directory.  Raises
    ConfigError when one of ``pythons`` cannot run a daemon, LucevisorError when none can.
    """
    pythons = [os.path.abspath(python) if "/" in python else python for python in pythons]
    candidates = list(dict.fromkeys([*pythons, sys.executable, *_environments()]))
    answers = probe_interpreters(candidates)
    for python in pythons:
        if answers[python].problem:
            why = f"cannot run a daemon: {answers[python].problem}"
            raise ConfigError("--python", python, why, "name one with torch, numpy, gguf and msgspec")
    usable = [answer for answer in answers.values() if not answer.problem]
    if not usable:
        problems = "; ".join(f"{python}: {answer.problem}" for python, answer in answers.items())
        raise LucevisorError(
            f"no interpreter can run a daemon ({problems}); install torch, numpy, gguf and msgspec into one, "
            "and name it with --python"
        )
    groups = groups_by_vendor(usable)
    if groups[0].backend != "cpu" and not model_fits(model, groups):
        groups.append(usable[0].as_cpu())
    return groups


def groups_by_vendor(interpreters: Sequence[Interpreter]) -> list[Interpreter]:
    """Return the first interpreter with GPUs of each vendor, or the first one as a cpu group."""
    groups: dict[str, Interpreter] = {}
    for interpreter in interpreters:
        if interpreter.devices:
            groups.setdefault(interpreter.backend, interpreter)
    return [*groups.values()] or [interpreters[0].as_cpu()]


def probe_interpreters(pythons: Sequence[str]) -> dict[str, Interpreter]:
    """Return answers by path.  One is asked again after a change of its torch, devices, drivers or variables that hide
    them, and after a reboot: importing torch takes seconds."""
    path = cache_directory() / "interpreters.json"
    known = (read_json(path, KnownInterpreters, "known interpreters", lambda _: "") or KnownInterpreters()).answers
    unknown = [python for python in pythons if python not in known or known[python][0] != state_of(known[python][1])]
    with ThreadPoolExecutor() as pool:
        asked = {answer.python: answer for answer in pool.map(probe_interpreter, unknown)}
    if found := {python: (state_of(answer), answer) for python, answer in asked.items() if not answer.problem}:
        write_json(path, KnownInterpreters(known | found), "known interpreters")
    return {python: asked.get(python) or known[python][1] for python in pythons}


def state_of(answer: Interpreter) -> list[str]:
    files = [os.path.realpath(path) for path in (shutil.which(answer.python), answer.file) if path]
    stamps = [f"{path} {os.stat(path).st_mtime_ns}" for path in files if os.path.exists(path)]
    hardware = [Path(path).read_text() for path in _HARDWARE if os.path.exists(path)]
    devices = sorted(device for pattern in _DEVICES for device in glob.glob(pattern))
    return [*stamps, *hardware, *devices, *(f"{name}={os.environ.get(name)}" for name in _VISIBILITY)]


def probe_interpreter(python: str) -> Interpreter:
    """Ask an interpreter for its torch and devices. Never raises; see ``problem``."""
    command, timeout_s = [python, "-P", "-c", _PROBE], 120.0  # importing torch from a cold disk takes a minute
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        return Interpreter(python=python, problem=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Interpreter(python=python, problem=f"no answer within {timeout_s:.0f} s")
    try:
        answer = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=Interpreter)
        return msgspec.structs.replace(answer, python=python)
    except msgspec.DecodeError:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "no answer"
        return Interpreter(python=python, problem=f"is not a Python interpreter of 3.11 or newer ({last_line})")


def write_config(model: str, groups: Sequence[Interpreter]) -> str:
    path = model if model.startswith(HUB_PREFIX) else str(Path(model).resolve())
    return "\n".join([f"[model]\npath = {json.dumps(path)}\n", *(group.toml() for group in groups)])


def save_config(model: str, groups: Sequence[Interpreter], name: str) -> Path:
    path = log_path(name) / "config.toml"
    head = "# Written by `lucevisor start` for a model, again at each such start: copy it to change it.\n\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, (head + write_config(model, groups)).encode())
    except OSError as error:
        raise LucevisorError(f"{path} cannot be written: {error.strerror}; set XDG_STATE_HOME") from error
    return path


def model_fits(model: str, groups: Sequence[Interpreter]) -> bool:
    """Return whether a model fits the GPUs of ``groups``.  One of less than half their memory does; the plan decides
    about others, with daemons, which takes seconds."""
    if 2 * _model_bytes(model) < sum(group.memory_bytes for group in groups):
        return True
    # Most of the supervisor, which `start --daemon` imports in another process: half a second and more.
    from lucevisor.app.model_files import open_model
    from lucevisor.deployment.measurements import inventory
    from lucevisor.placement.devices import with_target_devices
    from lucevisor.placement.planner import plan
    from lucevisor.placement.result import Infeasible

    with tempfile.TemporaryDirectory(prefix="lucevisor-init-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(write_config(model, groups), "utf-8")
        config = load(path, [])
    opened = open_model(config)
    devices, problems = asyncio.run(inventory(config))
    if problems:  # the start reports the problem
        return True
    placed = plan(opened.spec, with_target_devices(config, devices), devices, None, None, None)
    return not isinstance(placed, Infeasible)


def _model_bytes(model: str) -> int:
    """Return the bytes of a model's files; of one to be fetched, more than any memory has."""
    try:
        return sum(part.stat().st_size for part in part_paths(Path(model)))
    except (OSError, GgufError):
        return 1 << 62


def _environments() -> list[str]:
    folders = dict.fromkeys((Path(sys.prefix).parent, Path.cwd()))
    found = sorted(marker for folder in folders for marker in folder.glob("*/pyvenv.cfg"))
    pythons = [marker.parent / "bin" / "python" for marker in found if marker.parent != Path(sys.prefix)]
    return [str(python) for python in pythons if os.access(python, os.X_OK)]  # others' may be closed to this user
