"""Keys: who is let in, and what a file that changes does."""

from __future__ import annotations

import hmac

import pytest

from lucevisor.api.keys import ApiKeys, key_id
from lucevisor.errors import ConfigError


def test_without_keys_nobody_is_asked():
    assert not ApiKeys().required


def test_each_key_is_accepted_and_nothing_else():
    keys = ApiKeys(["alpha", "beta"])
    assert keys.required
    assert all(keys.accepts(k) for k in ("alpha", "beta"))
    assert not any(keys.accepts(k) for k in ("", "alph", "alphabeta", "ALPHA", "é", "alpha\x00", "\udcff"))


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append(len(a) == len(b))
        return real(a, b)

    keys = ApiKeys(["first", "second", "third, which is longer"])
    monkeypatch.setattr("lucevisor.api.keys.hmac.compare_digest", spy)
    for token in ("first", "third, which is longer", "none"):
        compared.clear()
        keys.accepts(token)
        assert compared == [True, True, True]


def test_a_file_is_read_again(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nold\n\n")
    keys = ApiKeys(path)
    assert keys.accepts("old")
    path.write_text("new\n")
    assert keys.accepts("old")
    keys.reload()
    assert keys.accepts("new")
    assert not keys.accepts("old")


def test_a_broken_file_leaves_the_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("key\n")
    keys = ApiKeys(path)
    path.unlink()
    with pytest.raises(ConfigError, match="api_keys_file"):
        keys.reload()
    assert keys.accepts("key")


def test_no_key_is_in_the_object():
    assert "secret" not in repr(vars(ApiKeys(["secret"])))


def test_a_key_is_told_apart_by_an_id_that_does_not_tell_it():
    assert key_id("") == ""
    assert key_id("alpha") == key_id("alpha") != key_id("beta")
    assert "alpha" not in key_id("alpha")
    assert len(key_id("\udcff")) == 16
