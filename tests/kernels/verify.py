"""Run the full matrix of kernel tests and, if it passes, record what it ran with in verified.txt.

    python -m tests.kernels.verify [PYTEST ARGUMENTS]

The record holds the versions and a hash of every file that decides what a kernel computes or what is asserted of it.
test_verified.py, which runs always, fails when they are others: no kernel lands that the matrix has not seen.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("verified.txt")
SOURCES = (
    "daemons/ops/**/*.py",  # kernels, their launchers, and the torch forms they are tested against
    "daemons/ops/cuda/*.cu*",
    "daemons/weights/packed.py",
    "daemons/weights/dequant.py",
    "lucevisor/model/quant_types.py",
    "tests/kernels/**/*.py",
    "tests/numerics.py",  # tolerances
)
VERSIONS = ("torch", "triton")


def sources() -> dict[str, str]:
    """Path -> hash of the file."""
    files = sorted({file for pattern in SOURCES for file in ROOT.glob(pattern)})
    return {str(f.relative_to(ROOT)): hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}


def pins() -> dict[str, str]:
    """Package -> version that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in project["optional-dependencies"]["dev"] if "==" in line)
    return {name: pinned[name] for name in VERSIONS}


def installed() -> dict[str, str]:
    """Package -> version without what names a build, as in 2.13.0+cpu."""
    return {name: version(name).partition("+")[0] for name in VERSIONS}


def lines(versions: dict[str, str], hashes: dict[str, str]) -> list[str]:
    """The record.  The line on all of them lets git see a conflict where two branches changed different files."""
    rows = [f"{value}  {name}" for name, value in (*versions.items(), *hashes.items())]
    return [*rows, f"{hashlib.sha256(chr(10).join(rows).encode()).hexdigest()[:16]}  all of the above"]


def stale() -> list[str]:
    """What was changed, added or removed since the matrix was run."""
    recorded = dict(reversed(line.split("  ", 1)) for line in RECORD.read_text().splitlines())
    now = dict(reversed(line.split("  ", 1)) for line in lines(pins(), sources()))
    return sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))


def main(arguments: list[str]) -> int:
    versions, before = installed(), sources()
    if versions != pins():
        print(f"installed are {versions}, pyproject.toml asks for {pins()}: run `make setup`", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "--ignore=tests/kernels/test_verified.py"]
    status = subprocess.run([*command, *arguments, "tests/kernels"], cwd=ROOT, check=False).returncode
    if status:
        return status
    if sources() != before:
        print("files were changed while the tests ran: run them again", file=sys.stderr)
        return 1
    RECORD.write_text("\n".join(lines(versions, before)) + "\n")
    print(f"recorded in {RECORD.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
