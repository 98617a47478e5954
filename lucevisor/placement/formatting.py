"""Human-readable bytes, seconds and tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(n_bytes: int) -> str:
    """Return three or four digits with a binary unit, such as ``812 B``, ``1.50 GiB`` or ``-3.00 MiB``."""
    amount, unit = abs(float(n_bytes)), 0
    while round(amount, 1 if unit else 0) >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    digits = 0 if unit == 0 else 1 if round(amount, 2) >= 10 else 2
    return f"{'-' if n_bytes < 0 else ''}{amount:.{digits}f} {_UNITS[unit]}"


def format_seconds(n: float) -> str:
    """Return three digits with a unit, such as ``1.23 s``, ``45.6 ms`` or ``789 us``."""
    if n >= 1:
        return f"{n:.2f} s"
    return f"{n * 1e3:.3g} ms" if n >= 1e-3 else f"{n * 1e6:.3g} us"


def in_columns(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return lines in columns; those in ``right`` are aligned there."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
