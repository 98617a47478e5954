"""A transfer of several daemons ends with the last answer, whatever came first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.snapshots.transfers import TransferKind, TransferTable


def start(transfers, *groups):
    return transfers.start(TransferKind.SAVE, dict.fromkeys(groups, 10))


def test_the_last_answer_ends_it():
    transfers = TransferTable()
    one = start(transfers, "left", "right")
    assert transfers.answered("left", one.id, 10) is None
    assert transfers.answered("left", one.id, 10) is None  # twice counts once
    assert transfers.answered("right", one.id, 10) is one
    assert (one.ended, one.problem, one.n_bytes, len(transfers)) == (True, "", 20, 0)
    assert transfers.answered("right", one.id, 10) is None


def test_a_failure_waits_for_the_others():
    transfers = TransferTable()
    one = start(transfers, "left", "right")
    assert transfers.failed("left", one.id, "disk full") is None
    assert not one.ended
    assert transfers.answered("right", one.id, 10) is one
    assert one.problem == "disk full"


def test_a_group_that_may_fail_does_not_fail_the_transfer():
    transfers = TransferTable()
    one = transfers.start(TransferKind.RESTORE, {"left": 10, "draft": 5}, {"draft"})
    assert transfers.answered("left", one.id, 10) is None
    assert transfers.lost("draft", "killed") == [one]
    assert (one.problem, one.without) == ("", {"draft": "group draft was lost: killed"})


def test_a_lost_daemon_ends_its_transfers():
    transfers = TransferTable()
    one, two = start(transfers, "left", "right"), start(transfers, "left")
    assert transfers.lost("left", "killed") == [two]
    assert two.problem == "group left was lost: killed"
    assert transfers.lost("right", "killed too") == [one]
    assert one.problem == "group left was lost: killed"


def test_too_few_bytes_are_a_failure():
    transfers = TransferTable()
    one = start(transfers, "left")
    assert transfers.answered("left", one.id, 9) is one
    assert one.problem == "group left moved 9 bytes of 10"


def test_unexpected_answers_change_nothing():
    transfers = TransferTable()
    one = start(transfers, "left")
    assert transfers.answered("left", 17, 10) is None
    assert transfers.failed("right", one.id, "no") is None
    assert not one.problem
    with pytest.raises(ValueError, match="name at least one"):
        transfers.start(TransferKind.RESTORE, {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["good", "bad", "lost"])), max_size=20), st.data())
def test_every_transfer_ends_exactly_once(events, data):
    transfers = TransferTable()
    open_, ended = [start(transfers, *data.draw(st.sets(st.sampled_from("abc"), min_size=1))) for _ in range(3)], []
    for group, what in events:
        one = data.draw(st.sampled_from(open_))
        if what == "lost":
            ended += transfers.lost(group, "gone")
        else:
            done = transfers.answered(group, one.id, 10) if what == "good" else transfers.failed(group, one.id, "bad")
            ended += [done] if done else []
    assert len(ended) == len({t.id for t in ended}) == 3 - len(transfers)
    assert all(t.ended for t in ended)
    assert all(t.ended == (t in ended) for t in open_)
