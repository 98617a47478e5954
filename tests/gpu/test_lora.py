"""LoRA adapters on a GPU: the logits of peft, several in one step, bits that neighbours do not change, and graphs
that serve any adapters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from daemons.device import prepare
from lucevisor.model.lora_files import open_adapter, with_adapters
from lucevisor.model.values import Backend, Dtype
from tests.families.golden import GOLDEN, opened
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.test_lora import answers, assert_near, eight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]
BACKEND = Backend("cuda" if torch.version.hip is None else "hip")
EXACT = How(Dtype.FLOAT32, Dtype.FLOAT32, BACKEND)


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare(BACKEND, 0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_are_those_of_peft(name: str) -> None:
    golden, folder = opened(name), GOLDEN / "lora"
    spec = with_adapters(golden.spec, [open_adapter("a", folder / f"{name}.gguf", 1.0, golden.spec)])
    pipeline = Pipeline(spec, load_stages(spec, golden.layer_splits()[:1], EXACT))
    pipeline.open(0, adapter="a")
    with np.load(folder / f"{name}.npz") as found:
        assert_near(pipeline.run_in_chunks(0, golden.ids, 32).cpu(), torch.from_numpy(found["logits"]))


@pytest.mark.parametrize("name", ["llama", "qwen35", "gemma3"])
def test_eight_adapters_in_one_step_answer_as_each_alone(name: str, tmp_path: Path) -> None:
    golden = opened(name)
    spec = eight(golden.spec, tmp_path)
    pipeline = Pipeline(spec, load_stages(spec, (), EXACT))
    prompts = {sequence: golden.ids[sequence : sequence + 29] for sequence in (3, 8, 0, 5, 1, 2, 9, 7, 4, 6)}
    alone = answers(pipeline, prompts, together=False)
    for sequence, logits in answers(pipeline, prompts, together=True).items():
        assert_near(logits.cpu(), alone[sequence].cpu())


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_with_deterministic_neighbours_change_no_bit(name: str, dtype: Dtype, tmp_path: Path) -> None:
    golden = opened(name)
    spec = eight(golden.spec, tmp_path)
    pipeline = Pipeline(spec, load_stages(spec, how=How(dtype, dtype, BACKEND, deterministic=True)))
    prompts = {sequence: golden.ids[sequence : sequence + 29] for sequence in range(10)}
    alone = answers(pipeline, prompts, together=False)
    for sequence, logits in answers(pipeline, prompts, together=True).items():
        assert torch.equal(logits, alone[sequence]), sequence


def test_a_graph_serves_any_adapters_and_steps_without_one_have_their_own(tmp_path: Path) -> None:
    golden = opened("qwen35")
    spec = eight(golden.spec, tmp_path)
    graphed, eager = load_stages(spec, (), EXACT), load_stages(spec, (), EXACT)
    for stage in eager:
        stage.graphs = [None] * len(stage.graphs)
    [graphs] = graphed[0].graphs
    assert graphs is not None
    names = ["", "a0", "a7", "a3", "", "a5"]
    pipelines = [Pipeline(spec, stages) for stages in (graphed, eager)]
    for pipeline in pipelines:
        for sequence, adapter in enumerate(names):
            pipeline.open(sequence, adapter=adapter)
            pipeline.run((sequence, golden.ids[:20]))
    for chosen in ((1, 2), (1, 2), (1, 2), (3, 0), (4, 5), (0, 4), (0, 4), (0, 4), (5, 3)):
        found, wanted = (p.run(*((one, golden.ids[20:21]) for one in chosen)).cpu() for p in pipelines)
        assert_near(found, wanted)
    of_two = [key.adapted for key in graphs._graphs if key.n_slices == 2]
    assert sorted(of_two) == [False, True]
