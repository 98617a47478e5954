"""Up to how many rows each kernel multiplies a quantised matrix, before the next kind of kernel takes over.

Built-in limits are those of the devices that were measured; ``lucevisor bench --tune`` measures others, and keeps its
choices in the user's cache directory, a file for each kind of device, torch, driver, dtype and source of the kernels.
Invariant: a file that cannot be read or holds anything else than numbers that are measured changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch

from daemons.device import visible_devices
from daemons.ops.code_cache import cache_directory, keep
from lucevisor.model.values import Backend

KernelThreshold = Literal["tiled rows", "cuda rows", "triton rows", "cuda pairs"]
"""C++ on a cpu before oneDNN, CUDA C++ before Triton, Triton on packed weights before a dequantised product; and
(token, expert) pairs in CUDA C++ before Triton."""

CANDIDATES: dict[KernelThreshold, tuple[int, ...]] = {
    "tiled rows": (16, 24, 32, 48, 64, 96),
    "cuda rows": (1, 8, 16, 24, 32, 256),
    "triton rows": (16, 32, 64),
    "cuda pairs": (0, 8, 16, 32, 64),
}
"""What is measured.  Rows of a cpu's C++ do not depend on those beside them, which verify steps of up to 16 tokens rely
on: it keeps at least 16."""


NO_DIRECTORY = "limits cannot be kept: $XDG_CACHE_HOME/lucevisor cannot be written, or is another user's"


class TuningFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``limits``: quant type -> hand-over -> rows or pairs."""

    version: Literal[1]
    conditions: dict[str, str]
    limits: dict[str, dict[KernelThreshold, Annotated[int, msgspec.Meta(ge=0)]]]


@dataclass(frozen=True, slots=True)
class KernelThresholds:
    """The limits of a device: those measured, else the built-in ones."""

    tuned: dict[str, dict[KernelThreshold, int]] = field(default_factory=dict)

    def limit(self, kind: str, what: KernelThreshold, built_in: int) -> int:
        """Rows or pairs of a quant type up to which the first kernel runs."""
        return self.tuned.get(kind, {}).get(what, built_in)

    def note(self, kind: str) -> str:
        """What the report of kernel selection adds."""
        return " (tuned)" if kind in self.tuned else ""


def conditions(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What the limits of a device depend on."""
    on_cpu = device.type == "cpu"
    return {
        "device": visible_devices(Backend.CPU)[0].name if on_cpu else torch.cuda.get_device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        "driver": "" if on_cpu else _driver(),
        "threads": str(torch.get_num_threads()) if on_cpu else "",
        "source": _source(),
    }


def _driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(version()) if torch.version.cuda and version is not None else ""


@cache
def _source() -> str:
    digest, root = sha256(), Path(__file__).parent
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def name_of(found: dict[str, str]) -> str:
    """Of the file with the choices under these conditions."""
    return f"kernels-{sha256(msgspec.json.encode(sorted(found.items()))).hexdigest()[:16]}.json"


def read(found: dict[str, str]) -> tuple[KernelThresholds, str]:
    """The limits kept for these conditions, and why a file of that name was ignored."""
    if (directory := cache_directory()) is None:
        return KernelThresholds(), ""
    path = directory / name_of(found)
    try:
        data = msgspec.json.decode(path.read_bytes(), type=TuningFile)
    except FileNotFoundError:
        return KernelThresholds(), ""
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return KernelThresholds(), f"{path} is ignored: {error}; run lucevisor bench --tune again"
    if data.conditions != found:
        return (
            KernelThresholds(),
            f"{path} is ignored: it is of another device or version; run lucevisor bench --tune again",
        )
    if any(n not in CANDIDATES[what] for of_kind in data.limits.values() for what, n in of_kind.items()):
        return (
            KernelThresholds(),
            f"{path} is ignored: it has limits that are not measured; run lucevisor bench --tune again",
        )
    return KernelThresholds(data.limits), ""


def write(found: dict[str, str], limits: dict[str, dict[KernelThreshold, int]]) -> Path:
    """Keep limits for these conditions, and return where.  Raises OSError, which leaves what was kept before."""
    if (directory := cache_directory()) is None:
        raise OSError(NO_DIRECTORY)
    data = msgspec.json.format(msgspec.json.encode(TuningFile(1, found, limits)), indent=1) + b"\n"
    return keep(directory, name_of(found), data)
