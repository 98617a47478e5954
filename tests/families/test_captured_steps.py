"""Short steps of a cpu that are captured give the bits of those that are not, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daemons.graphs import CAPTURE_AT, StepGraphs
from daemons.message_queue import StepCancelled
from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype
from lucevisor.protocol.steps import Slice, Step
from tests.combinations import combinations
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.daemons.tiny_models import write_data
from tests.families.golden import KINDS, Golden
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.test_weight_formats import MODELS
from tests.numerics import Bound

pytestmark = needs_cpu_kernels
DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
IDS = [(i * 37 + 11) % 300 for i in range(90)]


def spec_of(name: str, folder: Path) -> ModelSpec:
    if name == "demo":
        return open_spec(DEMO)
    return open_spec(write_data(folder / "model.gguf", MODELS[name], ["Q4_K", "Q6_K"]))


def graphs_of(stages: Sequence[LoadedStage]) -> list[StepGraphs]:
    found = [graphs for stage in stages for graphs in stage.graphs]
    assert all(graphs is not None for graphs in found)
    return found


def eager(stages: list[LoadedStage]) -> list[LoadedStage]:
    for stage in stages:
        stage.graphs = [None for _ in stage.graphs]
    return stages


def steps(c: Pipeline) -> Tensor:
    """A prompt; single tokens over a page border, alone and beside another sequence; verify slices, accepted up to any
    draft; short runs.  Logits and captures.
    """
    found: list[Tensor] = []

    def keep(logits: Tensor) -> None:
        found.extend([logits, *(x.float().clone() for x in c.captures if x is not None)])

    c.open(0)
    keep(c.run((0, IDS[:50])))
    for token in IDS[:20]:
        keep(c.run((0, [token])))
    c.open(1)
    keep(c.run((1, IDS[:9])))
    for accepted in (4, 0, 2, 4):
        keep(c.verify(*[(s, IDS[c.texts[s].length % 30 :][:5], 4) for s in (0, 1)]))
        for s in (0, 1):
            c.accept(s, 4, (accepted + s) % 5)
        keep(c.run((0, IDS[:1]), (1, IDS[1:2])))
    c.close(0)
    for n in (3, 16, 32):
        for at in (0, 3, 5):
            keep(c.run((1, IDS[at : at + n])))
    return torch.cat([x.flatten() for x in found])


@pytest.mark.parametrize(
    ("name", "capturable", "kv_dtype"),
    [("demo", True, Dtype.BFLOAT16), ("demo", True, Dtype.Q8_0), ("gemma4 inputs", False, Dtype.BFLOAT16)],
)
def test_captured_steps_equal_eager_steps(name: str, capturable: bool, kv_dtype: Dtype, tmp_path: Path) -> None:
    spec, how = spec_of(name, tmp_path), How(Dtype.BFLOAT16, kv_dtype)
    split, captures = (spec.n_layers // 2,), [0, spec.n_layers - 1]
    if name.startswith("gemma4"):
        split = ()  # layers that share pages lie on one shard
    plain, captured = (load_stages(spec, split, how, captures=captures) for _ in range(2))
    wanted, found = (steps(Pipeline(spec, stages)) for stages in (eager(plain), captured))
    assert torch.equal(found, wanted)
    for stage in captured:
        assert (stage.kernels["cpu decodes"] == "captured") == capturable
        assert capturable or "is not a kernel" in stage.kernels["cpu decodes"]
    for graphs in graphs_of(captured):
        assert len({key[:2] for key in graphs._graphs}) == len(graphs._graphs)  # one for all lengths
        shapes = {(key.n_slices, key.n_tokens) for key in graphs._graphs}
        assert shapes == ({(1, 1), (2, 5), (2, 1), (1, 3), (1, 16), (1, 32)} if capturable else set())


def test_a_recalled_step_changes_nothing(tmp_path: Path) -> None:
    """Its rows never come: the same step is run later, captured as before."""
    spec, how = spec_of("demo", tmp_path), How(Dtype.BFLOAT16, Dtype.BFLOAT16)
    plain, captured = (load_stages(spec, (), how) for _ in range(2))
    found = []

    def recalled() -> None:
        raise StepCancelled("step 1")

    for c in (Pipeline(spec, eager(plain)), Pipeline(spec, captured)):
        c.open(0)
        c.run((0, IDS[:20]))
        rows = []
        for i, token in enumerate(IDS[:6]):
            rows.append(c.run((0, [token])))
            if i >= CAPTURE_AT - 1:
                [stage] = c.stages
                with pytest.raises(StepCancelled):
                    stage.forward(Step(2, 0, [], [Slice(0, c.texts[0].length, [7], True)]), None, await_rows=recalled)
        found.append(torch.cat(rows))
    assert torch.equal(*found)


# ---- captures of the residual stream


@combinations(indirect=["golden"], golden=KINDS, shards=[False, True])
def test_captures_of_every_layer_split_are_the_golden_hidden_states(golden: Golden, shards: bool) -> None:
    n, cuts = golden.spec.n_layers, golden.layer_splits()[1::2]
    layers = sorted({0, 1, n // 2, n - 1})
    split = {"shard_split" if shards else "layer_split": cuts}
    c = golden.pipeline(load_stages(golden.spec, **split, captures=layers))
    c.open(0)
    c.run((0, golden.ids))
    borders = [0, n] if shards else [0, *cuts, n]
    of_stages = [[i for i in layers if a <= i < b] for a, b in pairwise(borders)]
    assert [found is not None for found in c.captures] == [bool(own) for own in of_stages]
    captures = torch.cat([found for found in c.captures if found is not None], dim=-1)
    assert captures.shape == (len(golden.ids), len(layers) * golden.spec.hidden_size)
    for layer, found in zip(layers, captures.split(golden.spec.hidden_size, dim=-1), strict=True):
        bound = Bound(*(x[layer + 1] for x in golden.bounds.hidden))
        assert bound.worst(found, golden.hidden[layer + 1]) <= 1.0
    c.run((0, golden.ids[:9]), want_hidden=True)
    found = [x for x in c.captures if x is not None]
    assert torch.equal(torch.cat(found, dim=-1), torch.cat([c.hidden[i + 1] for i in layers], dim=-1))
