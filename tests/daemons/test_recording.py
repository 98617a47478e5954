"""Recorded kernel calls: what is replayed, what is refused, and the memory that results lie in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.ops.basic import plain_rope
from daemons.ops.cpu.library import cpu_kernels
from daemons.ops.cpu.operations import CpuOperations
from daemons.ops.cpu.recording import RecordedMemory, UnrecordableError, record
from daemons.ops.paged import DensePages
from tests.daemons.cpu_kernels import needs_cpu_kernels

pytestmark = needs_cpu_kernels
CPU = torch.device("cpu")
WIDTH = 64


@pytest.fixture
def cpu():
    return CpuOperations(cpu_kernels())


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(1)
    with torch.inference_mode():
        yield


def layers(cpu, norm, x, n):
    """``n`` layers, each of which leaves as much behind as the one before."""
    for _ in range(n):
        x, normed = norm.fused_add(x, x)
        x = cpu.act_and_mul(cpu.concatenate([normed, x]), "silu")
    return x


def test_a_replay_follows_its_inputs(cpu):
    norm, x = cpu.norm(torch.rand(WIDTH), WIDTH, 1e-6), torch.zeros(3, WIDTH).bfloat16()
    recording, out = record(lambda: layers(cpu, norm, x, 4), RecordedMemory())
    assert len(recording) == 4 * 4
    for _ in range(3):
        x.copy_(torch.randn(3, WIDTH))
        recording.replay()
        assert torch.equal(out, layers(cpu, norm, x.clone(), 4))


def test_recording_computes_nothing(cpu):
    pages, rows = DensePages(torch.zeros(4, 64, 1, WIDTH).bfloat16()), torch.randn(2, 1, WIDTH).bfloat16()
    slots = torch.tensor([3, 200])
    recording, _ = record(lambda: cpu.write_pages(pages, pages, slots, rows, rows), RecordedMemory())
    assert not pages.pages.any()
    recording.replay()
    assert torch.equal(pages.slots[slots], rows)


def test_a_result_is_not_overwritten_while_somebody_holds_it(cpu):
    x, memory = torch.randn(2, WIDTH).bfloat16(), RecordedMemory()

    def work():
        kept = cpu.add(x, x)[:, :8]  # a view keeps the memory
        return kept, [cpu.add(x, x) for _ in range(3)]

    recording, (kept, others) = record(work, memory)
    recording.replay()
    assert len({t.data_ptr() for t in (kept, *others)}) == 4
    assert torch.equal(kept, (x + x)[:, :8])


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + x,
        lambda x: x.float(),
        lambda x: x.copy_(x),
        lambda x: x.t().contiguous(),
        lambda x: x.sum().item(),
        lambda x: torch.tensor([1.0]),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.zeros(3),
    ],
)
def test_what_is_no_kernel_is_refused_and_the_library_is_there_again(cpu, work):
    x, before = torch.randn(2, WIDTH).bfloat16(), cpu.kernels.calls
    held = x.clone()
    with pytest.raises(UnrecordableError, match="is not a kernel"):
        record(lambda: (cpu.add(x, x), work(x)), RecordedMemory())
    assert cpu.kernels.calls is before
    assert torch.equal(x, held)
    assert torch.equal(cpu.add(x, x), x + x)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40),
    half=st.integers(1, 40),
    start=st.integers(0, 1 << 20),
    magnitude=st.sampled_from([1.0, 1.25]),
)
def test_rope_tables(n, half, start, magnitude):
    rope = plain_rope(2 * half, 1e6, CPU)
    object.__setattr__(rope, "magnitude", magnitude)
    positions = torch.arange(start, start + n)
    for found, wanted in zip(
        CpuOperations(cpu_kernels()).rope_tables(rope, positions), rope.tables(positions), strict=True
    ):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=3e-7, atol=3e-7)
