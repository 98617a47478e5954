"""The numbers of one host, from daemons on several that the ssh launcher started."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts, needs_namespaces
from tests.cluster.splits import SPLITS
from tests.combinations import slow
from tests.e2e.golden import ENGINE, FACTOR, assert_golden_numbers, model_of
from tests.e2e.service import GOLDEN, running

pytestmark = needs_namespaces


NAMES, OVER_TLS = ("here", "attic", "cellar"), ("gemma4_e2b", "mistral3")


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


@pytest.mark.parametrize(
    ("name", "groups", "cuts", "tls"),
    [
        ("llama", ["here", "attic"], [2], False),
        ("qwen35", ["attic", "here", "cellar"], [2, 6], True),
        slow("qwen35", ["attic", "here", "cellar"], [2, 6], False),
        *(slow(name, [NAMES[host] for host in on], cuts, name in OVER_TLS) for name, on, cuts in SPLITS),
    ],
    ids=str,
)
async def test_daemons_on_other_hosts_give_the_golden_numbers(
    name: str, groups: list[str], cuts: list[int], tls: bool, tmp_path: Path
) -> None:
    """Some daemons are here, beside others that share no memory with them; some are neighbours on two other hosts."""
    ranges = [f"{start}-{stop}" for start, stop in pairwise([0, *cuts, model_of(name)[0].n_layers])]
    with hosts("attic", "cellar", folder=tmp_path) as made:
        text = f'[model]\npath = "{GOLDEN / name / "model.gguf"}"\n{made.config(groups, tls=tls)}'
        devices = [f"{group}:0" for group in groups]
        text += f"[placement]\ntarget_devices = {devices}\ntarget_layer_split = {ranges}\n{ENGINE.format(32)}"
        config = tmp_path / "box.toml"
        config.write_text(text)
        async with running(config, tmp_path, FACTOR.get(name, [])) as service:
            for group in service.groups.values():
                assert group.hello is not None
                is_remote = group.name in made.names
                assert (network_of(group.hello.pid) == network_of(os.getpid())) != is_remote
                address = made.address(group.name) if is_remote else made.listen
                assert group.hello.rows_address.rpartition(":")[0] == address
            await assert_golden_numbers(service, name)
