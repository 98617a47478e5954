"""Handshake: validate a daemon's Hello before sending it anything to load, and hash the code that both ends run.

All problems are reported at once, each with the line that fixes it."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import msgspec

from lucevisor.model.values import Backend
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.loading import DeviceInfo, Hello
from lucevisor.protocol.messages import PROTOCOL_VERSION

MIN_PYTHON = "3.11"
MIN_TORCH = "2.4"
MIN_PACKAGES = {"msgspec": "0.19", "numpy": "1.26", "gguf": "0.17"}

_BUILDS = {Backend.CUDA: "a CUDA", Backend.HIP: "a ROCm", Backend.CPU: "a CPU"}
_DEVICE_ADVICE = {
    Backend.CUDA: "nvidia-smi must list it with a driver that is new enough for this torch, and CUDA_VISIBLE_DEVICES, "
    "of the environment or in [groups.{group}] env, must not hide it",
    Backend.HIP: "rocminfo must list it, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, of the environment or in "
    "[groups.{group}] env, must not hide it, and the user must be in the groups render and video, which may open "
    "/dev/kfd",
    Backend.CPU: "a cpu daemon always lists the host: report this with the daemon's log",
}


class Expected(msgspec.Struct, frozen=True):
    """Properties that the configuration expects of a group.  ``devices``: the indices used by the plan."""

    group: str
    backend: Backend
    source_hash: str
    devices: list[int]


class HelloProblem(msgspec.Struct, frozen=True):
    """One reason to reject a daemon, and the line that fixes it."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


def check_hello(hello: Hello, expected: Expected) -> list[HelloProblem]:
    """Reasons why the daemon of ``hello`` cannot serve the group; empty when it can."""
    problems = _version_problems(hello, expected)
    pip = f"{hello.executable} -m pip install"
    if not hello.torch:
        problems.append(HelloProblem(f"{hello.executable} cannot import torch", _torch_advice(expected, hello)))
        return problems  # backend and devices come from torch
    if older(hello.torch, MIN_TORCH):
        problems.append(
            HelloProblem(
                f"torch {hello.torch} of {hello.executable} is older than {MIN_TORCH}",
                f"{pip} --upgrade torch  (same build: see https://pytorch.org/get-started/locally)",
            )
        )
    if hello.backend is not expected.backend:
        problems.append(
            HelloProblem(
                f"group {expected.group!r} is configured as {expected.backend}, but torch {hello.torch} of "
                f"{hello.executable} is {_BUILDS[hello.backend]} build",
                f'{_torch_advice(expected, hello)}, or set backend = "{hello.backend}" in [groups.{expected.group}]',
            )
        )
        return problems  # device indices of another backend are meaningless
    if expected.devices and not hello.devices and expected.backend is not Backend.CPU:
        advice = _DEVICE_ADVICE[expected.backend].format(group=expected.group)
        what = f"torch {hello.torch} of {hello.executable} is {_BUILDS[hello.backend]} build, but sees no GPU"
        why = f" ({hello.device_problem})" if hello.device_problem else ""
        return [*problems, HelloProblem(what + why, advice)]
    return problems + _device_problems(hello.devices, expected)


def _version_problems(hello: Hello, expected: Expected) -> list[HelloProblem]:
    problems = []
    uninstall = f"{hello.executable} -m pip uninstall lucevisor"
    same_code = f"restart the supervisor; if that does not help, remove the other lucevisor: {uninstall}"
    if hello.protocol != PROTOCOL_VERSION:
        problems.append(HelloProblem(f"the daemon speaks protocol {hello.protocol}, not {PROTOCOL_VERSION}", same_code))
    elif hello.source_hash != expected.source_hash:
        problems.append(
            HelloProblem(
                f"the daemon runs other code (hash {hello.source_hash}) than the supervisor ({expected.source_hash})",
                same_code,
            )
        )
    if older(hello.python, MIN_PYTHON):
        problems.append(
            HelloProblem(
                f"{hello.executable} is Python {hello.python}; at least {MIN_PYTHON} is required",
                f"set python in [groups.{expected.group}] to a newer interpreter that has torch",
            )
        )
    for package, minimum in MIN_PACKAGES.items():
        version = hello.packages.get(package, "")
        if not version:
            problems.append(HelloProblem(f"{hello.executable} cannot import {package}", _pip(hello, package, minimum)))
        elif older(version, minimum):
            problems.append(
                HelloProblem(
                    f"{package} {version} of {hello.executable} is older than {minimum}", _pip(hello, package, minimum)
                )
            )
    return problems


def _device_problems(devices: list[DeviceInfo], expected: Expected) -> list[HelloProblem]:
    """Devices the plan uses and torch cannot see. A cpu group has every index: each is one shard on the host."""
    if expected.backend is Backend.CPU and devices:
        return []
    visible = {device.index: device.name for device in devices}
    listing = ", ".join(f"{expected.group}:{index} ({name})" for index, name in sorted(visible.items())) or "none"
    return [
        HelloProblem(
            f"{expected.group}:{index} is not visible to its torch; visible: {listing}",
            f"{_DEVICE_ADVICE[expected.backend].format(group=expected.group)}; or change placement.target_devices",
        )
        for index in sorted(set(expected.devices) - set(visible))
    ]


def _torch_advice(expected: Expected, hello: Hello) -> str:
    build = "any" if expected.backend is Backend.CPU else _BUILDS[expected.backend]
    return (
        f"install {build} build with {hello.executable} -m pip install torch --index-url URL  "
        f"(URL: see https://pytorch.org/get-started/locally), or set python in [groups.{expected.group}] to an "
        "interpreter that has one"
    )


def _pip(hello: Hello, package: str, minimum: str) -> str:
    return f"{hello.executable} -m pip install '{package}>={minimum}'"


def older(version: str, minimum: str) -> bool:
    """Compare two versions by their numbers ("2.13.0a0+git1", "3.11.7")."""
    return _numbers(version) < _numbers(minimum)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


# ---- source hash

SHARED_PACKAGES = ("model", "protocol")
"""Packages of lucevisor that daemons import."""


def source_hash(lucevisor: Path, daemons: Path) -> str:
    """16 hex digits over the names and bytes of the ``*.py`` files of the shared packages and the daemon's own. Raises
    ProtocolError when a directory has no Python files, OSError when one cannot be read."""
    digest = sha256()
    for label, directory in (*((name, lucevisor / name) for name in SHARED_PACKAGES), ("daemons", daemons)):
        found = (path for path in directory.rglob("*.py") if path.is_file())
        paths = sorted(found, key=lambda path: path.relative_to(directory).as_posix())
        if not paths:
            raise ProtocolError("no Python files", str(directory), "pass the directory of the installed package")
        for path in paths:
            name = f"{label}/{path.relative_to(directory).as_posix()}".encode()
            data = path.read_bytes()
            # Length-prefixed: no content can imitate the boundary between two files.
            digest.update(len(name).to_bytes(4, "little") + name + len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()[:16]
