"""Keys: who is let in, and by which name."""

from __future__ import annotations

import hmac

from lucevisor.api.keys import ApiKeys
from lucevisor.config import ApiKey

ALPHA, BETA = ApiKey("alpha"), ApiKey("beta")


def test_without_keys_nobody_is_asked():
    assert not ApiKeys().required


def test_each_key_is_accepted_and_nothing_else():
    keys = ApiKeys([ALPHA, BETA])
    assert keys.required
    assert all(keys.caller(k) for k in ("alpha", "beta"))
    assert not any(keys.caller(k) for k in ("", "alph", "alphabeta", "ALPHA", "é", "alpha\x00", "\udcff"))


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append(len(a) == len(b))
        return real(a, b)

    keys = ApiKeys(map(ApiKey, ["first", "second", "third, which is longer"]))
    monkeypatch.setattr("lucevisor.api.keys.hmac.compare_digest", spy)
    for token in ("first", "third, which is longer", "none"):
        compared.clear()
        keys.caller(token)
        assert compared == [True, True, True]


def test_keys_are_replaced():
    keys = ApiKeys([ALPHA])
    keys.replace([BETA])
    assert keys.caller("beta")
    assert not keys.caller("alpha")
    keys.replace([])
    assert not keys.required


def test_no_key_is_in_the_object():
    key = ApiKey("secret", "ann")
    assert "secret" not in repr(vars(ApiKeys([key]))) + repr(key)


def test_callers_are_told_apart_by_ids_that_do_not_tell_the_key():
    keys = ApiKeys([ALPHA, BETA, ApiKey("\udcff")])
    alpha, beta, odd = (keys.caller(k) for k in ("alpha", "beta", "\udcff"))
    assert alpha == keys.caller("alpha")
    assert len({alpha.id, beta.id, odd.id}) == 3
    assert "alpha" not in alpha.id
    assert alpha.name == ""


def test_keys_of_one_name_are_one_caller():
    keys = ApiKeys([ApiKey("old", "ann"), ApiKey("new", "ann"), ApiKey("ann"), ApiKey("other", "bob")])
    ann = keys.caller("old")
    assert ann == keys.caller("new")
    assert ann.name == "ann"
    assert len({keys.caller(k).id for k in ("old", "ann", "other")}) == 3
