"""Drafters on kernels draft what they draft on plain torch; the interpreter runs the kernels."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest

pytest.importorskip("triton")

from daemons.draft import stage as stage_module
from daemons.ops.selection import KernelSelector
from lucevisor.model.families import open_spec
from lucevisor.protocol.loading import DraftKind
from tests.drafters.drafted import context, golden, load_draft
from tests.model.drafter_files import DFLASH2, TARGET, UPSTREAM


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "path", "tokens"), [("dflash", UPSTREAM, "draft_tokens_causal_swa"), ("dflash2", DFLASH2, "draft_path")]
)
def test_a_block_on_kernels(name, path, tokens) -> None:
    z, target = golden(name), open_spec(TARGET)
    with mock.patch.object(stage_module, "KernelSelector", partial(KernelSelector, kernels=True)):
        stage = load_draft(target, path, DraftKind.DFLASH)
    [drafted] = context(stage, z["features"][:40], z["input_ids"].tolist()[:40], int(z["block_ids"][0]), 7)
    assert drafted.tokens == z[tokens].tolist()[-7:]
