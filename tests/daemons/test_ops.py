"""Operations against plain float64 arithmetic written out position by position."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.kv.slice_group import GraphKey
from daemons.models.blocks import HostAttention
from daemons.ops.attention import Causal, attention, reference, visible
from daemons.ops.basic import RmsNorm, act_and_mul, plain_rope, rotate
from daemons.ops.delta_rule import chunked, convolve, step
from daemons.ops.linear import (
    Bfloat16CpuLinear,
    DenseLinear,
    Float32CpuLinear,
    Int4CpuLinear,
    Int8CpuLinear,
)
from daemons.ops.partial_attention import merged, partial_attention
from daemons.ops.selection import has_packed_bfloat16
from lucevisor.model.spec import LayerSpec, ModelSpec, attention_state
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import OpenSequence, PageOut, SamplingParams, SetPages, Slice
from tests.numerics import BFLOAT16, Narrow, bound, narrow_error, product_error


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(1)


# ---- basic


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_causal_attention_is_that_of_its_mask(softcap, window):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, heads, 16, generator=generator) for n, heads in ((5, 4), (9, 2), (9, 2)))
    positions = torch.arange(9)[None]
    mask = visible(positions[:, 4:], positions, window)
    found, wanted = (attention(q, k, v, m, scale=0.25, softcap=softcap) for m in (Causal(window), mask))
    assert torch.equal(found, wanted)
    assert not mask[0, 0, 0, 5]
    assert mask[0, 0, -1].sum() == (window or 9)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_rms_norm(rows):
    x, w = torch.randn(rows, 96) * 3, torch.randn(96)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    norm, plain = RmsNorm(w, 96, 1e-6), RmsNorm(None, 96, 1e-6, torch.device("cpu"))
    allowed = bound(norm, x)
    assert allowed.worst(norm(x), wanted) <= 1
    assert allowed.worst(plain(x) * w, wanted) <= 1
    half = norm(x.bfloat16())
    assert half.dtype == torch.bfloat16


def test_rope_turns_pairs_half_a_rotary_part_apart():
    rope = plain_rope(8, 10000.0, torch.device("cpu"))
    x = torch.randn(3, 2, 12)
    positions = torch.tensor([0, 5, 1000])
    cos, sin = rope.tables(positions)
    found = rotate(x.clone(), cos, sin)
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[..., 8:], x[..., 8:])
    wanted = x.double()
    for t, p in enumerate(positions.tolist()):
        for j in range(4):
            a = p * 10000.0 ** (-2 * j / 8)
            u, v = x[t, :, j].double(), x[t, :, j + 4].double()
            wanted[t, :, j] = u * math.cos(a) - v * math.sin(a)
            wanted[t, :, j + 4] = v * math.cos(a) + u * math.sin(a)
    assert bound(lambda x: rotate(x, *rope.tables(positions)), x).worst(found, wanted) <= 1


def test_gated_takes_the_gate_first():
    x = torch.randn(3, 10)
    gate, up = x.double().chunk(2, dim=1)
    for name, wanted in (("silu", F.silu(gate)), ("gelu_tanh", F.gelu(gate, approximate="tanh"))):
        assert bound(lambda x, name=name: act_and_mul(x, name), x).worst(act_and_mul(x, name), wanted * up) <= 1
    x = 8 * x
    gate, up = x.double().chunk(2, dim=1)
    gate = gate.clamp(max=7.0)
    wanted = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)
    assert bound(lambda x: act_and_mul(x, "swiglu_oai"), x).worst(act_and_mul(x, "swiglu_oai"), wanted) <= 1
    with pytest.raises(ValueError, match="relu"):
        act_and_mul(x, "relu")


# ---- linear


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 33])
@pytest.mark.parametrize(("n", "k"), [(64, 96), (48, 33), (7, 16), (6, 32)])
def test_float32_products_of_any_row_count(rows, n, k):
    w, x = torch.randn(n, k), torch.randn(rows, 2 * k)[:, :k]
    wanted = x.double() @ w.double().t()
    for product in (DenseLinear(w), Float32CpuLinear(w)):
        found = product(x)
        assert found.shape == (rows, n)
        assert found.is_contiguous()
        assert bool(((found - wanted).abs() <= product_error(x, w)).all())


@pytest.mark.skipif(not has_packed_bfloat16(), reason="oneDNN multiplies no bfloat16 on this processor")
@pytest.mark.parametrize("rows", [1, 20])
def test_packed_bfloat16(rows):
    w, x = torch.randn(48, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    wanted = x.double() @ w.double().t()
    difference = (Bfloat16CpuLinear(w)(x).double() - wanted).abs()
    assert bool((difference <= BFLOAT16 * wanted.abs() + 2 * product_error(x, w)).all())


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_int8_and_int4_products_multiply_what_they_hold(rows):
    """Results are rounded to bfloat16, on some processors what is multiplied is too."""

    def assert_near(found, w):
        difference, allowed = found.double() - x.double() @ w.t(), narrow_error(x, w, Narrow(BFLOAT16))
        assert float(difference.norm()) <= float(allowed.norm())

    x = torch.randn(rows, 64).bfloat16()
    codes, scale = torch.randint(-127, 128, (80, 64), dtype=torch.int8), torch.rand(80).bfloat16()
    assert_near(Int8CpuLinear(codes, scale)(x), codes.double() * scale.double().unsqueeze(1))
    q, affine = torch.randint(0, 16, (80, 64), dtype=torch.int32), torch.randn(2, 80, 2).bfloat16()
    a = affine.permute(1, 0, 2).double().unsqueeze(2)  # [N, groups, 1, 2]
    w = ((q.view(80, 2, 32).double() - 8) * a[..., 0] + a[..., 1]).view(80, 64)
    found = Int4CpuLinear(torch._convert_weight_to_int4pack_for_cpu(q, 1), affine)(x)
    assert_near(found, w)


# ---- attention


def plain_attention(q, k, v, queries, keys, window, scale, softcap):
    """One query row after the other, float64."""
    b, n, h, _ = q.shape
    out = torch.zeros(b, n, h, v.shape[-1], dtype=torch.float64)
    group = h // k.shape[2]
    for i in range(b):
        for t in range(n):
            distance = queries[i, t] - keys[i]
            seen = (distance >= 0) & ((distance < window) if window else torch.tensor(True))
            for head in range(h):
                scores = (k[i, :, head // group].double() @ q[i, t, head].double()) * scale
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                p = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=0)
                out[i, t, head] = p @ v[i, :, head // group].double()
    return out


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    past=st.integers(0, 9),
    window=st.sampled_from([0, 1, 4]),
    softcap=st.sampled_from([0.0, 5.0]),
)
def test_attention_against_single_rows(shape, past, window, softcap):
    b, n, kv_heads, group = shape
    length = past + n
    q, k = torch.randn(b, n, kv_heads * group, 8), torch.randn(b, length, kv_heads, 8)
    v = torch.randn(b, length, kv_heads, 6)
    queries = torch.arange(past, length).expand(b, -1)
    keys = torch.arange(length).expand(b, -1)
    mask = visible(queries, keys, window)
    wanted = plain_attention(q, k, v, queries, keys, window, 0.3, softcap)
    allowed = bound(lambda q, k, v: reference(q, k, v, mask, scale=0.3, softcap=softcap), q, k, v)
    for function in (attention, reference):
        found = function(q, k, v, mask, scale=0.3, softcap=softcap)
        assert allowed.worst(found, wanted) <= 1


# ---- delta rule


def plain_delta_rule(s, q, k, v, g, beta):
    """The recurrence of the paper in float64; one token, one head at a time."""
    b, n, heads, _ = q.shape
    s, out = s.double().clone(), torch.zeros(b, n, heads, v.shape[-1], dtype=torch.float64)
    for i in range(b):
        for h in range(heads):
            for t in range(n):
                kt, qt = k[i, t, h].double(), q[i, t, h].double()
                s[i, h] *= g[i, t, h].double().exp()
                s[i, h] += torch.outer(kt, beta[i, t, h].double() * (v[i, t, h].double() - kt @ s[i, h]))
                out[i, t, h] = qt @ s[i, h]
    return out, s


def rule_inputs(b, n, heads, dk, dv, seed):
    torch.manual_seed(seed)
    q, k = (F.normalize(torch.randn(b, n, heads, dk), dim=-1) for _ in range(2))
    v, g = torch.randn(b, n, heads, dv), -F.softplus(torch.randn(b, n, heads) * 2)
    return torch.randn(b, heads, dk, dv), q * dk**-0.5, k, v, g, torch.rand(b, n, heads)


def assert_chunks(inputs, offset, wanted, after):
    def rule(s, q, k, v, g, beta):
        out, state = chunked(s, q, k, v, (g, beta), offset)
        return torch.cat((out.flatten(0, 2), state.flatten(0, 2)))

    allowed = bound(rule, *inputs)
    assert allowed.worst(rule(*inputs), torch.cat((wanted.flatten(0, 2), after.flatten(0, 2)))) <= 1


@settings(max_examples=20, deadline=None)
@given(
    b=st.integers(1, 2),
    heads=st.integers(1, 3),
    n=st.integers(1, 150),
    offset=st.integers(0, 63),
    seed=st.integers(0, 99),
)
def test_chunks_are_the_recurrence(b, heads, n, offset, seed):
    s, q, k, v, g, beta = rule_inputs(b, n, heads, 8, 6, seed)
    wanted, after = plain_delta_rule(s, q, k, v, g, beta)
    assert_chunks((s, q, k, v, g, beta), offset, wanted, after)


def test_chunks_survive_strong_decay_and_equal_keys():
    """Decays whose inverse overflows, and one key repeated: the system to solve is as full as it gets."""
    s, q, k, v, g, beta = rule_inputs(1, 100, 2, 8, 8, 0)
    k[:], beta[:] = k[:, :1].clone(), 0.9
    g[:, ::3] = -60.0
    wanted, after = plain_delta_rule(s, q, k, v, g, beta)
    assert_chunks((s, q, k, v, g, beta), 17, wanted, after)


def test_steps_are_the_recurrence_and_work_in_place():
    s, q, k, v, g, beta = rule_inputs(3, 5, 4, 8, 6, 1)
    wanted, after = plain_delta_rule(s, q, k, v, g, beta)

    def rule(s, q, k, v, g, beta):
        at = [slice(t, t + 1) for t in range(5)]
        out = [step(s, torch.stack((q[:, t], k[:, t]), dim=2), v[:, t], g[:, t].exp(), beta[:, t]) for t in at]
        return torch.cat((torch.cat(out, dim=1).flatten(0, 2), s.flatten(0, 2)))

    allowed = bound(rule, s, q, k, v, g, beta)
    assert allowed.worst(rule(s, q, k, v, g, beta), torch.cat((wanted.flatten(0, 2), after.flatten(0, 2)))) <= 1


@pytest.mark.parametrize("n", [1, 2, 9])
def test_convolution_is_torchs_depth_wise_one(n):
    inputs, left, conv_weight = torch.randn(2, n, 6), torch.randn(2, 3, 6), torch.randn(4, 6)
    found, window = convolve(inputs, left, conv_weight)
    wanted = F.conv1d(
        torch.cat((left, inputs), dim=1).transpose(1, 2), conv_weight.t().unsqueeze(1), groups=6
    ).transpose(1, 2)
    assert bound(lambda inputs: convolve(inputs, left, conv_weight)[0], inputs).worst(found, wanted) <= 1
    assert torch.equal(window[:, -3:], torch.cat((left, inputs), dim=1)[:, -3:])


# ---- attention over host memory in place


LAYERS = (LayerSpec(0, KvGroup.FULL, {}, attention_state(2, 32, 32)),)
SPEC = ModelSpec("test", "test", "F32", 16, 100, 4096, LAYERS, {}, {}, 0, None)
SIZES = PoolSizes(40, 0, 0, host_pages=30)
CPU = torch.device("cpu")


def opened(kv_dtype: Dtype, *, in_place: bool) -> tuple[Pools, Sequences]:
    """Three sequences: one with pages out among those that stay, one with all of them, one with most of them out."""
    torch.manual_seed(1)
    pools = Pools(SPEC, LayerRange(0, 1), CPU, kv_dtype, SIZES)
    slots = torch.arange(SIZES.full_pages * 64)
    for name in "kv":
        pools.paged(0, name).write(slots, torch.randn(len(slots), 2, 32))
    sequences = Sequences([pools], SIZES, 4, attend_host=True, in_place=in_place)
    operations = [OpenSequence(i, 0, SamplingParams()) for i in range(3)]
    operations += [SetPages(i, KvGroup.FULL, 0, list(range(12 * i, 12 * i + 10))) for i in range(3)]
    operations += [PageOut(0, [1, 2, 5], [50, 47, 61]), PageOut(2, list(range(1, 8)), list(range(63, 70)))]
    operations += [PageOut(0, [7], [41])]
    for operation in operations:
        sequences.apply(operation)
    return pools, sequences


@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.Q8_0])
@pytest.mark.parametrize("n", [1, 3])
def test_host_memory_is_read_in_place(n: int, kv_dtype: Dtype) -> None:
    pytest.importorskip("triton")
    from daemons.ops.triton_operations import TritonOperations

    q = torch.randn(3, n, 8, 32)
    slices = [Slice(i, 10 * 64 - 9 * (i + 1), [1] * n, True) for i in range(3)]
    fused = TritonOperations().partial_attention(scale=0.2, softcap=0.0)
    found = []
    for in_place in (True, False):
        pools, sequences = opened(kv_dtype, in_place=in_place)
        sequences.flush()
        layout = Layout(slices, sequences, SPEC)
        assert layout.reads_in_place == in_place
        assert layout.graph_key == (GraphKey(3, n, 1024, 512) if in_place else None)
        [group] = Batch(layout, sequences.tables(CPU), layout.on(CPU)).groups
        pages = pools.paged(0, "k"), pools.paged(0, "v")
        found.append(HostAttention(*pages, fused if in_place else None, 0.2, 0.0, None)(group, q))
    assert float((found[0] - found[1]).abs().max()) <= 1e-5


# ---- parts of attention


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.sampled_from([0.0, 3.0]),
    st.floats(0.05, 30.0),
)
def test_parts_merge_to_the_whole(lengths, n, heads, softcap, scale) -> None:
    n_heads, n_kv_heads = heads
    length = sum(lengths) + n
    q, k, v = random(2, n, n_heads, 8), random(2, length, n_kv_heads, 8), random(2, length, n_kv_heads, 5)
    mask = visible(torch.arange(length - n, length)[None], torch.arange(length)[None], 0).expand(2, -1, -1, -1)
    how = {"scale": scale, "softcap": softcap}
    whole = partial_attention(q, k[:, -n:], v[:, -n:], mask[..., -n:], **how)
    start, parts = 0, []
    for size in lengths:
        parts.append(partial_attention(q, k[:, start : start + size], v[:, start : start + size], None, **how))
        start += size
    together = merged(
        torch.stack([whole.values, *(p.values for p in parts)]), torch.stack([whole.sums, *(p.sums for p in parts)])
    )
    for part in parts:
        whole.add(part)
    expected = reference(q, k, v, mask, **how)
    most = 4 + scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()  # of a score, whose rounding a weight multiplies
    allowed = torch.finfo(torch.float32).eps * float(most * v.abs().max())
    for found in (whole, together):
        torch.testing.assert_close(found.values, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(("n", "causal"), [(1, True), (3, True), (40, False)])
def test_the_kernel_puts_out_parts(n: int, causal: bool) -> None:
    pytest.importorskip("triton")
    from daemons.ops.operations import PagedQuery
    from daemons.ops.paged import DensePages
    from daemons.ops.triton_operations import TritonOperations

    k, v = random(4, 64, 2, 16), random(4, 64, 2, 16).roll(1, 0)
    q, length = random(1, n, 4, 16), 256
    attend = TritonOperations().partial_attention(scale=0.25, softcap=0.0)
    assert attend is not None
    tables = torch.arange(4, dtype=torch.int32).unsqueeze(0)
    starts = torch.tensor([length - n])
    where = PagedQuery(tables, torch.zeros(1, dtype=torch.int64), starts, n, length)
    found = attend(q.flatten(0, 1), DensePages(k), DensePages(v), where, causal)
    mask = visible(torch.arange(length - n, length)[None], torch.arange(length)[None], 0) if causal else None
    wanted = partial_attention(q, k.flatten(0, 1)[None], v.flatten(0, 1)[None], mask, scale=0.25)
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.sums, wanted.sums, rtol=1e-5, atol=1e-5)
