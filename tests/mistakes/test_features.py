"""Every feature of docs/features.md names tests that exist; the tables have the numbers that they claim."""

from __future__ import annotations

import re

import pytest

from tests.mistakes.page import ROOT, table

FEATURES = table("Features")
STATES = {"yes", "partly", "no"}


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0])
def test_a_feature_has_a_state_and_what_is_here_a_test(row):
    _, feature, state, peers, tests = row
    assert feature
    assert state in STATES
    assert set(peers.split(", ")) <= {
        "llama-server",
        "vLLM",
        "Ollama",
        "llama-swap",
        "LM Studio",
        "Lucebox",
        "exo",
        "SGLang",
        "none",
    }
    named = re.findall(r"tests/[\w/]+\.py(?:::\w+)*", tests)
    assert named or state == "no"
    for one in named:
        file, *names = one.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(re.search(rf"(def|class) {name}\b", text) for name in names), one
