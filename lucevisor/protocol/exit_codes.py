"""Exit codes by which a daemon tells its supervisor how it ended; 0 is an orderly end."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_CONFIGURATION = 78
"""The same start would fail again, so it is not retried (EX_CONFIG of sysexits.h)."""
