"""The commands of an operator, for a model over two hosts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.cluster.hosts import hosts, needs_namespaces
from tests.e2e.process import Cli, complete
from tests.e2e.service import DEMO
from tests.waiting import wait_until

pytestmark = needs_namespaces


def test_plan_doctor_status_and_metrics_name_the_host(tmp_path: Path) -> None:
    cli = Cli()
    with hosts("attic", folder=tmp_path) as made:
        config = tmp_path / "box.toml"
        text = f'[model]\npath = "{DEMO}"\n{made.config(["here", "attic"])}[engine]\ndtype = "float32"\n'
        config.write_text(text + '[placement]\ntarget_devices = ["here:0", "attic:0"]\n')
        try:
            planned = json.loads(cli.run("plan", str(config), "--json").stdout)
            assert [(one["group"], one["host"], one["memory"]) for one in planned["devices"]] == [
                ("here", "", "host"),
                ("attic", "attic", "host attic"),
            ]
            checked = cli.run("doctor", str(config)).stdout
            assert "group attic (cpu) on attic, " in checked
            assert "all groups can run" in checked
            status = cli.start(config)
            [here, attic] = status["groups"]
            assert (here["host"], attic["host"]) == ("", "attic")
            assert attic["daemon_pid"] != attic["pid"]
            assert 0 < attic["path"]["round_trip_s"] < 1
            answer = complete(status["url"], [1, 2, 3])
            os.kill(attic["daemon_pid"], signal.SIGKILL)
            assert complete(status["url"], [1, 2, 3])[0] == answer[0]
            wait_until(cli.ready)
            shown = cli.run("status").stdout
            assert "group attic on attic: round trip" in shown
            cli.stop()
        finally:
            cli.close()
