"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from lucevisor.errors import ExitCode
from tests.combinations import slow
from tests.e2e.process import DEMO, ROOT, Cli, alive, post
from tests.e2e.promised_status import Status
from tests.e2e.service import GOLDEN, write_config
from tests.families.golden import opened
from tests.waiting import wait_until


def test_demo_answers_survives_a_kill_in_mid_answer_and_leaves_nothing(user_cli: Cli) -> None:
    done = user_cli.run("demo", "--max-tokens", "60", timeout_s=100)
    assert done.stdout.count("Q: ") == 4
    assert "join" in done.stdout.split("A: ")[1].lower()
    assert "left:0 [0," in done.stdout
    assert "tokens/s" in done.stdout
    assert re.search(r"\[pid \d+ of group right is killed\]", done.stdout)
    assert re.search(r"the stream paused for \d+\.\d\d s, and no token was lost", done.stdout)
    assert re.search(r"group right has another process: pid \d+, restarts 1", done.stdout)
    assert "the same answer as without the kill" in done.stdout
    assert done.stdout.rstrip().endswith("stopped")


def test_ctrl_c_in_the_foreground_stops_everything(cli: Cli) -> None:
    process = cli.popen("start", str(DEMO), "--name", "t", "--set", "server.port=0")
    wait_until(cli.ready, what="ready")
    starter = psutil.Process(process.pid)
    # two daemons, a preprocessing worker, and multiprocessing's resource tracker
    wait_until(lambda: len(starter.children(recursive=True)) == 4, what="four processes")
    children = starter.children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert {"listening", "ready", "stopped"} <= {json.loads(line)["event"] for line in output.splitlines()}, output
    wait_until(lambda: not any(alive(c.pid) for c in children), what="no process left")
    assert not (cli.runtime / "lucevisor" / "t").exists()


def test_status_has_what_scripts_rely_on(demo_status: dict[str, Any]) -> None:
    """The admin socket's, which `status --json` prints, and the HTTP API's, with all types."""
    found = msgspec.convert(demo_status, Status)
    with urllib.request.urlopen(f"{found.url}/status") as answer:
        over_http = msgspec.json.decode(answer.read(), type=Status)
    for one in (found, over_http):
        assert (one.name, one.pid, one.url, one.state) == ("t", demo_status["pid"], demo_status["url"], "ready")
        assert [group.stages for group in one.groups] == [[0], [1]]
        assert [group.spare for group in one.groups] == [False, False]


def test_page_counts_are_those_of_plan_and_metrics(demo_status: dict[str, Any], cli: Cli) -> None:
    plan = json.loads(
        cli.run("plan", str(DEMO), "--json", "--set", "engine.dtype=float32", "--set", "engine.max_sequences=8").stdout
    )
    pages = demo_status["engine"]["pages"]
    assert pages["spaces"]["full"]["total"] == pages["total"] == plan["pages"]["full"]
    assert pages["spaces"]["recurrent"]["total"] == plan["pages"]["states"]
    with urllib.request.urlopen(f"{demo_status['url']}/metrics") as answer:
        metrics = answer.read().decode()
    counted = re.findall(
        r'^lucevisor_pages\{model="[^"]+",space="full",where="\w+"\} ([\d.e+]+)', metrics, re.MULTILINE
    )
    assert sum(map(float, counted)) == pages["total"]


def test_operating_a_running_supervisor(cli: Cli) -> None:
    first = cli.start()
    assert "left" in cli.run("status").stdout
    printed = json.loads(cli.run("status", "--json").stdout)["groups"]
    assert [(g["name"], g["pid"]) for g in printed] == [(g["name"], g["pid"]) for g in cli.status()["groups"]]
    out = cli.run("restart", "right").stdout
    assert "group right is ready" in out
    now = cli.status()
    assert now["groups"][1]["pid"] != first["groups"][1]["pid"]
    assert now["groups"][1]["restarts"] == 1
    for order, says in (
        (("restart", "rihgt"), 'there is no group "rihgt": the groups are left, right; nearest: right'),
        (("reload", "--set", "engine.max_context=128"), "--set: engine.max_context = 128: cannot change while"),
    ):
        refused = cli.run(*order, check=False)
        assert (refused.returncode, says in refused.stderr) == (ExitCode.USAGE, True), refused.stderr
    moved = cli.run("reload", "--set", "placement.target_layer_split=3,1").stdout
    assert 'placement.target_layer_split = "3,1"' in moved or "placement.target_layer_split = [3.0, 1.0]" in moved
    assert [one["devices"][0]["layers"] for one in cli.status()["groups"]] == [[0, 6], [6, 8]]
    refused = cli.run("reload", "--set", "engine.max_sequences=3", check=False)
    assert (refused.returncode, "engine.max_sequences = 3: cannot change" in refused.stderr) == (2, True)
    lines = [json.loads(line) for line in cli.run("logs", "left").stdout.splitlines()]
    assert lines
    assert {line["group"] for line in lines} == {"left"}
    assert len(cli.run("logs", "-n", "3", "--since", "1h").stdout.splitlines()) == 3
    assert cli.run("logs", "--level", "error").stdout == ""
    unknown = cli.run("logs", "rihgt", check=False)
    assert (unknown.returncode, "nearest: right" in unknown.stderr) == (2, True)
    clash = cli.run("start", str(DEMO), "--name", "t", "--set", "server.port=0", check=False)
    assert clash.returncode == 1
    assert "runs already" in clash.stderr
    cli.stop()
    assert cli.run("status", check=False).returncode == 3


def test_plan_prints_shards_and_bytes_and_what_does_not_fit(cli: Cli) -> None:
    plan = json.loads(cli.run("plan", str(DEMO), "--json").stdout)
    assert plan["fits"] is True
    short = cli.run("plan", str(DEMO), "--set", "engine.pages=100000000", check=False)
    assert short.returncode == 1
    assert "short by" in short.stdout
    assert "[0,4)" in short.stdout
    assert "[4,8)" in short.stdout


def test_doctor_passes_on_this_machine(cli: Cli) -> None:
    done = cli.run("doctor", str(DEMO))
    assert "all groups can run" in done.stdout
    assert "arena" in done.stdout


OWN_ADDRESS = "127.77.0.1"
"""No other test listens there: its ports stay free."""
NO_GPU = pytest.mark.skipif(not torch.version.cuda, reason="refused before a daemon starts: no CUDA build of torch")


@pytest.mark.parametrize("mode", [[], slow(["--daemon"])], ids=["foreground", "daemon"])
@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["engine.max_context=1000000000"],
            r"the model does not fit: host is .* short: .*; it fits with engine.max_con",
        ),
        pytest.param(
            ["groups.left.backend=cuda", "groups.left.env.CUDA_VISIBLE_DEVICES=-1"],
            r"group left: torch \S+ of \S+ is a CUDA build, but sees no GPU .*'-1'\): nvidia-smi must list it",
            marks=NO_GPU,
        ),
    ],
)
def test_a_start_that_can_never_work_ends_and_leaves_nothing(
    cli: Cli, mode: list[str], overrides: list[str], why: str
) -> None:
    with socket.create_server((OWN_ADDRESS, 0)) as sock:
        address = sock.getsockname()
    place = (f"server.host={OWN_ADDRESS}", f"server.port={address[1]}")
    sets = [part for one in (*place, *overrides) for part in ("--set", one)]
    done = cli.run("start", str(DEMO), "--name", "t", *mode, *sets, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, bool(re.match(f"lucevisor: t did not start: {why}", last))) == (ExitCode.FAILED, True), (
        last
    )
    assert not cli.socket().parent.exists()
    socket.create_server(address).close()


def test_what_cannot_be_used_is_one_clear_error_and_exit_code_2(cli: Cli) -> None:
    done = cli.run("start", str(DEMO), "--set", "server.prot=1", check=False)
    assert (done.returncode, "nearest: port" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    (cli.runtime / "lucevisor").touch()
    done = cli.run("start", str(DEMO), "--name", "t", "--set", "server.port=0", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f'lucevisor: XDG_RUNTIME_DIR = "{cli.runtime}/lucevisor')
    assert done.stderr.count("\n") == 1


def test_logits_writes_the_golden_numbers(cli: Cli, tmp_path: Path) -> None:
    golden = opened("qwen35")
    extra = '[engine]\ndtype = "float32"\n'
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"a": 1, "b": 1}, ["0-3", "3-8"], extra)
    (tmp_path / "ids.json").write_text(json.dumps(golden.ids))
    cli.run("logits", str(config), "--ids", str(tmp_path / "ids.json"), "--out", str(tmp_path / "out.npz"))
    got = np.load(tmp_path / "out.npz")
    assert got["logits"].dtype == np.float32
    golden.assert_logits(torch.from_numpy(got["logits"]))
    golden.bounds.assert_layers(torch.from_numpy(got["hidden"]), golden.hidden)


def test_bench_measures_a_configuration_beside_a_llama_bench(cli: Cli, tmp_path: Path) -> None:
    peer, record = tmp_path / "llama-bench", tmp_path / "figures.json"
    shared, own = Path(os.environ["XDG_CACHE_HOME"]) / "lucevisor", tmp_path / "cache" / "lucevisor"
    own.mkdir(parents=True, mode=0o700)  # other tests must not load what is tuned here
    for library in shared.glob("cpu-kernels-*.so"):
        shutil.copy(library, own)
    cli.env["XDG_CACHE_HOME"] = str(own.parent)
    results = [{"n_prompt": 70, "n_gen": 0, "avg_ts": 2.0}, {"n_prompt": 0, "n_gen": 6, "avg_ts": 2.0}]
    for program, said in ((peer, results), (tmp_path / "llama-batched-bench", {"pl": 2, "speed_tg": 2.0})):
        program.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
        program.chmod(0o700)
    done = cli.run(
        *("bench", str(DEMO), "-p", "70", "-n", "6", "-d", "0,65", "-s", "2", "-r", "2"),
        *("--against", str(peer), "--json", str(record), "--tune"),
    )
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("lucevisor-demo-22m (Q4_K), "))
    heading, lines = lines[start : start + 4], lines[:start] + lines[start + 4 :]
    assert [line.partition(": ")[0] for line in heading[1:]] == ["group left", "group right", "layers"]
    assert re.search(r"cpu:0 .*, \d+ threads?, torch \d", heading[1])
    rows = [line.split("  ")[0] for line in lines if ": " not in line]
    tuned = [line for line in lines if ": " in line and "nothing to tune" not in line]  # there is, on a cpu with AMX
    assert rows == ["test", "pp70", "tg6", "tg6 @ d65", "tg6 x2"]
    found = json.loads(record.read_text())
    assert [t["name"] for t in found["tests"]] == rows[1:]
    assert all(len(t["rounds"]) == 2 and min(t["rounds"]) > 0 for t in found["tests"])
    assert [t.get("against_rounds") for t in found["tests"]] == [[2.0, 2.0]] * 4
    assert all("cpu layers" in group["kernels"] and group["torch"] for group in found["groups"].values())
    kernels = found["groups"]["left"]["kernels"]
    assert kernels["cpu linear Q4_K"].endswith(" (tuned)") == bool(tuned)
    assert len(tuned) == len(list(own.glob("kernels-*.json"))) * 4  # a group's Q4_K and Q6_K, two groups alike
    assert found["against"] == [str(peer)]
    assert {"date", "version", "command", "layers"} < set(found)
    refused = cli.run("bench", str(DEMO), "-p", "1000000", check=False)
    assert refused.returncode == 1
    assert "raise engine.max_context" in refused.stderr


def test_importing_the_command_line_is_cheap() -> None:
    code = (
        "import sys, lucevisor.cli; print(sorted({'torch','numpy','aiohttp','jinja2','tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# ---- a model file in place of a configuration


MODEL = DEMO.parent / "demo" / "demo-qwen35-22m-q4_k_m.gguf"


@pytest.mark.timeout(300)
def test_a_model_is_served_without_a_configuration_file(cli: Cli, tmp_path: Path) -> None:
    said = cli.run("start", str(MODEL), "--daemon", "--name", "t", "--set", "server.port=0", timeout_s=200).stderr
    assert "on all devices that this machine has" in said
    body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0}
    _, answer = post(cli.status()["url"] + "/v1/chat/completions", body, 120)
    assert "Join one or more path segments" in answer["choices"][0]["message"]["content"]
    cli.run("reload")  # reads the file that was written
    cli.stop()
    printed = cli.run("init", str(MODEL)).stdout
    saved = cli.log().with_name("config.toml").read_text()
    assert saved.endswith(printed)
    box = tmp_path / "box.toml"
    box.write_text(printed)
    plans = [json.loads(cli.run("plan", path, "--json").stdout) for path in (str(box), str(MODEL))]
    assert [(one["fits"], one["stages"]) for one in plans] == [(True, plans[0]["stages"])] * 2


def test_a_model_that_is_not_there_is_refused_before_anything_is_asked(cli: Cli) -> None:
    for command in ("start", "init", "plan"):
        done = cli.run(command, "nothing.gguf", check=False)
        assert done.returncode == 2
        assert "there is no such file" in done.stderr
    done = cli.run("start", str(DEMO), "--python", "python3", check=False)
    assert done.returncode == 2
    assert "groups name their interpreters" in done.stderr


# ---- supervisors of a command


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "chaos"])
def test_a_killed_command_leaves_no_process(user_cli: Cli, command: str) -> None:
    user_cli.env["TMPDIR"] = str(user_cli.runtime)  # of the directory that nobody removes now
    process = user_cli.popen(command)
    starter = psutil.Process(process.pid)
    wait_until(lambda: len(starter.children(recursive=True)) >= 3, what="a supervisor and two daemons")
    below = starter.children(recursive=True)
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(each.pid) for each in below), what="all have ended")


def test_a_supervisor_whose_starter_is_gone_already_does_not_start(user_cli: Cli) -> None:
    arguments = ["start", str(DEMO), "--name", "t", "--detached", "--starter", str(os.getppid())]
    done = subprocess.run(
        [sys.executable, "-m", "lucevisor", *arguments], env=user_cli.env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert f"process {os.getppid()}, for which this supervisor was to run, has ended" in done.stderr
    assert not user_cli.socket().parent.exists()


def test_a_start_that_waits_for_ever_serves_once_its_groups_can_come_up(cli: Cli, tmp_path: Path) -> None:
    python, mended = tmp_path / "python", tmp_path / "mended"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *daemons*) [ -e {mended} ] || exit 3;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    sets = [part for one in ("server.port=0", f"groups.left.python={python}") for part in ("--set", one)]
    limits = ["--allow-faults", "backoff_max_s=0.25,failed_first_s=0.5"]
    starting = cli.popen("start", str(DEMO), "--name", "t", "--wait-forever", *limits, *sets)
    wait_until(lambda: cli.socket().exists() and cli.status()["state"] == "failed", what="left is given up")
    assert starting.poll() is None
    mended.touch()
    wait_until(lambda: cli.status()["state"] == "ready", what="left is tried again")
    cli.run("stop", "--name", "t")
    assert starting.wait(100) == 0
