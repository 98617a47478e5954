"""Which files a group may load beside the running ones: those with the same bytes, whatever their times say."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lucevisor.deployment import weights as weight_digests
from lucevisor.deployment.weights import ModelWeights, WeightsChangedError, digest_tensors
from lucevisor.errors import LucevisorError
from lucevisor.model.families import open_spec
from lucevisor.model.fingerprint import fingerprint
from lucevisor.model.gguf_files import open_model, part_paths
from lucevisor.model.values import FileIdentity
from tests.model.test_fingerprint import write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return settled(write(tmp_path / "m.gguf", unused="blk.1.nextn.eh_proj.weight"))


def change(path: Path, how: str) -> None:
    """The file, or its times, as others may leave them."""
    if how == "touched":
        path.touch()
    elif how == "linked":
        os.link(path, path.with_name("link"))
    elif how == "copied over":
        os.replace(shutil.copy(path, path.with_name("copy")), path)
    elif how == "written alike":
        path.write_bytes(path.read_bytes())
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    else:
        assert how == "last byte"
        flip(path, path.stat().st_size - 1, 0)


def opened(path: Path) -> ModelWeights:
    return ModelWeights(open_model(part_paths(path)), path.parent / "cache")


@pytest.mark.parametrize("how", ["touched", "linked", "copied over", "written alike"])
async def test_other_times_of_the_same_bytes_need_the_digests(model: Path, how: str) -> None:
    weights = opened(model)
    await weights.wait_until_stable()
    change(model, how)
    with pytest.raises(WeightsChangedError, match="before all its bytes were hashed"):
        await weights.admit()
    weights = opened(model)
    await weights.digests()
    change(model, "touched")
    assert weights.admitted(await weights.admit())


async def test_another_header_is_refused(model: Path) -> None:
    weights = opened(model)
    await weights.digests()
    write(model.with_name("other.gguf"), metadata=[("general.name", "another")])
    os.replace(model.with_name("other.gguf"), model)
    with pytest.raises(WeightsChangedError, match="its header is another one"):
        await weights.admit()
    change(model, "removed")
    with pytest.raises(LucevisorError) as gone:
        await weights.admit()
    why = f"{model}: No such file or directory; put the file back, or start without it"
    assert str(gone.value) == f"the model cannot be read any more: {why}"


async def test_digests_are_free_the_second_time_and_not_of_another_state(model: Path) -> None:
    first = opened(model)
    await first.wait_until_stable()
    found = await first.digests()
    assert first.progress().startswith("100 %")
    second = opened(model)
    assert await second.digests() == found
    assert second.progress().startswith("0 %")  # nothing was read
    change(model, "last byte")  # puts the old mtime back
    third = opened(model)
    await third.wait_until_stable()
    assert await third.digests() != found
    assert third.progress().startswith("100 %")


# ---- digests of tensors


GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def mark_of(path: Path) -> str:
    spec = open_spec(path)
    assert spec.files is not None
    return fingerprint(spec, digest_tensors(spec.files))


def flip(path: Path, at: int, bit: int) -> None:
    """One bit, in place, with the file's times put back as far as a user can."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def settled(path: Path) -> Path:
    """The path, when a tick of the kernel's clock has passed: from then on every write moves the file's times."""
    time.sleep(0.05)
    return path


class Model:
    """A file to spoil, and the places of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, open_model(part_paths(path))
        self.tensors = sorted(self.files.tensors.values(), key=lambda t: t.name)
        self.mark = mark_of(path)

    def spoiled(self, tensor: int, share: float, bit: int) -> bool:
        """Whether the fingerprint tells a bit flipped at ``share`` of a tensor; the file is as before afterwards."""
        t = self.tensors[tensor % len(self.tensors)]
        part, at = self.files.paths[t.part], t.offset + min(int(share * t.n_bytes), t.n_bytes - 1)
        flip(part, at, bit)
        try:
            return mark_of(self.path) != self.mark
        finally:
            flip(part, at, bit)


@pytest.fixture(scope="module", params=["tied", "split", "experts", "unused"])
def spoiled_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """``tied``: without an output matrix; ``unused``: with a tensor that no shard loads."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "split":
        return Model(write(directory / "m.gguf", parts=8))
    if request.param == "unused":
        return Model(write(directory / "m.gguf", unused="blk.1.nextn.eh_proj.weight"))
    name = {"tied": "qwen3", "experts": "qwen35moe"}[request.param]
    return Model(Path(shutil.copy(GOLDEN / name / "model.gguf", directory / "m.gguf")))


@settings(max_examples=60, deadline=None)
@given(tensor=st.integers(0, 10_000), share=st.floats(0, 1), bit=st.integers(0, 7))
@example(tensor=0, share=0.0, bit=0)
@example(tensor=0, share=1.0, bit=7)
@example(tensor=1, share=0.25, bit=3)
def test_any_bit_of_any_tensor_is_another_fingerprint(
    spoiled_model: Model, tensor: int, share: float, bit: int
) -> None:
    assert spoiled_model.spoiled(tensor, share, bit)
    assert mark_of(spoiled_model.path) == spoiled_model.mark


@pytest.mark.parametrize("n_threads", [3])
@pytest.mark.parametrize(("block", "piece"), [(5000, 77), (4096, 4096), (3001, 10000)])
def test_borders_of_blocks_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_threads: int, block: int, piece: int
) -> None:
    """A digest is xxh3_128 over those of the blocks, however many threads read them and in which pieces."""
    monkeypatch.setattr(weight_digests, "BLOCK_BYTES", block)
    monkeypatch.setattr(weight_digests, "READ_BYTES", piece)
    files = open_spec(write(tmp_path / "m.gguf")).files
    found = digest_tensors(files, n_threads=n_threads)
    for name, tensor in files.tensors.items():
        data = files.read(tensor)
        blocks = (xxhash.xxh3_128_digest(data[i : i + block]) for i in range(0, len(data), block))
        assert found[name] == xxhash.xxh3_128_hexdigest(b"".join(blocks)), name


def test_a_file_that_changes_meanwhile_has_no_digests(tmp_path: Path) -> None:
    path = settled(write(tmp_path / "m.gguf"))
    files = open_spec(path).files
    flip(path, path.stat().st_size - 1, 0)
    with pytest.raises(WeightsChangedError, match=r"m\.gguf was changed"):
        digest_tensors(files)


# ---- what is kept


@settings(max_examples=150, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_damage_anywhere_is_never_believed(tmp_path_factory, share: float, bit: int) -> None:
    directory = tmp_path_factory.mktemp("cache")
    digests = {f"blk.{i}.w": f"{i:032x}" for i in range(3)}
    identities = (FileIdentity(1, 2, 3, 4, 5, "ab" * 32),)
    weight_digests.write_digests(directory, identities, digests)
    path = weight_digests.digests_path(directory, identities)
    flip(path, int(share * path.stat().st_size), bit)
    assert weight_digests.read_digests(directory, identities, digests) in (None, digests)
    os.truncate(path, int(share * path.stat().st_size))
    assert weight_digests.read_digests(directory, identities, digests) is None
