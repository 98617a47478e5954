"""Arguments, environment and directory of a daemon.

Pure: starts nothing and reads no environment. Invariant: the daemon's interpreter sees no project code but the staging
directory, none of the supervisor's Python settings, and no devices but its group's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lucevisor.config import GroupConfig

_OF_PYTHON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONEXECUTABLE", "PYTHONSAFEPATH", "PYTHONOPTIMIZE")
_OF_VENV = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "__PYVENV_LAUNCHER__", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
_OF_SYSTEMD = ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC")
_OWN = frozenset({*_OF_PYTHON, *_OF_VENV, *_OF_SYSTEMD})
_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIP_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NO_DEVICE = "-1"


@dataclass(frozen=True, slots=True)
class Handles:
    """Known only at the spawn: descriptor numbers of the child's ends, and the supervisor's pid."""

    link_fd: int
    pulse_fd: int
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of `execve`. `argv[0]` is the interpreter."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    directory: Path


def environment(group: GroupConfig, threads: int, staging: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the group's daemon.

    `inherited` is the supervisor's environment; `threads` is 0 for the library's choice. `groups.NAME.env` overrides
    everything but the import path. Visibility variables of other backends are cleared, because ROCm reads CUDA's too.
    """
    env = {key: value for key, value in inherited.items() if key not in _OWN}
    if group.backend == "cpu":
        env |= {_CUDA_VISIBLE: _NO_DEVICE, _HIP_VISIBLE[0]: _NO_DEVICE}
        env.pop(_HIP_VISIBLE[1], None)
        if threads > 0:
            env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    elif group.backend == "hip":
        env.pop(_CUDA_VISIBLE, None)
    else:
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
        for name in _HIP_VISIBLE:
            env.pop(name, None)
    env |= group.environment()
    env |= {
        "PYTHONPATH": str(staging),
        "PYTHONSAFEPATH": "1",  # nothing of the working directory is imported, from Python 3.11 on
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
    }
    return env


def launch(
    group: GroupConfig, threads: int, staging: Path, inherited: Mapping[str, str], python: str, handles: Handles
) -> Launch:
    """Return how `python`, an absolute path, starts the group's daemon.

    Bytecode caches stay on and beside the sources: PYTHONPYCACHEPREFIX would make every start compile torch.
    """
    arguments = {
        "--group": group.name,
        "--backend": group.backend,
        "--link-fd": str(handles.link_fd),
        "--pulse-fd": str(handles.pulse_fd),
        "--parent-pid": str(handles.parent_pid),
        "--threads": str(threads),
        "--cores": ",".join(map(str, group.cores)),
    }
    options = [f"{name}={value}" for name, value in arguments.items()]
    return Launch(
        argv=(python, "-u", "-X", "faulthandler", "-m", "daemons", *options),
        env=environment(group, threads, staging, inherited),
        directory=staging,
    )
