"""Drafters with real daemons: the same tokens as without, wherever the drafter runs, and whatever becomes of it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from lucevisor.app.status import LoadProgress, status
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Service
from lucevisor.errors import LucevisorError
from lucevisor.supervision.events import State
from tests.combinations import slow
from tests.e2e.process import DEMO, Cli
from tests.e2e.service import GOLDEN, generate, running, write_config
from tests.waiting import until

TARGET = GOLDEN / "qwen35" / "model.gguf"
DFLASH = GOLDEN / "dflash" / "drafter-upstream.gguf"
DFLASH2 = GOLDEN / "dflash2" / "drafter.gguf"
MTP = GOLDEN / "qwen35_mtp_draft" / "model.gguf"
ENGINE = '\n[engine]\ndtype = "float32"\nmax_sequences = {n}\n'
ASIDE = '[groups.aside]\nbackend = "cpu"\nthreads = 1\n'
CACHE = """
[cache]
min_tokens = 8
prefix_slots = 100
dir = "{}"
"""
N = 60
"""Tokens of the golden traces, less the few that the last block may go beyond."""


def trace(fixture: str) -> tuple[list[int], list[int]]:
    """A prompt of the golden trace, and its greedy continuation."""
    golden = np.load(GOLDEN / fixture / "golden.npz")
    prompt = [int(i) for i in golden["input_ids"][:40]]
    greedy = golden["spec_greedy_tokens"] if "spec_greedy_tokens" in golden else golden["input_ids"][40:]
    return prompt, [int(i) for i in greedy[:N]]


def two_groups(tmp_path: Path, model: Path, draft: str, *, n: int = 4, more: str = "", split: str = "0-4 4-8") -> Path:
    """Groups left and right, and ``aside`` if the drafter is to run there.  Drafts are always made and verified, where
    `auto` would see that they do not pay with models this small."""
    draft += "" if "off" in draft or "width" in draft else "\nwidth = 4"
    extra = (ASIDE if "aside" in draft else "") + f"[draft]\n{draft}\n" + ENGINE.format(n=n) + more
    return write_config(tmp_path, model, {"left": 1, "right": 1}, split.split(), extra)


async def drafting(service: Service) -> None:
    await until(lambda: service.only.deployment.drafting)


def draft_of(service: Service) -> dict[str, Any]:
    """What the status says of the drafter."""
    return dict(status(service, "t", "", LoadProgress(), [])["draft"])


def n_steps(service: Service) -> int:
    assert service.only.engine is not None
    return service.only.engine.statistics().steps.n_steps


# ---- the same tokens, in fewer steps


@pytest.mark.parametrize(
    ("model", "fixture", "draft"),
    [
        (TARGET, "dflash", f'path = "{DFLASH}"'),
        slow(TARGET, "dflash2", f'kind = "dflash"\npath = "{DFLASH2}"'),
        (MTP, "qwen35_mtp_draft", ""),
    ],
)
async def test_a_drafter_gives_the_golden_tokens_in_fewer_steps(
    tmp_path: Path, model: Path, fixture: str, draft: str
) -> None:
    prompt, wanted = trace(fixture)
    async with running(two_groups(tmp_path, model, draft), tmp_path) as service:
        await drafting(service)
        before = n_steps(service)
        assert await generate(service, prompt, N) == wanted
        assert n_steps(service) - before <= 30


# ---- a drafter that is lost, restarted, changed or never there


_alone: list[list[int]] = []
"""What 8 prompts are answered one after the other, asked once for all cases."""


@pytest.mark.parametrize("how", ["kill", slow("restart")])
async def test_8_streams_go_on_when_the_drafters_group_dies(tmp_path: Path, how: str) -> None:
    prompt, wanted = trace("dflash")
    config = two_groups(tmp_path, TARGET, f'path = "{DFLASH}"\ndevice = "aside:0"', n=8)
    prompts = [prompt[i:] for i in range(8)]
    async with running(config, tmp_path) as service:
        await drafting(service)
        if not _alone:
            _alone.extend([await generate(service, one, N) for one in prompts])
        assert _alone[0][:N] == wanted
        aside, engine = service.groups["aside"], service.only.engine
        assert engine is not None
        pid, others = aside.pid, [service.groups[name].pid for name in ("left", "right")]
        assert pid is not None
        streams = asyncio.gather(*(generate(service, one, N) for one in prompts))
        await until(lambda: engine.statistics().running == 8)
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not service.only.deployment.drafting)
            assert service.state == "ready"
            shown = draft_of(service)
            assert shown["state"] == "detached"
            assert shown["reason"].startswith("group aside is ")
        else:
            await AdminOperations(service).restart_all(["aside"], now=False)
        assert await streams == _alone
        await drafting(service)
        assert draft_of(service)["state"] == "attached"
        assert aside.pid != pid
        assert [service.groups[name].pid for name in ("left", "right")] == others
        before = n_steps(service)
        assert (await generate(service, prompt, N)) == wanted
        assert n_steps(service) - before < 40, "it drafts again"


async def test_a_drafter_whose_daemon_cannot_start_holds_nothing_up(tmp_path: Path) -> None:
    prompt, wanted = trace("dflash")
    config = two_groups(tmp_path, TARGET, f'path = "{DFLASH}"\ndevice = "aside:0"')
    async with running(config, tmp_path, ["groups.aside.python=/bin/false"]) as service:
        assert await generate(service, prompt, N) == wanted
        await until(lambda: service.groups["aside"].state in (State.FAILED, State.BACKOFF))
        assert service.state == "ready"
        assert service.reason() == ""
        assert "group aside is " in draft_of(service)["reason"]


def change_one_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x80
    file.write_bytes(data)


@pytest.mark.parametrize("device", [slow("right:0"), "aside:0"])
async def test_a_changed_drafter_file_is_not_loaded_and_serving_goes_on(tmp_path: Path, device: str) -> None:
    prompt, wanted = trace("dflash")
    drafter = Path(shutil.copy(DFLASH, tmp_path / "drafter.gguf"))
    hashed = CACHE.format(tmp_path / "snapshots")  # before it is ready
    config = two_groups(tmp_path, TARGET, f'path = "{drafter}"\ndevice = "{device}"', more=hashed)
    async with running(config, tmp_path) as service:
        await drafting(service)
        change_one_byte(drafter)
        if device == "aside:0":
            with pytest.raises(LucevisorError, match=r"group aside did not come back: .*drafter\.gguf"):
                await AdminOperations(service).restart_all(["aside"], now=True)
            assert service.groups["aside"].state is State.FAILED
        else:
            await AdminOperations(service).restart_all(["right"], now=True)
        assert service.state == "ready"
        shown = draft_of(service)
        assert shown["state"] == "detached"
        assert "drafter.gguf" in shown["reason"]
        assert await generate(service, prompt, N) == wanted
        change_one_byte(drafter)  # back
        await AdminOperations(service).restart_all([device[:-2]], now=False)
        assert await generate(service, prompt, N) == wanted


# ---- snapshots


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """What is logged, from information on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with structlog.testing.capture_logs() as said:
        yield said


def restored(said: list[Any]) -> list[bool]:
    """For each snapshot that was restored, whether with the drafter's state; forgets what was said."""
    found = [line["with_draft"] for line in said if line["event"] == "snapshot restored"]
    said.clear()
    return found


@pytest.mark.parametrize(
    ("model", "fixture", "drafter"),
    [
        slow(TARGET, "dflash", f'path = "{DFLASH}"'),
        (MTP, "qwen35_mtp_draft", ""),
    ],
)
async def test_a_snapshot_holds_the_drafters_state_and_moves_with_it(
    tmp_path: Path, told: list[Any], model: Path, fixture: str, drafter: str
) -> None:
    prompt, wanted = trace(fixture)
    cache = CACHE.format(tmp_path / "snapshots")
    at = 20  # the slot ends behind so many tokens of the answer
    asked, rest = [*prompt, *wanted[:at]], wanted[at:]

    def config(draft: str, split: str) -> Path:
        return two_groups(tmp_path, model, draft, more=cache, split=split)

    async with running(config(drafter, "0-4 4-8"), tmp_path) as service:
        await drafting(service)
        assert await generate(service, prompt, at) == wanted[:at]
        before = n_steps(service)
        assert await generate(service, asked, len(rest)) == rest
        n_warm = n_steps(service) - before
        assert service.only.snapshots is not None
        await service.only.snapshots.save_all(60.0)
        entries = service.only.snapshots.store.entries
        assert any(entry.snapshot.draft_fingerprint for entry in entries)

    for draft, split, expected in (
        (f'{drafter}\ndevice = "aside:0"', "0-3 3-8", True),
        (f'{drafter}\ndevice = "left:0"', "0-7 7-8", True),
        ('kind = "off"', "0-4 4-8", False),
    ):
        told.clear()
        async with running(config(draft, split), tmp_path) as service:
            if expected:
                await drafting(service)
            before = n_steps(service)
            assert await generate(service, asked, len(rest)) == rest
            taken = n_steps(service) - before
        assert restored(told) == [expected], draft
        if expected:
            assert taken <= n_warm + 2, "one step judges the snapshot; the drafter knew all of the prompt"


# ---- before anything starts


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        (["draft.kind=mtp"], "an MTP head is of its model's family"),
        ([f"draft.path={TARGET}"], "has no MTP head"),
    ],
)
def test_a_drafter_that_cannot_be_read_is_refused_with_exit_code_2(cli: Cli, draft: list[str], text: str) -> None:
    sets = [part for one in draft for part in ("--set", one)]
    done = cli.run("start", str(DEMO), "--set", "server.port=0", *sets, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "draft." in done.stderr
