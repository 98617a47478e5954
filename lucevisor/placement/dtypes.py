"""Chooses the dtypes for ``engine.dtype`` and ``engine.kv_dtype`` on the given devices.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.config import DType, KvDType
from lucevisor.model.values import Backend, Dtype
from lucevisor.placement.devices import TargetDevice

_AUTO = "auto"
_PREFERENCE = (Dtype.BFLOAT16, Dtype.FLOAT16)


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype, why it was chosen, and notices for the user."""

    dtype: Dtype
    reason: str
    notices: tuple[str, ...] = ()


def choose_dtype(configured: DType, targets: Sequence[TargetDevice]) -> DtypeChoice:
    """Choose the dtype of activations and arithmetic, one for the whole pipeline, as activations cross every boundary.

    ``auto``: with a GPU, bfloat16 if all devices multiply it natively, else float16, else float32; on cpus alone,
    bfloat16 or float32.  Devices that were not queried count as supporting what their backend usually does.
    """
    if configured != _AUTO:
        dtype = Dtype(configured)
        slow = [str(s.device) for s in targets if s.info is not None and dtype not in s.info.dtypes]
        names = ", ".join(slow)
        notice = f"engine.dtype = {configured}: {names} cannot multiply it natively and will be slow; nearest: auto"
        return DtypeChoice(dtype, f"dtype {dtype}: as configured", (notice,) if slow else ())
    only_cpu = all(target.backend is Backend.CPU for target in targets)
    lacking = ""
    for dtype in _PREFERENCE[:1] if only_cpu else _PREFERENCE:
        without = [target for target in targets if not _native(target, dtype)]
        if not without:
            unknown = "" if all(target.info for target in targets) else " as far as known"
            return DtypeChoice(dtype, f"dtype {dtype}: every device multiplies it natively{unknown}{lacking}")
        names = ", ".join(str(target.device) for target in without)
        why = "cannot multiply natively" if any(target.info for target in without) else "were not asked about"
        lacking += f"; not {dtype}, which {names} {why}"
    return DtypeChoice(Dtype.FLOAT32, f"dtype {Dtype.FLOAT32}: the one format that all devices share{lacking}")


def choose_kv_dtype(configured: KvDType, dtype: Dtype) -> DtypeChoice:
    """Choose the dtype of keys and values.  ``auto``: that of the activations."""
    if configured == _AUTO:
        return DtypeChoice(dtype, f"kv_dtype {dtype}: as dtype")
    return DtypeChoice(Dtype(configured), f"kv_dtype {configured}: as configured")


def _native(target: TargetDevice, dtype: Dtype) -> bool:
    if target.info is not None:
        return dtype in target.info.dtypes
    return target.backend is not Backend.CPU
