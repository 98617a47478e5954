"""The loader: formats, bytes, conversions and errors, on files written by the gguf library."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from daemons.device import CPU
from daemons.errors import DeviceError, LoadError, StateError
from daemons.models.shard import ShardConfig, ShardModel
from daemons.models.stage import LoadedStage
from daemons.ops.selection import KernelSelector
from daemons.runner import ModelRunner
from daemons.weights import reading
from daemons.weights.reading import StagingBuffers, TensorChunk
from lucevisor.config import CacheConfig
from lucevisor.model.drafters import draft_paths, open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.quant_types import BY_NAME
from lucevisor.model.values import Backend, Dtype, FileIdentity, KvGroup, LayerRange
from lucevisor.model.weight_layout import shard_layouts
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Placement
from lucevisor.placement.stages import LoadFiles, load_message
from lucevisor.protocol.arena import Arena, descriptors, open_arenas
from lucevisor.protocol.loading import Load, Loaded, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step
from tests.combinations import combinations
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.daemons.tiny_models import Tiny, write
from tests.deployment.test_weights import GOLDEN, flip, settled
from tests.families.golden import opened
from tests.families.pipeline import How, Pipeline, load_stages, pools_of
from tests.families.rounding import Formats, explained, middle_error
from tests.families.test_weight_formats import assert_planned
from tests.model.drafter_files import DFLASH2, MTP, TARGET, UPSTREAM
from tests.placement.made import configure

IDS = [(i * 31 + 7) % 320 for i in range(90)]
NATIVE = ["Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0"]
TORCH = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models by what they hold; each is written once."""
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def get(kinds: list[str], *, expand: bool = False, tied: bool = True):
        key = ("-".join(kinds), expand, tied)
        if key not in made:
            made[key] = write(folder / f"m{len(made)}.gguf", Tiny(tied=tied), kinds, expand=expand)
        return made[key]

    return get


def make_shard(
    spec, backend=Backend.CPU, dtype=Dtype.FLOAT32, layers=None, embedding=True, output=True, report=None
) -> ShardModel:
    """A shard with the weight formats of ``backend``, computed on the cpu."""
    plan = ShardPlan(0, layers or LayerRange(0, spec.n_layers))
    kv = Dtype.FLOAT32 if dtype is Dtype.FLOAT32 else dtype
    config = ShardConfig(spec, plan, embedding, output, backend, dtype, kv, pools_of(spec))
    with torch.inference_mode():
        return ShardModel(config, KernelSelector(CPU, TORCH[dtype]), report or (lambda done, total: None))


def logits(spec, stages: list[LoadedStage] | None = None) -> torch.Tensor:
    c = Pipeline(spec, stages or load_stages(spec))
    c.open(0)
    return torch.cat((c.run((0, IDS[:70])), c.run_in_chunks(0, IDS[70:], 1)))


@combinations(
    dtype=[Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16],
    backend=list(Backend),
    kinds=[("F32",), ("F16", "BF16"), tuple(NATIVE), ("NVFP4", "IQ2_XXS", "Q4_K")],
    tied=[True, False],
)
def test_loaded_bytes_are_the_planned_bytes(files, kinds, backend, dtype, tied):
    spec = open_spec(files(kinds, tied=tied))
    for layers, embedding, output in (
        (LayerRange(0, 4), True, True), (LayerRange(0, 1), True, False), (LayerRange(1, 3), False, False),
        (LayerRange(3, 4), False, True),
    ):  # fmt: skip
        shard = make_shard(spec, backend, dtype, layers, embedding, output)
        kept = shard_layouts(spec, layers, embedding=embedding, output=output, backend=backend, dtype=dtype)
        assert_planned(shard.weight_bytes, kept)


def test_a_tied_table_of_another_form_than_the_head(files):
    """bfloat16 on the cpu: the output matrix is int8, the lookup keeps the file's blocks."""
    spec = open_spec(files(["Q6_K"]))
    kept = shard_layouts(spec, LayerRange(0, 4), embedding=True, output=True, backend=Backend.CPU, dtype=Dtype.BFLOAT16)
    assert sorted((r.role.value, r.format.value) for r in kept if r.name == "token_embd.weight") == [
        ("lookup", "blocks"), ("matrix", "int8"),
    ]  # fmt: skip
    exact = logits(spec)
    error = middle_error(logits(spec, load_stages(spec, how=How(Dtype.BFLOAT16))), exact)
    assert error <= explained(spec, IDS, exact, Formats(Dtype.BFLOAT16, packed=True))


@needs_cpu_kernels
def test_what_was_chosen_and_converted_is_told(files):
    stage = load_stages(open_spec(files(["NVFP4", "Q4_K", "Q8_0"])), how=How(Dtype.BFLOAT16))[0]
    assert stage.kernels["cpu linear Q4_K"].startswith("tiles, c++")
    (warning,) = stage.warnings
    assert warning.startswith("NVFP4 tensors are not kept as stored: ")
    assert "bytes on cpu" in warning


def test_without_a_compiler_torch_computes_and_that_is_told(files, without_cpu_kernels):
    stage = load_stages(open_spec(files(["Q4_K", "Q8_0"])), how=How(Dtype.BFLOAT16))[0]
    assert any(text.startswith("int4") for text in stage.kernels.values())
    assert stage.kernels["cpu linear Q8_0"].startswith("int8")
    (warning,) = stage.warnings
    assert warning == "the cpu computes with torch alone, several times slower than with C++ kernels: no C++ compiler"


# ---- refusals


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = write(tmp_path / "cut.gguf", Tiny(), ["Q8_0"])
    spec = open_spec(path)
    os.truncate(path, path.stat().st_size - 100_000)
    with pytest.raises(
        LoadError, match=r"cut\.gguf: tensor 'blk\.3\..*unexpected end of file: it was truncated after it was opened"
    ):
        load_stages(spec)


def test_a_type_nobody_can_read_names_the_tensor(files):
    spec = open_spec(files(["Q8_0"]))
    tensors = dict(spec.files.tensors)
    name = "blk.2.ffn_up.weight"
    tensors[name] = dataclasses.replace(tensors[name], kind=BY_NAME["Q8_K"], n_bytes=256 * 292)
    strange = dataclasses.replace(spec, files=dataclasses.replace(spec.files, tensors=tensors))
    with pytest.raises(LoadError, match=r"tensor 'blk\.2\.ffn_up\.weight': its type Q8_K is not supported") as caught:
        load_stages(strange)
    assert caught.value.configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": []}, "the plan has no shard"),
        ({"shards": [(0, 2), (3, 4)]}, r"shard \[3,4\) does not follow \[0,2\)"),
        ({"shards": [(0, 5)]}, r"the model has layers \[0,4\)"),
        ({"source": 0}, "a stage either embeds tokens or reads a boundary"),
        ({"target": 0}, "a stage either makes logits or writes a boundary"),
        ({"captures": [1, 4]}, r"it captures the layers \[4\], which it does not have"),
        ({"captures": [2, 1]}, r"the captured layers \[2, 1\] are not in ascending order"),
        ({"capture_target": 0}, "it has an arena for captures, and captures no layer"),
    ],
)
def test_impossible_plans_are_refused(files, change, message):
    spec = open_spec(files(["Q8_0"]))
    load = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], [], pools_of(spec), 4, 64)
    shards = [ShardPlan(0, LayerRange(a, b)) for a, b in change.get("shards", [(0, 4)])]
    plan = StagePlan(0, shards, None, None, embedding=True, output=True)
    changed = msgspec.structs.replace(plan, **{key: value for key, value in change.items() if key != "shards"})
    with pytest.raises((LoadError, DeviceError), match=message):
        LoadedStage.load(spec, changed, load, Backend.CPU, lambda _: None)


def test_unknown_families_are_refused(files):
    spec = open_spec(files(["Q8_0"]))
    with pytest.raises(LoadError, match=r"architecture 'mamba9' is not one of .*qwen35"):
        load_stages(dataclasses.replace(spec, architecture="mamba9"))
    with pytest.raises(DeviceError, match="q8_0 is a format of attention state"):
        load_stages(spec, how=How(Dtype.Q8_0))


def test_steps_that_do_not_fit_the_stage_are_refused(files):
    spec = open_spec(files(["Q8_0"]))
    c = Pipeline(spec, load_stages(spec, [2]))
    c.open(0)
    first, last = c.stages
    with pytest.raises(StateError, match="513 tokens, this daemon was loaded for steps of up to 512"):
        first.forward(Step(1, 0, [], [Slice(0, 0, [1] * 513, True)]), None)
    with pytest.raises(StateError, match=r"boundary rows \[2, 256\] for 1 tokens of width 256"):
        last.forward(Step(1, 0, [], [Slice(0, 0, [1], True)]), torch.zeros(2, 256))
    with pytest.raises(StateError, match="boundary rows none"):
        last.forward(Step(1, 0, [], [Slice(0, 0, [1], True)]), None)
    with pytest.raises(StateError, match="this stage has no output matrix"):
        first.logits(torch.zeros(1, 256), None)
    assert first.forward(Step(1, 0), None).rows.shape == (0, 256)


# ---- files that change meanwhile


class Reporter:
    """Changes the last byte of ``path``, if one is given, when the first tensors are read."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def progress(self, _: Progress) -> None:
        if self.path is not None:
            flip(self.path, self.path.stat().st_size - 1, 0)
            self.path = None

    def log(self, level: str, event: str, **fields: object) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return settled(Path(shutil.copy(GOLDEN / "qwen3" / "model.gguf", tmp_path / "m.gguf")))


def load(model: Path, identities: tuple[FileIdentity, ...] = (), reporter: Reporter | None = None):
    n_layers = open_spec(model).n_layers
    stage = StagePlan(0, [ShardPlan(0, LayerRange(0, n_layers))], None, None, embedding=True, output=True)
    order = Load(
        [str(model)],
        Dtype.FLOAT32,
        Dtype.FLOAT32,
        [stage],
        [],
        PoolSizes(4, 0, 0),
        1,
        64,
        1,
        identities=list(identities),
    )
    return ModelRunner.load(order, Backend.CPU, [], reporter or Reporter())[1]


def test_what_was_read_is_told(model: Path) -> None:
    files = open_spec(model).files
    assert files is not None
    assert load(model).identities == load(model, files.identities).identities == list(files.identities)


def test_a_file_that_changes_while_it_is_loaded_is_refused(model: Path) -> None:
    with pytest.raises(LoadError, match=r"m\.gguf: the file was changed while it was loaded") as caught:
        load(model, reporter=Reporter(model))
    assert not caught.value.configuration  # the next start compares the bytes


def test_another_state_than_was_asked_for_is_refused(model: Path) -> None:
    files = open_spec(model).files
    assert files is not None
    flip(model, model.stat().st_size - 1, 0)
    with pytest.raises(LoadError, match=r"m\.gguf: the file is not the one that the supervisor asked for"):
        load(model, files.identities)


# ---- drafters


DRAFT_SIZES = {"pages": 6, "max_context": 128, "max_sequences": 2, "prefill_chunk": 64}


def placed(folder: Path, model: Path, draft: dict[str, object], devices: list[str], **engine: object) -> Placement:
    spec = open_spec(model)
    path = Path(str(draft["path"])) if "path" in draft else None
    assert spec.files is not None
    files = spec.files if path is None else open_draft(draft_paths(path))
    drafter = read_draft_spec(files, spec, str(draft["kind"]))
    config = configure(folder, devices, [1] * len(devices), draft, **(DRAFT_SIZES | engine))
    config = replace(config, cache=CacheConfig(prefix_slots=2, states=str(draft.get("states", "device"))))  # type: ignore[arg-type]
    result = plan(spec, config, drafter=drafter)
    assert isinstance(result, Placement)
    return result


def loaded(placement: Placement, group: str, model: Path, drafter: Path) -> tuple[ModelRunner, Loaded]:
    files = LoadFiles([str(path) for path in draft_paths(drafter)])
    return run(load_message(placement, group, LoadFiles([str(model)]), 1, files))


def run(load: Load) -> tuple[ModelRunner, Loaded]:
    arenas = [Arena.create(arena) for arena in load.arenas]
    fds = [os.dup(fd) for fd in descriptors(arenas)]  # those of a daemon, which are its own
    for arena in arenas:
        arena.close()
    return ModelRunner.load(load, Backend.CPU, open_arenas(load.arenas, fds), Reporter())  # type: ignore[arg-type]


WHERE = (
    (["left:0", "right:0"], {}),
    (["left:0"], {}),
    (["left:0", "left:1"], {"device": "left:0"}),
    (["left:0", "right:0"], {"device": "left:0"}),
    (["left:0", "right:0"], {"device": "draft:0"}),
)

DRAFTERS = ((TARGET, UPSTREAM, "dflash"), (TARGET, DFLASH2, "dflash"), (MTP, MTP, "mtp"))


@combinations(dtype=["float32", "bfloat16"], where=range(len(WHERE)), drafter=range(len(DRAFTERS)))
def test_a_drafter_takes_the_memory_that_was_planned(tmp_path, drafter, where, dtype):
    (model, path, kind), (devices, draft) = DRAFTERS[drafter], WHERE[where]
    asked = {"kind": kind} | draft | ({} if model == path else {"path": str(path)})
    placement = placed(tmp_path, model, asked, devices, dtype=dtype)
    assert placement.draft is not None
    assert placement.draft_device is not None
    runner, answer = loaded(placement, placement.draft.group, model, path)
    assert answer.draft is not None
    assert answer.draft_problem == ""
    assert (answer.draft.layers, answer.draft.weight_bytes, answer.draft.state_bytes) == (
        placement.draft_device.layers,
        placement.draft_device.weight_bytes,
        placement.draft_device.state_bytes,
    )
    stages = placement.stages_of(placement.draft.group)
    assert [use.layers for use in answer.shards] == [shard.layers for stage in stages for shard in stage.shards]
    assert sorted(runner.stages) == [stage.index for stage in stages]


def broken(drafter: Path, how: str) -> None:
    if how == "gone":
        drafter.unlink()
    elif how == "cut":
        drafter.write_bytes(drafter.read_bytes()[:-1000])
    else:
        shutil.copyfile(TARGET, drafter)


@pytest.mark.parametrize("how", ["gone", "cut", "another"])
def test_the_output_stage_serves_without_a_drafter_that_cannot_be_loaded(tmp_path, how):
    drafter = Path(shutil.copy(UPSTREAM, tmp_path / "d.gguf"))
    placement = placed(tmp_path, TARGET, {"kind": "dflash", "path": str(drafter)}, ["left:0"], dtype="float32")
    broken(drafter, how)
    runner, answer = loaded(placement, "left", TARGET, drafter)
    assert answer.draft is None
    assert answer.draft_problem.startswith("the drafter cannot be loaded: ")
    assert "d.gguf" in answer.draft_problem
    operations = [OpenSequence(0, 0, SamplingParams(temperature=0.0)), SetPages(0, KvGroup.FULL, 0, [0])]
    output = runner.run_step(Step(1, 0, operations, [Slice(0, 0, [5, 6, 7], sample=True)]), 0, 0.0)
    assert len(output.result.sampled) == 1
    runner.reset()


@pytest.mark.parametrize("how", ["gone", "another"])
def test_a_daemon_that_is_there_for_the_drafter_fails_without_it(tmp_path, how):
    drafter = Path(shutil.copy(UPSTREAM, tmp_path / "d.gguf"))
    draft = {"kind": "dflash", "path": str(drafter), "device": "draft:0"}
    placement = placed(tmp_path, TARGET, draft, ["left:0"], dtype="float32")
    broken(drafter, how)
    with pytest.raises((GgufError, LoadError, OSError), match=r"d\.gguf|No such file"):
        loaded(placement, "draft", TARGET, drafter)


# ---- reading with several threads


@pytest.fixture
def gguf_files() -> GgufFiles:
    gguf_files = opened("qwen35").spec.files
    assert gguf_files is not None
    return gguf_files


@pytest.mark.parametrize("n_readers", [1, 3])
def test_several_threads_read_what_one_does(
    gguf_files: GgufFiles, n_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LEAST_SHARE_BYTES", 1000)
    chunks = []
    for tensor in [*gguf_files.tensors.values()][:12]:
        rows = reading.row_count(tensor)
        chunks.append(TensorChunk(tensor, rows // 3, rows, (0, tensor.shape[-1])))
    staging = StagingBuffers(gguf_files, torch.device("cpu"), n_readers)
    found = staging.load(chunks)
    for chunk, rows_read in zip(chunks, found, strict=True):
        tensor, row_bytes = chunk.tensor, rows_read.shape[1]
        raw = gguf_files.paths[tensor.part].read_bytes()
        start = tensor.offset + chunk.start * row_bytes
        assert rows_read.numpy().tobytes() == raw[start : start + chunk.n_bytes]
    staging.close()


def test_a_file_that_was_cut_is_reported_from_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEAST_SHARE_BYTES", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(Path(opened("qwen35").spec.files.paths[0]).read_bytes())  # type: ignore[union-attr]
    gguf_files = open_model([path])
    last = max(gguf_files.tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(path, last.offset + last.n_bytes - 8)
    staging = StagingBuffers(gguf_files, torch.device("cpu"), 2)
    with pytest.raises(LoadError, match="unexpected end of file"):
        staging.load([TensorChunk(last, 0, reading.row_count(last), (0, last.shape[-1]))])
    staging.close()


@pytest.mark.usefixtures("no_thread_begins")
def test_readers_that_find_no_memory_to_begin_end_the_load(
    gguf_files: GgufFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LEAST_SHARE_BYTES", 1000)
    largest = max(gguf_files.tensors.values(), key=lambda tensor: tensor.n_bytes)
    chunk = TensorChunk(largest, 0, reading.row_count(largest), (0, largest.shape[-1]))
    StagingBuffers(gguf_files, torch.device("cpu"), 1).load([chunk])  # needs none
    with pytest.raises(MemoryError, match="did not begin"):
        StagingBuffers(gguf_files, torch.device("cpu"), 2).load([chunk])


# ---- host memory while a model of half a gigabyte loads


ROOT = Path(__file__).parents[2]
CHILD = ROOT / "bench" / "load_child.py"
SMALL = 160 << 20
"""Read buffer, one chunk as float32 in several stages of conversion, and what the allocator keeps of it."""


def child(*words: object) -> dict[str, int]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), *map(str, words)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=110)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "bfloat16"), ("F32", "float32"), ("BF16", "bfloat16")])
def test_the_peak_beside_what_stays_is_below_the_largest_tensor_and_a_little(tmp_path, kind, dtype):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs: the kernel cannot set a peak back")
    made = child("make", tmp_path / "m.gguf", kind, 500)
    assert made["n_bytes"] > 400e6
    found = child("load", tmp_path / "m.gguf", "cpu", dtype)
    (tmp_path / "m.gguf").unlink()
    extra = found["peak_bytes"] - found["kept_bytes"]
    assert found["kept_bytes"] > 400e6
    assert -SMALL < extra < found["largest_bytes"] + SMALL, f"{extra / 1e6:.0f} MB"
