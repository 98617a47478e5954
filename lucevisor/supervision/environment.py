"""What a daemon is started with: arguments, environment, directory.

Pure: knows no processes and reads no environment of its own. Invariant: the daemon's interpreter sees the staging
directory as the only project code, none of the supervisor's own Python settings, and the devices of its group only.
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
    """What only the moment of the spawn knows: descriptor numbers of the child's ends and the supervisor's pid."""

    link_fd: int
    pulse_fd: int
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything `execve` needs. `argv[0]` is the interpreter."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    directory: Path


def environment(group: GroupConfig, threads: int, staging: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the group's daemon.

    `inherited` is the supervisor's environment; `threads` is 0 for the library's choice. What the configuration names
    in `groups.NAME.env` wins over everything but the import path. Other backends' visibility variables are cleared,
    because ROCm reads CUDA's as well.
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
    """Return how the group's daemon is started by `python`, an absolute path that was looked up before.

    Bytecode caches are left on: they lie beside the sources as for any installed package, keyed by interpreter
    version, and moving them elsewhere (PYTHONPYCACHEPREFIX) would make every start compile torch.
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
