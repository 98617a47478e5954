"""Shares of API keys: who goes first, what an idle key keeps, what a slow one may claim."""

from __future__ import annotations

from lucevisor.engine.scheduler import ClientShares


def shares(*keys: str) -> ClientShares:
    found = ClientShares(credit=1000)
    for key in keys:
        found.add_request(key)
    return found


def test_the_lead_is_counted_from_the_key_that_got_least() -> None:
    found = shares("a", "b", "c")
    found.charge([("a", 300), ("b", 100), ("c", 150), ("a", 1)])
    assert [found.lead(key) for key in "abc"] == [201, 0, 50]


def test_one_key_alone_is_not_counted() -> None:
    found = shares("a", "a")
    found.charge([("a", 10**6)])
    found.add_request("b")
    assert (found.lead("a"), found.lead("b")) == (0, 0)


def test_a_key_saves_nothing_while_it_is_idle_and_keeps_what_it_owes() -> None:
    found = shares("a", "b", "c")
    found.charge([("a", 300), ("c", 500)])
    found.remove_request("b")
    found.remove_request("c")
    found.add_request("d")  # with a, which got 300
    assert (found.lead("a"), found.lead("d")) == (0, 0)
    found.add_request("c")
    assert found.lead("c") == 200
    found.add_request("b")
    assert found.lead("b") == 0


def test_a_busy_key_falls_behind_by_its_credit_at_most() -> None:
    found = shares("a", "slow")
    for _ in range(100):
        found.charge([("a", 100), ("slow", 1)])
    assert found.lead("a") <= 1000


def test_when_all_are_gone_nothing_is_owed() -> None:
    found = shares("a", "b")
    found.charge([("a", 900)])
    found.remove_request("a")
    found.remove_request("b")
    found.add_request("a")
    found.add_request("b")
    assert found.lead("a") == 0
