"""The attack: every set-up is asked by eight clients while its processes get signals, and every answer is checked.

`lucevisor chaos` with 16 configurations; it compares each answer with that of the same service before the first fault,
in float32. docs/reliability.md has the numbers of a whole run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.process import DEMO, Cli
from tests.e2e.service import GOLDEN

DEMO_FILES = DEMO.parent / "demo"
MODEL = DEMO_FILES / "demo-qwen35-22m-q4_k_m.gguf"
MTP = f"draft.path={DEMO_FILES / 'demo-qwen35-22m-mtp-q8_0.gguf'}"
DFLASH = f"draft.path={DEMO_FILES / 'demo-qwen35-22m-dflash2-q4_0.gguf'}"
SCORER = f"pflash.path={DEMO_FILES / 'demo-scorer-q8_0.gguf'}"
PLAIN = "draft.kind=off"
FLASH = (PLAIN, "kvflash.pool_tokens=512", "engine.max_context=2048")

SIGNALS = ("kill", "terminate", "stop", "slow", "memory exhausted")
DISK = ("killed while saving", "killed while restoring", "snapshots damaged", "disk full", "kill")
ORDERS = ("restart", "reload", "take-over", "take-over", "supervisor paused")

# Name: groups, settings, faults, how many.  266 in all.
SETUPS = {
    "one group": ("a", [PLAIN], SIGNALS, 20),
    "two groups": ("ab", [PLAIN], SIGNALS, 20),
    "three groups": ("abc", [PLAIN], SIGNALS, 20),
    "a spare for each group": ("ab", [PLAIN, "recovery.spares=1"], SIGNALS, 20),
    "MTP head": ("abc", [MTP], SIGNALS, 20),
    "DFlash drafter": ("ab", [DFLASH], SIGNALS, 20),
    "drafter in a group of its own": ("abz", [DFLASH, "draft.device=z:0"], SIGNALS, 16),
    "few pages, to host memory": ("ab", [DFLASH, "engine.pages=40", "engine.max_context=2048"], SIGNALS, 16),
    "few pages, computed again": (
        "ab", [PLAIN, "engine.pages=40", "engine.max_context=2048"], SIGNALS, 16
    ),
    "snapshots on disk": ("ab", [PLAIN, "cache.prefix_slots=2", "cache.min_tokens=8"], DISK, 25),
    "operator's commands": ("ab", [DFLASH], ORDERS, 25),
    "sliding windows": ("ab", [PLAIN, "engine.max_context=2048"], SIGNALS, 16),
    "KV Flash, exact": ("ab", [*FLASH, "kvflash.policy=exact"], SIGNALS, 14),
    "KV Flash, lru": ("ab", [*FLASH, "kvflash.policy=lru"], SIGNALS, 6),
    "KV Flash, qk": ("ab", [*FLASH, "kvflash.policy=qk"], SIGNALS, 6),
    "KV Flash, drafter": ("ab", [*FLASH, SCORER, "kvflash.policy=drafter"], SIGNALS, 6),
}  # fmt: skip
MAY_DIFFER = ("KV Flash, lru", "KV Flash, qk", "KV Flash, drafter")
"""Which pages a query sees depends on the slices of a prompt, and so on what else runs (docs/kv-flash.md)."""


def write_config(path: Path, name: str, groups: str) -> None:
    model = GOLDEN / "gemma4_e2b" / "model.gguf" if name == "sliding windows" else MODEL
    text = f'[model]\npath = "{model}"\n'
    for group in groups:
        text += f'[groups.{group}]\nbackend = "cpu"\nthreads = 1\n'
    devices = [f"{group}:0" for group in groups if group != "z"]
    split = [1.0] * len(devices)
    path.write_text(f"{text}[placement]\ntarget_devices = {json.dumps(devices)}\ntarget_layer_split = {split}\n")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETUPS)
def test_signals_lose_no_answer_and_change_no_token(cli: Cli, name: str, tmp_path: Path) -> None:
    groups, settings, faults, n_faults = SETUPS[name]
    config = tmp_path / "attack.toml"
    write_config(config, name, groups)
    options = [part for setting in settings for part in ("--set", setting)]
    options += [part for fault in faults for part in ("--fault", fault)]
    options += ["--times", str(n_faults), "--seed", str(len(name)), "--json"]
    done = cli.run("chaos", str(config), *options, timeout_s=3500, check=False)
    assert done.stdout, done.stderr
    (tmp_path / "report.json").write_text(done.stdout)
    report = json.loads(done.stdout)
    answers, rows = report["answers"], report["faults"]
    print(f"{name}: {sum(row['times'] for row in rows.values())} faults in {report['seconds']:.0f} s, "
          f"{answers['right']} right, {len(answers['wrong'])} wrong, {len(answers['lost'])} lost, "
          f"longest pause {answers['pause_s']:.2f} s, {report['restarts']} restarts, "
          f"{report['recovery']['cache']['restored']} restored")  # fmt: skip
    assert (answers["lost"], report["left"]) == ([], []), done.stderr
    assert answers["wrong"] == [] or name in MAY_DIFFER, answers["wrong"]
    assert sum(row["times"] for row in rows.values()) == n_faults
    assert set(rows) == set(faults)
    assert answers["right"] > n_faults


def test_a_start_with_fault_hooks_is_refused(cli: Cli) -> None:
    env = cli.env | {"LUCEVISOR_FAULTS": str(cli.runtime)}
    command = [sys.executable, "-m", "lucevisor", "start", str(DEMO), "--name", "t", "--set", "server.port=0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "it is for `lucevisor chaos`" in done.stderr
    assert not os.path.exists(cli.socket())
