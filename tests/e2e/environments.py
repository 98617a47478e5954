"""Virtual environments that hold chosen distributions of this one, as links."""

from __future__ import annotations

import importlib.metadata
import re
import venv
from collections.abc import Iterable
from pathlib import Path


def closure(names: Iterable[str]) -> set[str]:
    """Distributions that ``names`` need, as installed here, extras left out."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue  # not needed on this platform
        found.add(name)
        todo += [re.split(r"[\s;<>=!~\[(]", n, maxsplit=1)[0] for n in needs if "extra ==" not in n]
    return found


def make_environment(home: Path, names: Iterable[str]) -> Path:
    """Make a virtual environment with links to exactly ``names`` and what they need; return its interpreter."""
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python*/site-packages"))
    for name in closure(names):
        distribution = importlib.metadata.distribution(name)
        tops = {f.parts[0] for f in distribution.files or [] if not f.parts[0].startswith(("..", "__pycache__"))}
        for top in tops:
            if (site / top).is_symlink():
                continue  # a namespace package of several distributions: they lie in one directory
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return home / "bin" / "python"
