"""Quant blocks are packed to the bits of ``PackedWeights.write``, whatever their bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from daemons.ops.triton import repack
from daemons.ops.triton.repack import repack_kernel, write_packed
from daemons.weights.packed import PackedWeights, empty_packed
from lucevisor.model.quant_types import BY_NAME, row_bytes
from tests.kernels.matrices import DEVICE, KINDS, SHORT, of_kinds, on_gpu


@pytest.fixture(autouse=True, scope="module")
def rows_as_on_a_gpu():
    """Else the interpreter's one program would take all rows of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack, "INTERPRETED_ROWS", repack.ROWS)
        yield


def random_bytes(n_rows: int, n_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_rows + n_bytes)
    return torch.randint(0, 256, (n_rows, n_bytes), dtype=torch.uint8, generator=generator).to(DEVICE)


def blank(kind: str, n_rows: int, n_columns: int, n_matrices: int | None = None) -> PackedWeights:
    """Packed weights of ones, so that what should not be written shows."""
    packed = empty_packed(BY_NAME[kind], n_rows, n_columns, torch.device(DEVICE), n_matrices)
    packed.tiles.fill_(1)
    return packed


def check(packed: PackedWeights, first: int, raw: torch.Tensor) -> None:
    wanted = PackedWeights(packed.kind, packed.tiles.clone(), packed.n_rows)
    wanted.write(first, raw)
    write_packed(packed, first, raw)
    assert torch.equal(packed.tiles, wanted.tiles)


@of_kinds
@pytest.mark.parametrize(("first", "n"), [(0, 37), (5, 20), (31, 1)])
def test_any_rows_of_a_matrix(kind, first, n):
    type_ = BY_NAME[kind]
    check(blank(kind, 37, 768), first, random_bytes(n, row_bytes(type_, 768)))


@of_kinds
@pytest.mark.parametrize(("first", "n"), [(0, 60), (7, 50)])
def test_rows_of_several_matrices(kind, first, n):
    """Each ends within a tile."""
    type_ = BY_NAME[kind]
    check(blank(kind, 20, 256, 3), first, random_bytes(n, row_bytes(type_, 256)))


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("columns", [32, 352, 704])
def test_rows_that_end_within_a_chunk_are_zero_padded(kind, columns):
    check(blank(kind, 19, columns), 2, random_bytes(17, row_bytes(BY_NAME[kind], columns)))


@of_kinds
def test_rows_of_any_bytes_at_any_address(kind):
    """Neither whole blocks, nor a whole number of half words."""
    n_bytes = row_bytes(BY_NAME[kind], 512)
    for missing in (1, 6, 135):
        check(blank(kind, 18, 512), 1, random_bytes(17, n_bytes - missing))
    check(blank(kind, 18, 512), 1, random_bytes(1, 17 * n_bytes + 1).flatten()[1:].view(17, n_bytes))
    check(blank(kind, 18, 512), 1, random_bytes(17, 2 * n_bytes)[:, 2 : 2 + n_bytes])


@given(st.data())
def test_any_shape(data):
    kind = data.draw(st.sampled_from(KINDS))
    n_rows, n_matrices = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    first = data.draw(st.integers(0, n_rows * n_matrices - 1))
    n = data.draw(st.integers(1, n_rows * n_matrices - first))
    blocks = data.draw(st.integers(1, 10 if kind in SHORT else 2))
    columns = blocks * BY_NAME[kind].block_elements
    check(blank(kind, n_rows, columns, n_matrices), first, random_bytes(n, row_bytes(BY_NAME[kind], columns)))


@on_gpu
def test_batches_of_a_type_share_one_compilation():
    """Wherever they begin, and whatever their rows: compiling takes longer than many batches."""
    cache = repack_kernel.device_caches[torch.cuda.current_device()][0]
    check(blank("Q4_K", 64, 256), 0, random_bytes(16, 144))
    before = len(cache)
    for n_rows, n_columns, first, n in ((64, 256, 1, 1), (300, 512, 16, 256), (31, 4096, 3, 28), (1, 256, 0, 1)):
        check(blank("Q4_K", n_rows, n_columns), first, random_bytes(n, 144 * (n_columns // 256)))
    assert len(cache) == before


@on_gpu
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_more_than_four_gigabytes(kind):
    """Offsets do not fit 32 bits."""
    n_bytes = row_bytes(BY_NAME[kind], 16384)
    n_rows = (9 << 29) // n_bytes
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("less than 12 GiB of device memory are free")
    packed, raw = blank(kind, n_rows, 16384), torch.zeros(n_rows, n_bytes, dtype=torch.uint8, device=DEVICE)
    raw[-48:] = random_bytes(48, n_bytes)
    write_packed(packed, 0, raw)
    assert torch.equal(packed.blocks(torch.arange(n_rows - 40, n_rows, device=DEVICE), 16384), raw[-40:])
    assert not bool(packed.tiles[: n_rows // 16 - 4].any())
