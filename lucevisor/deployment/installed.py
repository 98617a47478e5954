"""Packages of a Python environment, and the builds that its torch is for.  Imports none of them.

Runs as a script in the groups' interpreters, so it imports nothing but the standard library, also of an old Python.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import platform
import sys
from pathlib import Path

TORCH = ("__version__", "cuda", "hip")
"""Names in torch/version.py: its version, and those of CUDA and ROCm that it was built for, or None."""


def installed(packages: list[str]) -> dict[str, object]:
    """Return ``python``: the version, ``missing``: the packages that are not found, and ``torch``: the constants of its
    version.py."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return {
        "python": platform.python_version(),
        "missing": missing,
        "torch": {} if "torch" in missing else _torch(),
    }


def _torch() -> dict[str, object]:
    spec = importlib.util.find_spec("torch")
    found: dict[str, object] = {}
    for place in (spec.submodule_search_locations or []) if spec else []:
        try:
            tree = ast.parse((Path(place) / "version.py").read_text())
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            for target in targets:
                if isinstance(target, ast.Name) and target.id in TORCH and isinstance(value, ast.Constant):
                    found[target.id] = value.value
    return found


if __name__ == "__main__":
    sys.stdout.write("installed:" + json.dumps(installed(sys.argv[1:])))
