"""Number formats: what ``engine.dtype`` and ``engine.kv_dtype`` mean on the devices that are there.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.config import DType, KvDType
from lucevisor.model.values import Backend, Dtype
from lucevisor.placement.devices import Seat

_AUTO = "auto"
_PREFERENCE = (Dtype.BFLOAT16, Dtype.FLOAT16)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A format, why it is this one, and what the user should know about it."""

    dtype: Dtype
    reason: str
    notices: tuple[str, ...] = ()


def choose_dtype(asked: DType, seats: Sequence[Seat]) -> Chosen:
    """Choose the format of activations and arithmetic, one for the whole chain, since its rows cross every boundary.

    ``auto``: with a GPU bfloat16 where all devices multiply it natively, else float16, else float32; on cpus alone
    bfloat16 or float32.  Devices that were not asked count as able to do what their backend usually does.
    """
    if asked != _AUTO:
        dtype = Dtype(asked)
        slow = [str(s.device) for s in seats if s.info is not None and dtype not in s.info.dtypes]
        notice = (
            f"engine.dtype = {asked}: {', '.join(slow)} cannot multiply it natively and will be slow; nearest: auto"
        )
        return Chosen(dtype, f"dtype {dtype}: as configured", (notice,) if slow else ())
    only_cpu = all(seat.backend is Backend.CPU for seat in seats)
    lacking = ""
    for dtype in _PREFERENCE[:1] if only_cpu else _PREFERENCE:
        without = [str(seat.device) for seat in seats if not _native(seat, dtype)]
        if not without:
            unknown = "" if all(seat.info for seat in seats) else " as far as known"
            return Chosen(dtype, f"dtype {dtype}: every device multiplies it natively{unknown}{lacking}")
        lacking += f"; not {dtype}, which {', '.join(without)} cannot multiply natively"
    return Chosen(Dtype.FLOAT32, f"dtype {Dtype.FLOAT32}: the one format that all devices share{lacking}")


def choose_kv_dtype(asked: KvDType, dtype: Dtype) -> Chosen:
    """Choose the format of keys and values.  ``auto``: that of the activations."""
    if asked == _AUTO:
        return Chosen(dtype, f"kv_dtype {dtype}: as dtype")
    return Chosen(Dtype(asked), f"kv_dtype {asked}: as configured")


def _native(seat: Seat, dtype: Dtype) -> bool:
    if seat.info is not None:
        return dtype in seat.info.dtypes
    return seat.backend is not Backend.CPU
