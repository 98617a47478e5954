"""Links that a start measures, and what a slow one does to the next placement."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.hosts import hosts, needs_namespaces
from tests.e2e.process import Cli, complete
from tests.e2e.service import DEMO
from tests.waiting import wait_until

pytestmark = needs_namespaces


def test_a_start_measures_links_and_leaves_a_host_out_that_one_makes_slow(tmp_path: Path) -> None:
    cli = Cli()
    cli.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    links = tmp_path / "cache" / "lucevisor" / "links.json"
    with hosts("attic", folder=tmp_path) as made:
        config = tmp_path / "box.toml"
        named = '[placement]\ntarget_devices = ["here:0", "attic:0"]\n'
        text = f'[model]\npath = "{DEMO}"\n{made.config(["here", "attic"])}[engine]\ndtype = "float32"\n'
        config.write_text(text + named)
        try:
            answer = complete(cli.start(config)["url"], [1, 2, 3])[0]
            cli.stop()
            [(name, link)] = json.loads(links.read_text())["links"].items()
            assert name == f"{made.listen} attic"
            assert 0 < link["round_trip_s"] < 0.4  # on a busy machine; less than below
            assert link["bytes_per_s"] > 1e5
            planned = cli.run("plan", str(config)).stdout
            assert f"measured {link['measured']}" in planned

            links.write_text(json.dumps({"version": 1, "links": {name: link | {"round_trip_s": 0.5}}}))
            config.write_text(text)
            url = cli.start(config)["url"]
            wait_until(lambda: cli.status()["groups"][1]["state"] == "failed", what="the end of the other daemon")
            [here, attic] = cli.status()["groups"]
            assert [device["layers"] for device in here["devices"]] == [[0, 8]]
            assert "it has nothing to run: hosts: 512 prompt tokens" in attic["reason"]
            assert complete(url, [1, 2, 3])[0] == answer
            cli.run("restart", "--rolling")  # of those with something to run
            assert complete(url, [1, 2, 3])[0] == answer
            cli.stop()
        finally:
            cli.close()
