"""Sizes beyond 31, 32 and 16 bits through an emitted package, in memory of which hardly a page is ever touched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.running import draw, each_isa, judged, problem, run, same_bits, sparse
from verify import compare, devices, judge
from verify.cases import Case

two_dtypes = pytest.mark.parametrize("dtype", ["float32", "bf16"])


def _spread(values: torch.Tensor, dtype: str, strides: tuple[int, ...]) -> torch.Tensor:
    """`values` in memory of its own, with these strides."""
    home = sparse(dtype, sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1)
    view = home.as_strided(values.shape, strides)
    view.copy_(values)
    return view


@pytest.mark.field("R073")
@two_dtypes
def test_a_large_batch_of_padded_rows(small, dtype):
    """(1600, 16, 729, 72) with rows padded to 128 and 1024 of them per head: 3.4e9 elements; first and last head."""
    strides = (16 * 1024 * 128, 15 * 1024 * 128, 128, 1)
    small_tensors = draw(dtype, (1600, 2, 2, 16), (1600, 2, 3, 16), (1600, 2, 3, 16))
    large = [_spread(x, dtype, strides) for x in small_tensors]
    assert large[0].stride(0) * 1599 > 2**31
    for _ in each_isa(small, dtype):
        assert same_bits(run(small, *large, causal=True), run(small, *small_tensors, causal=True))


@pytest.mark.field("R077")
@pytest.mark.parametrize("batch", [511, 512, 513])
@two_dtypes
def test_both_sides_of_two_to_the_31_elements(small, dtype, batch):
    """512 tokens x batch, 32 heads of width 256: 2^31 elements at batch 512. Last token, first and last head."""
    strides = (512 * 32 * 256, 31 * 256, 32 * 256, 1)
    small_tensors = draw(dtype, (batch, 2, 1, 16), (batch, 2, 2, 16), (batch, 2, 2, 16))
    large = [_spread(x, dtype, strides) for x in small_tensors]
    for _ in each_isa(small, dtype):
        assert same_bits(run(small, *large), run(small, *small_tensors))


@pytest.mark.field("R077")
@two_dtypes
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_strides_beyond_32_bits(small, dtype, dim):
    small_tensors = draw(dtype, *[(2, 2, 2, 16)] * 3)
    strides = [64, 32, 16, 1]
    strides[dim] = 2**32 + 64
    large = [_spread(x, dtype, tuple(strides)) for x in small_tensors]
    for _ in each_isa(small, dtype):
        assert same_bits(run(small, *large), run(small, *small_tensors))


@pytest.mark.field("R075", "R076", "R106", "R126")
@pytest.mark.parametrize(
    "b, h, n", [(65536, 1, 16), (1, 65536, 10), (80000, 1, 16)], ids=["batches", "heads", "sequences"]
)
@two_dtypes
def test_more_than_65535_of_a_thing(small, dtype, b, h, n):
    """Each item has the bits that it has in a small call, and no output keeps a NaN that it began with."""
    tensors = draw(dtype, *[(b, h, n, 16)] * 3)
    largest = max(b, h)
    dim = 0 if b > h else 1
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        for isa in each_isa(small, dtype):
            if largest == 80000 and isa not in (small.isas(dtype)[0], "baseline"):
                continue
            o, lse = run(small, *tensors, causal=True)
            assert torch.isfinite(o).all() and torch.isfinite(lse).all()
            for start in (0, 32767, 65534, largest - 2):
                part = tuple(x.narrow(dim, start, 2).contiguous() for x in tensors)
                assert same_bits(run(small, *part, causal=True), tuple(x.narrow(dim, start, 2) for x in (o, lse)))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.field("R075")
@two_dtypes
def test_more_than_65535_row_tiles(small, dtype):
    """Br = 32: 65537 tiles of rows. One key, so every row of O is V and every LSE its own score."""
    nq = 65536 * 32 + 5
    q, k, v = draw(dtype, (1, 1, 64, 16), (1, 1, 1, 16), (1, 1, 1, 16))
    q = q.repeat(1, 1, -(-nq // 64), 1)[:, :, :nq]
    for _ in each_isa(small, dtype):
        o, lse = run(small, q, k, v)
        assert torch.equal(o, v.expand_as(o))
        few = run(small, q[:, :, :64], k, v)[1].flatten()
        assert torch.equal(lse.flatten(), few.repeat(-(-nq // 64))[:nq])


@pytest.mark.field("R070")
@two_dtypes
def test_the_last_rows_of_65537(small, dtype):
    """Row offsets i * Nk pass 2^32. The last rows agree with the oracle and with a call of only them, bit for bit."""
    n, last = 65537, 3
    q, k, v = draw(dtype, *[(1, 1, n, 16)] * 3)
    tail = Case(
        name="last rows", family="gaussian", dtype=dtype, scale=0.25, causal="bottom_right",
        **{name: x.double().numpy() for name, x in zip("qkv", (q[:, :, -last:], k, v), strict=True)},
    )  # fmt: skip
    alone = judged(small, tail)
    truth = judge.Truth(tail, with_balls=False)
    device = devices.Cpu()
    path = device.paths(small, dtype, tail)[0]  # the fastest: all rows, all keys
    with devices.forced_isa(path.isa):
        o, lse = (x.double().numpy() for x in run(small, q, k, v, causal=True))
    bound, want = truth.bound(0, path), truth.float64[0]
    compare.assert_within(o[0, 0, -last:], want.o, bound.o, want_error=want.o_err)
    compare.assert_within(lse[0, 0, -last:], want.lse, bound.lse, want_error=want.lse_err)
    assert (o[..., -last:, :] == alone[path.isa][0]).all() and (lse[..., -last:] == alone[path.isa][1]).all()
    first, length = slice(n - 65, n), torch.tensor([50])  # every path: all rows, the first keys
    for _ in each_isa(small, dtype):
        whole = run(small, q, k, v, causal=True, key_lengths=length)
        part = run(small, q[:, :, first], k, v, causal=True, key_lengths=length)
        assert same_bits(tuple(x[:, :, first] for x in whole), part)


@pytest.mark.field("R078")
@two_dtypes
def test_many_keys_in_a_batch_and_alone(d64_dv128, dtype):
    """The report's 350000 keys, with 12 of its 500 queries: one of three batch entries alone, bit for bit."""
    q, k, v = draw(dtype, (3, 1, 12, 64), (3, 1, 350_000, 64), (1, 1, 350_000, 128))
    v = v.expand(3, 1, 350_000, 128)
    for _ in each_isa(d64_dv128, dtype):
        whole = run(d64_dv128, q, k, v)
        assert same_bits(run(d64_dv128, q[1:2], k[1:2], v[1:2]), tuple(x[1:2] for x in whole))


@pytest.mark.field("R034")
@pytest.mark.parametrize("gain", [1.0, 32.0, 64.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_wide_logits_with_a_lagged_maximum(d128_dv64, dtype, gain):
    """The report's d = 128 and 8192 keys, keys times 32 and 64. The AMX kernels let the maximum lag; the others
    rescale whenever it rises, and both are within their bound of the same truth."""
    case = problem(d128_dv64, dtype, 1, 1, 1, 20, 8192, gain=gain)
    for o, lse in judged(d128_dv64, case).values():
        assert (abs(o) < 1e3).all() and (abs(lse) < 1e5).all()
