"""Kernel selection, and its warnings where kernels cannot run."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from daemons.ops import packed_linear, selection
from daemons.ops.selection import KernelSelector, triton_reject_reason

CPU = torch.device("cpu")
HERE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU  # else under the interpreter


def test_a_cpu_selects_torch_without_a_warning():
    selector = KernelSelector(CPU, torch.float32)
    assert selector.kernels is False
    assert selector.warnings == []
    assert selector.selected == {"cpu layers": "torch"}


def test_kernels_that_run_are_usable():
    assert triton_reject_reason(HERE, torch.float16) == ""
    assert KernelSelector(CPU, torch.float16, kernels=True).selected == {"cpu layers": "triton"}


def test_the_reject_reason(monkeypatch):
    def fails(device: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(packed_linear, "smoke_test", fails)
    assert "Failed to find C compiler.)" in triton_reject_reason(CPU, torch.float16)
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert "not installed" in triton_reject_reason(CPU, torch.float16)


def test_a_wrong_product_rejects_triton(monkeypatch):
    monkeypatch.setattr(packed_linear, "packed_gemv", lambda packed, x: torch.ones(1, 32))
    assert "a product with zeros is not zero" in triton_reject_reason(CPU, torch.float16)


def test_an_accelerator_without_kernels_warns(monkeypatch):
    monkeypatch.setattr(selection, "triton_reject_reason", lambda device, dtype: "no compiler")
    selector = KernelSelector(torch.device("meta"), torch.float16)
    assert selector.kernels is False
    assert selector.warnings == ["meta runs plain torch, many times slower than kernels: no compiler"]
