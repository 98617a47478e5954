"""A pytest plugin of bench/gpu_round.py: notes each test's outcome, and leaves out those that have passed already.

    PYTHONPATH=bench LUCEVISOR_OUTCOMES=tests.jsonl python -m pytest -p gpu_round_tests -m gpu -n 8

A line of the file: ``id``, ``outcome`` (passed, failed or skipped), ``s``.  What failed or was skipped runs again.
"""

import json
import os
from pathlib import Path


def outcomes(path):
    """Test id -> outcome; the last one counts, a line that was cut off does not."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["id"]] = row["outcome"]
    return found


def file():
    return Path(os.environ["LUCEVISOR_OUTCOMES"])


def pytest_collection_modifyitems(config, items):
    known = outcomes(file())
    passed = [item for item in items if known.get(item.nodeid) == "passed"]
    if passed:
        config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if known.get(item.nodeid) != "passed"]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist report to the controller
        config.pluginmanager.register(Log(file()))


class Log:
    """Writes a line for each test: its call, or a set-up or clean-up that did not pass."""

    def __init__(self, path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            row = {"id": report.nodeid, "outcome": report.outcome, "s": round(report.duration, 2)}
            with self.path.open("a") as out:
                out.write(json.dumps(row) + "\n")
