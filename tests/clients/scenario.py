"""What every client script does: try features one by one against a running supervisor, and print what came of each.

Imported by scripts that run in environments of their own, all of which have pydantic.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Literal, NoReturn

from pydantic import BaseModel

URL = os.environ["LUCEVISOR_URL"]
MODEL = os.environ["LUCEVISOR_MODEL"]
QUESTION = "What does os.path.join do?"
LOOK_UP = "Look up the documentation of os.path.join."


class Answer(BaseModel):
    """An answer."""

    module: Literal["os", "os.path", "re"]
    level: Literal[1, 2, 3]


def run(checks: dict[str, Callable[[], object]]) -> NoReturn:
    """Run the checks; print one JSON object a line: feature and error ("" if it works).  Exits with 0 if all work."""
    n_failed = 0
    for feature, check in checks.items():
        error = ""
        try:
            check()
        except Exception as failure:  # whatever a client raises is its result
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
            traceback.print_exc()
            n_failed += 1
        print(json.dumps({"feature": feature, "error": error}), flush=True)
    raise SystemExit(n_failed > 0)
