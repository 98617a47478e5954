"""bench/perplexity.py: every path of a cpu reads the held-out texts, near float32; a wrong score would show."""

from __future__ import annotations

import math

import pytest
import torch

from bench.perplexity import CPU_PATHS, DEMO, EXACT, MODES, compare, held_out, measure
from lucevisor.model.values import Backend


def test_held_out_texts_are_tokens_of_the_demo_and_some_count():
    texts, counted = held_out(16, 1024)
    assert [len(text) for text in texts] == [1024] * 16
    assert all(0 <= token < 8192 for text in texts for token in text)
    assert counted.shape == (16, 1023)
    assert 0.3 < float(counted.double().mean()) < 0.6


def test_perplexity_is_of_counted_tokens_and_differences_have_an_error():
    exact = (torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[1, 2, 3]]))
    found = (torch.tensor([[-1.1, -2.3, 0.0]]), torch.tensor([[1, 5, 9]]))
    got = compare(exact, found, torch.tensor([[True, True, False]]))
    assert got["perplexity"] == pytest.approx(math.exp(1.7))
    assert got["float32_perplexity"] == pytest.approx(math.exp(1.5))
    assert got["difference"] == pytest.approx(math.exp(0.2) - 1)
    assert got["standard_error"] == pytest.approx(0.1)
    assert (got["same_choice"], got["n_tokens"]) == (0.5, 2)


@pytest.mark.slow
def test_every_path_of_a_cpu_is_near_float32():
    texts, _ = held_out(2, 12)
    counted = torch.ones(2, 11, dtype=torch.bool)
    rows = list(measure(DEMO, texts, counted, Backend.CPU, [EXACT, *CPU_PATHS]))
    assert [(r["path"], r["mode"]) for r in rows] == [(p.name, m) for p in (EXACT, *CPU_PATHS) for m in MODES]
    exact, rest = rows[: len(MODES)], rows[len(MODES) :]
    assert exact[0]["difference"] == 0
    assert all(abs(row["difference"]) < 1e-3 and row["same_choice"] == 1 for row in exact)
    assert all(abs(row["difference"]) < 0.1 and row["same_choice"] > 0.8 for row in rest)
    assert any(row["difference"] for row in rest)
