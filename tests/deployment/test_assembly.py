"""Daemons that come, go and answer in every order: when a pipeline stands, who is reset, what requests are told."""

from __future__ import annotations

import pytest

from lucevisor.engine.request import NotReady, RequestError
from tests.deployment.daemon_groups import Groups
from tests.engine.toy_engine import events_of, request, told

STOPPED = RequestError(
    "shutting_down", "the supervisor is stopping; send the request to another server, or again later"
)


def serving(*homes: str) -> Groups:
    groups = Groups(homes or ("left", "right"))
    for group in dict.fromkeys(groups.homes):
        groups.ready(group)
    groups.work()
    assert groups.engine.ready
    return groups


async def test_a_loss_ends_running_requests_and_names_the_group_and_the_queue_goes_on() -> None:
    groups = serving()
    one, two, waiting = (request(name, n=30) for name in "abc")  # two at once
    handles = [groups.engine.submit(r) for r in (one, two, waiting)]
    for _ in range(6):
        groups.answer("left")
        groups.answer("right")
    groups.die("right")
    groups.lost("right")
    for handle in handles[:2]:
        error = (await events_of(handle))[-1].error  # type: ignore[union-attr]
        assert error.code == "shard_lost"
        assert "group right was lost while the request ran: killed by signal 9" in error.message
    assert handles[2].finished is None
    with pytest.raises(NotReady, match="group right was lost"):
        groups.engine.submit(request("d"))
    groups.ready("right")
    groups.work()
    assert [p.resets for p in groups.processes.values()] == [2, 1]  # the daemon that lives on was reset again
    assert told(await events_of(handles[2]))[0] == groups.model.alone(waiting.prompt, waiting.sampling, 30, frozenset())


def test_a_step_that_cannot_be_sent_ends_its_request_before_supervision_hears_of_the_death() -> None:
    groups = serving()
    groups.die("left")
    handle = groups.engine.submit(request("a"))
    assert [(f.stage, f.code) for f in groups.failures] == [(0, "shard_lost")]
    assert handle.finished is not None
    assert handle.finished.error is not None
    assert handle.finished.error.code == "shard_lost"
    assert "group left was lost while the request ran: step" in handle.finished.error.message
    assert not groups.assembly.complete
    groups.lost("left")
    groups.ready("left")
    groups.work()
    assert groups.assembly.complete
    assert groups.engine.ready


def test_after_close_no_daemon_makes_a_pipeline() -> None:
    groups = serving("only")
    handle = groups.engine.submit(request("a", n=50))
    groups.engine.close(STOPPED)
    groups.assembly.detach(STOPPED)
    assert handle.finished is not None
    assert handle.finished.error == STOPPED
    groups.processes.clear()
    groups.ready("only")  # one that was loading meanwhile
    groups.work()
    assert not groups.assembly.complete
    late = Groups(["only"])
    late.ready("only")
    late.assembly.detach(STOPPED)
    late.work()  # answers its reset
    assert not late.assembly.complete
