"""Filters, mirostat and DRY against llama.cpp's samplers, as tests/oracles/llama_samplers.py recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daemons.repetition import breakers_by_head, penalise_repetition
from daemons.truncation import filtered, mirostat_keeps, next_mu
from lucevisor.protocol.steps import Dry, Mirostat, SamplingParams

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "golden" / "llama-samplers.json").read_text())


@pytest.mark.parametrize("case", RECORDED["filters"], ids=lambda case: str(case["settings"]))
def test_filters_keep_what_llama_cpp_keeps(case: dict[str, Any]) -> None:
    settings = dict(case["settings"])
    if "xtc" in settings:
        settings |= {"xtc_threshold": settings.pop("xtc"), "xtc_probability": 1.0}
    p, ids = filtered(torch.tensor(case["logits"]), SamplingParams(**settings), 0.0)
    found = sorted(zip(ids.tolist(), p.tolist(), strict=True))
    assert [i for i, _ in found] == [i for i, _ in case["kept"]]
    assert [p for _, p in found] == pytest.approx([p for _, p in case["kept"]], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", RECORDED["mirostat"], ids=lambda c: f"{c['version']}-{c['tau']}-{c['eta']}")
def test_mirostat_moves_as_in_llama_cpp(case: dict[str, Any]) -> None:
    settings = Mirostat(case["version"], case["tau"], case["eta"])
    mu = 2 * settings.tau
    for step in case["steps"]:
        p, ids = mirostat_keeps(torch.tensor(step["logits"]), settings, mu)
        assert len(p) == step["n_kept"]
        chosen = float(p[ids.tolist().index(step["token"])])  # llama.cpp's own draw
        assert chosen == pytest.approx(step["p"], rel=1e-3)
        mu = next_mu(chosen, settings, mu)


@pytest.mark.parametrize("case", RECORDED["dry"], ids=range(len(RECORDED["dry"])))
def test_dry_penalises_as_llama_cpp(case: dict[str, Any]) -> None:
    breakers = tuple(tuple(one) for one in case["breakers"])
    dry = Dry(case["multiplier"], case["base"], case["allowed_length"], case["last_n"], breakers)
    row = torch.zeros(len(case["logits"]))
    penalise_repetition(row, np.array(case["context"]), dry, breakers_by_head(dry))
    assert row.tolist() == pytest.approx(case["logits"], rel=1e-5)
