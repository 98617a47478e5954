"""Runs the client scripts against the demo, each in a virtual environment of its own.

    python -m tests.clients.run [NAME...]

Prints the table of docs/clients.md.  Environments stay in build/clients for the next run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.e2e.process import ROOT, Cli

HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / "build" / "clients"
SCRIPT_S = 300.0


def environment(name: str) -> Path:
    """Return the interpreter of a script's environment, made and filled if need be."""
    place = ENVIRONMENTS / name
    python = place / "bin" / "python"
    if not (place / "installed").exists():
        venv.create(place, with_pip=True, clear=True)
        requirements = HERE / "requirements" / f"{name}.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        (place / "installed").touch()
    return python


def versions(name: str) -> str:
    """Return the packages that a script asks for, with their versions."""
    site = next((ENVIRONMENTS / name / "lib").glob("python*/site-packages"))
    found = {d.name.lower(): d.version for d in importlib.metadata.distributions(path=[str(site)])}
    lines = (HERE / "requirements" / f"{name}.txt").read_text().split()
    names = [line.partition("[")[0].partition(">")[0] for line in lines]
    return ", ".join(f"{n} {found[n]}" for n in names if n not in ("mcp", "pydantic"))


def rows(name: str, url: str, model: str) -> list[str]:
    """Run a script; return a row of the table for each feature."""
    python = environment(name)
    done = subprocess.run(
        [python, HERE / f"{name}.py"],
        env={**os.environ, "LUCEVISOR_URL": url, "LUCEVISOR_MODEL": model, "PYTHONPATH": str(HERE)},
        text=True, stdout=subprocess.PIPE, check=False, timeout=SCRIPT_S,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not told:
        told = [{"feature": "all", "error": f"exit code {done.returncode}"}]
    return [f"| {versions(name)} | {one['feature']} | {one['error'] or 'works'} |" for one in told]


def main(names: list[str]) -> None:
    """Run the scripts named, or all."""
    names = names or sorted(path.stem for path in HERE.glob("*_client.py"))
    cli = Cli()
    try:
        status = cli.start()
        print("| client | feature | result |\n|---|---|---|")
        for name in names:
            for row in rows(name, status["url"], status["model"]["name"]):
                print(row, flush=True)
        cli.stop()
    finally:
        cli.close()


if __name__ == "__main__":
    main(sys.argv[1:])
