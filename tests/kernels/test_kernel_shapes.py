"""Shapes and layouts from the field reports, at their sizes, on every path of emitted packages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.running import DTYPES, draw, each_isa, judged, problem, run, same_bits

dtypes = pytest.mark.parametrize("dtype", DTYPES)
two_dtypes = pytest.mark.parametrize("dtype", ["float32", "bf16"])


@pytest.mark.field("R064")
@pytest.mark.parametrize("hq, hkv", [(8, 2), (6, 3), (4, 4)])
@two_dtypes
@pytest.mark.parametrize("package", ["d64_dv128", "d128_dv64"])
def test_query_heads_share_keys_by_group_when_widths_differ(package, dtype, hq, hkv, request):
    attn = request.getfixturevalue(package)
    judged(attn, problem(attn, dtype, 2, hq, hkv, 9, 37, causal="bottom_right"))


@pytest.mark.field("R018")
@two_dtypes
@pytest.mark.parametrize("b", range(1, 13))
def test_masks_hold_for_every_batch_size_when_widths_differ(d192_dv128, dtype, b):
    """The report has a mask of its own; lengths and a diagonal are what these kernels take. LSE is judged too."""
    lengths = tuple((7 * i + 5 * b) % 55 for i in range(b))
    causal = ("none", "bottom_right", "top_left")[b % 3]
    judged(d192_dv128, problem(d192_dv128, dtype, b, 4, 4, 37, 54, causal=causal, key_lengths=lengths))


@pytest.mark.field("R060")
@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp16"])
def test_one_query_for_each_of_32_heads(d128_dv64, dtype):
    judged(d128_dv64, problem(d128_dv64, dtype, 4, 32, 32, 1, 20))


@pytest.mark.field("R061", "R105", "R127")
@dtypes
def test_lengths_beside_the_edges_of_tiles(small, dtype):
    """Br = 32, Bc = 96: one to three tiles, one row or key less or more, and the lengths of the reports."""
    for nq, nk in ((1, 95), (1, 96), (1, 97), (1, 193), (1, 257), (31, 96), (33, 95), (64, 97), (96, 1), (97, 191),
                   (63, 63), (65, 65), (100, 100)):  # fmt: skip
        judged(small, problem(small, dtype, 1, 2, 1, nq, nk, causal="bottom_right" if nq % 2 else "none"))


@pytest.mark.field("R053")
@two_dtypes
def test_sequences_without_keys_among_others(d64_dv128, dtype):
    """9 query heads, 3 key heads, one query each, key lengths 0, 3, 0, 5."""
    results = judged(d64_dv128, problem(d64_dv128, dtype, 4, 9, 3, 1, 5, key_lengths=(0, 3, 0, 5)))
    for o, lse in results.values():
        assert (o[::2] == 0).all() and (lse[::2] == float("-inf")).all() and (lse[1::2] > float("-inf")).all()


@pytest.mark.field("R056", "R057", "R058")
@dtypes
@pytest.mark.parametrize("shape", [(2, 0, 4096), (0, 5, 4096), (2, 5, 0), (0, 0, 0)], ids=str)
def test_empty_problems_on_every_path(small, dtype, shape):
    b, nq, nk = shape
    q, k, v = draw(dtype, (b, 4, nq, 16), (b, 2, nk, 16), (b, 2, nk, 16))
    for _ in each_isa(small, dtype):
        for causal in (False, "bottom_right", "top_left"):
            o, lse = run(small, q, k, v, causal=causal)
            assert o.shape == q.shape and lse.shape == q.shape[:3]
            assert not o.any() and torch.isneginf(lse).all()


def _same_as_contiguous(attn, q, k, v, **options):
    return same_bits(run(attn, q, k, v, **options), run(attn, *(x.contiguous().clone() for x in (q, k, v)), **options))


@pytest.mark.field("R043", "R048")
@dtypes
def test_transposed_views_have_the_bits_of_copies(small, dtype):
    """(B, N, H, d).transpose(1, 2) of the report, and the dimensions in any other order."""
    q, k, v = (x.transpose(1, 2) for x in draw(dtype, *[(2, 256, 4, 16)] * 3))
    for _ in each_isa(small, dtype):
        assert _same_as_contiguous(small, q, k, v, causal=True)
        assert _same_as_contiguous(small, *(x.permute(1, 0, 2, 3) for x in (q, k, v)))
        assert _same_as_contiguous(small, q, k.contiguous(), v)


@pytest.mark.field("R044")
@two_dtypes
def test_row_stride_65_and_a_pointer_one_element_off(d64_dv128, dtype):
    """The report's (1, 65, 4, 64) as a slice of width 65, and a storage offset of one."""
    wide_q, wide_k, wide_v = draw(dtype, (1, 65, 4, 65), (1, 65, 4, 65), (1, 65, 4, 129))
    q, k, v = (x[..., :-1].transpose(1, 2) for x in (wide_q, wide_k, wide_v))
    moved = [
        torch.cat([x.new_zeros(1), x.contiguous().flatten()]).as_strided(x.shape, x.contiguous().stride(), 1)
        for x in (q, k, v)
    ]
    for _ in each_isa(d64_dv128, dtype):
        assert _same_as_contiguous(d64_dv128, q, k, v)
        assert _same_as_contiguous(d64_dv128, *(x[..., 1:].transpose(1, 2) for x in (wide_q, wide_k, wide_v)))
        assert same_bits(run(d64_dv128, *moved), run(d64_dv128, q, k, v))


@pytest.mark.field("R045")
@two_dtypes
def test_keys_expanded_over_heads_then_dense_ones(d64_dv128, dtype):
    """(1, 129, 1, 64) expanded to 4 heads, then a dense call: no state of the first reaches the second."""
    q, k, v = draw(dtype, (1, 4, 129, 64), (1, 1, 129, 64), (1, 1, 129, 128))
    dense = draw(dtype, (1, 4, 129, 64), (1, 4, 129, 128), seed=1)
    for _ in each_isa(d64_dv128, dtype):
        want = run(d64_dv128, q, *(x.clone() for x in dense))
        assert _same_as_contiguous(d64_dv128, q, *(x.expand(1, 4, *x.shape[2:]) for x in (k, v)))
        assert same_bits(run(d64_dv128, q, *dense), want)


@pytest.mark.field("R046", "R047")
@dtypes
def test_the_last_stride_and_strides_of_size_one_dimensions(small, dtype):
    columns = [x.transpose(-1, -2) for x in draw(dtype, *[(1, 2, 16, 40)] * 3)]
    assert columns[0].stride(-1) != 1
    single = [x.as_strided(x.shape, (3, 3, 3, 1)) for x in draw(dtype, *[(1, 1, 1, 16)] * 3)]
    for _ in each_isa(small, dtype):
        assert _same_as_contiguous(small, *columns, causal=True)
        assert torch.equal(run(small, *single)[0], single[2])


@pytest.mark.field("R039")
@dtypes
def test_one_tensor_as_query_key_and_value(small, dtype):
    """The report's 1024 rows; the bits of three copies."""
    (x,) = draw(dtype, (2, 8, 1024, 16))
    for _ in each_isa(small, dtype):
        assert same_bits(run(small, x, x, x), run(small, x, x.clone(), x.clone()))
