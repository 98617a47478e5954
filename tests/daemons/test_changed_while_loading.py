"""A daemon says which state of the files it read, and reads no other than it was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from daemons.errors import LoadError
from daemons.runner import ModelRunner
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, FileIdentity, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Progress
from tests.deployment.test_weight_digests import GOLDEN, flip, settled


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
