"""`lucevisor start MODEL.gguf`, without a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.asking import post
from tests.e2e.process import DEMO, Cli

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
    assert "fits" in cli.run("doctor", str(box), timeout_s=200).stdout


def test_a_model_that_is_not_there_is_refused_before_anything_is_asked(cli: Cli) -> None:
    for command in ("start", "init"):
        done = cli.run(command, "nothing.gguf", check=False)
        assert done.returncode == 2
        assert "there is no such file" in done.stderr
    done = cli.run("start", str(DEMO), "--python", "python3", check=False)
    assert done.returncode == 2
    assert "groups name theirs in CONFIG" in done.stderr
