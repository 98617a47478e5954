"""Snapshots as an operator sees them: a real supervisor, asked over the command line before and after a restart."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.process import DEMO, Cli, chat
from tests.waiting import wait_until

RULES = " ".join(f"Rule {i}: answer in one sentence and name the module." for i in range(40))


def metrics(status: dict[str, Any]) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"{status['url']}/metrics", timeout=100) as reply:
        text = reply.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def key(sample: Any) -> tuple[str, ...]:
        labels = [value for name, value in sample.labels.items() if name != "model"]
        return (sample.name.removeprefix("lucevisor_"), *labels)

    return {key(sample): sample.value for sample in samples}


def files(cli: Cli, *where: str) -> list[dict[str, Any]]:
    return list(json.loads(cli.run("cache", "ls", "--json", *where).stdout))


def test_a_conversation_goes_on_after_a_restart_and_the_operator_sees_how(cli: Cli, tmp_path: Path) -> None:
    directory = tmp_path / "snapshots"
    overrides = ("engine.dtype=float32", f"cache.dir={directory}", "cache.min_tokens=64", "cache.disk=100MiB")
    status = cli.start(DEMO, *overrides)
    assert status["cache"]["dir"] == str(directory)
    assert (status["cache"]["snapshots"], status["cache"]["failures"]) == (0, {})
    before = metrics(status)
    assert before["snapshot_bytes_total", "save"] == before["snapshot_failures_total", "disk_full"] == 0
    turns = ["What does os.path.join do?"]
    answer, n_prompt, n_cached = chat(status["url"], RULES, turns)
    assert (n_prompt > 300, n_cached) == (True, 0)
    turns += [answer, "And os.path.split?"]

    wait_until(lambda: cli.status()["cache"]["saved"] >= 1, what="a file was saved")
    found = files(cli)
    now = cli.status()["cache"]
    assert {one["state"] for one in found} <= {"snapshot", "partial"}
    assert now["saved"] >= now["snapshots"] >= 1
    assert 0 < now["snapshot_bytes"] <= now["disk_max_bytes"] == 100 << 20
    assert metrics(status)["snapshot_bytes_total", "save"] > 0
    text = cli.run("cache", "ls").stdout
    assert " of 100.0 MiB" in text
    assert f"in{directory}" in "".join(cli.run("status").stdout.split())  # long paths are wrapped
    cli.run("cache", "verify")
    cli.stop()

    status = cli.start(DEMO, *overrides)
    assert status["cache"]["snapshots"] == len(files(cli, "--dir", str(directory))) > 0
    _, n_prompt, n_cached = chat(status["url"], RULES, turns)
    assert n_cached > 300
    after = metrics(status)
    assert after["cached_prompt_tokens_total", "disk"] == n_cached
    assert after["snapshot_bytes_total", "restore"] > 0
    assert after["snapshot_seconds_total", "restore"] > 0
    assert not any(n for key, n in after.items() if key[0] == "snapshot_failures_total")
    assert cli.status()["cache"]["restored"] == 1

    one = files(cli)[0]["file"]
    assert cli.run("cache", "rm", one).stdout.startswith(f"removed {one}, ")
    assert not (directory / one).exists()
    assert "0 files removed" in cli.run("cache", "prune").stdout
    # what the second turn left may still be on its way to the disk
    wait_until(lambda: cli.run("cache", "prune", "--to", "0") and not files(cli), what="all files are pruned")
    cli.stop()
