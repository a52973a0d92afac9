"""The op on awkward shapes, strides and pointers: the bits of contiguous copies, the right keys for each row."""

from __future__ import annotations

import math

import pytest
import torch

D = 16


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_as_contiguous(attn, q, k, v, **options):
    got = attn.attention(q, k, v, return_lse=True, **options)
    want = attn.attention(*(t.contiguous().clone() for t in (q, k, v)), return_lse=True, **options)
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_each_row_sees_exactly_its_keys(attn, dtype, causal):
    """All scores equal and V one-hot: O is 1 / (number of visible keys) at the visible keys, 0 elsewhere."""
    for nq, nk in [(1, 8), (2, 6), (5, 2), (4, 4), (7, 16), (16, 7)]:
        lengths = torch.tensor([nk, nk // 2, 0])
        v = torch.eye(nk, D, dtype=dtype).expand(3, 2, nk, D)
        q, k = torch.zeros(3, 4, nq, D, dtype=dtype), torch.ones(3, 2, nk, D, dtype=dtype)
        o, lse = attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
        i, j = torch.arange(nq)[:, None], torch.arange(nk)
        limit = {False: nk + 0 * i, "bottom_right": i + nk - nq + 1, "top_left": i + 1}[causal]
        for b, length in enumerate(lengths.tolist()):
            visible = (j < limit) & (j < length)
            count = visible.sum(-1, keepdim=True)
            want = torch.where(visible, 1.0 / count.double(), 0.0).to(dtype)
            assert torch.equal(o[b], torch.nn.functional.pad(want, (0, D - nk)).expand(4, -1, -1))
            logs = [math.log(n) if n else -math.inf for n in count.flatten().tolist()]
            assert torch.equal(lse[b], torch.tensor(logs, dtype=torch.float64).to(lse.dtype).expand(4, -1))


@pytest.mark.field("R012")
def test_bottom_right_and_top_left_are_named(attn):
    q, k, v = torch.zeros(1, 1, 2, D), torch.zeros(1, 1, 6, D), torch.eye(6, D)[None, None]
    seen = {causal: (attn.attention(q, k, v, causal=causal) > 0).sum(-1).flatten().tolist()
            for causal in (False, True, "bottom_right", "top_left")}  # fmt: skip
    assert seen == {False: [6, 6], True: [5, 6], "bottom_right": [5, 6], "top_left": [1, 2]}


@pytest.mark.field("R043", "R048")
def test_a_transposed_view_equals_its_contiguous_copy(attn):
    q, k, v = (random(2, 33, 4, D, seed=s).transpose(1, 2) for s in range(3))
    assert not q.is_contiguous()
    assert same_as_contiguous(attn, q, k, v, causal=True)
    assert same_as_contiguous(attn, q.permute(1, 0, 2, 3), k.permute(1, 0, 2, 3), v.permute(1, 0, 2, 3))


@pytest.mark.field("R044")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_row_strides_and_unaligned_pointers(attn, dtype):
    wide = random(2, 3, 9, D + 1, dtype=dtype)
    flat = random(2 * 3 * 9 * D + 1, dtype=dtype, seed=1)
    shifted = flat.as_strided((2, 3, 9, D), (3 * 9 * D, 9 * D, D, 1), storage_offset=1)
    assert same_as_contiguous(attn, wide[..., :D], shifted, wide[..., 1:])


@pytest.mark.field("R045")
def test_heads_expanded_with_stride_zero(attn):
    q, k, v = random(1, 4, 5, D), random(1, 1, 9, D, seed=1), random(1, 1, 9, D, seed=2)
    assert same_as_contiguous(attn, q, k.expand(1, 4, 9, D), v.expand(1, 4, 9, D))
    assert torch.equal(attn.attention(q, k.expand(1, 4, 9, D), v.expand(1, 4, 9, D)), attn.attention(q, k, v))
    assert same_as_contiguous(attn, q.expand(3, 4, 5, D), k.expand(3, 1, 9, D), v.expand(3, 1, 9, D))


@pytest.mark.field("R046")
def test_a_last_stride_other_than_one_is_copied(attn):
    q, k, v = (random(1, 2, D, 7, seed=s).transpose(-1, -2) for s in range(3))
    assert q.stride(-1) != 1
    assert same_as_contiguous(attn, q, k, v)
    assert same_as_contiguous(attn, q, k[..., :1, :].expand(1, 2, 7, D), v.flip(-1))


@pytest.mark.field("R047")
def test_strides_of_size_one_dimensions_are_ignored(attn):
    def odd(t):
        strides = [3 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        return t.as_strided(t.shape, strides)

    q, k, v = (odd(random(1, 1, 1, D, seed=s)) for s in range(3))
    assert q.stride()[:3] == (3, 3, 3)
    assert torch.equal(attn.attention(q, k, v), v)


@pytest.mark.field("R039")
def test_one_tensor_may_be_q_k_and_v(attn):
    x = random(2, 4, 13, D)
    assert torch.equal(attn.attention(x, x, x), attn.attention(x, x.clone(), x.clone()))


@pytest.mark.field("R056", "R057", "R058")
@pytest.mark.parametrize("b, hq, hkv, nq, nk", [(0, 2, 1, 3, 4), (2, 0, 0, 3, 4), (2, 0, 3, 3, 4), (2, 2, 2, 0, 4),
                                                (0, 0, 0, 2, 0), (1, 2, 1, 3, 0), (0, 1, 1, 7, 0)])  # fmt: skip
def test_empty_problems(attn, b, hq, hkv, nq, nk):
    q, k, v = torch.ones(b, hq, nq, D), torch.ones(b, hkv, nk, D), torch.ones(b, hkv, nk, D)
    for causal in (False, True, "top_left"):
        for lengths in (None, torch.zeros(b, dtype=torch.int64)):
            o, lse = attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
            assert o.shape == (b, hq, nq, D) and lse.shape == (b, hq, nq)
            assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.field("R006")
def test_keys_beyond_the_length_are_never_read(attn):
    lengths = torch.tensor([1, 3, 0])
    q, k, v = random(3, 2, 4, D), random(3, 2, 6, D, seed=1), random(3, 2, 6, D, seed=2)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    for dtype in (torch.int32, torch.int64):
        strided = lengths.to(dtype).repeat_interleave(2)[::2]
        o = attn.attention(q, k, v, key_lengths=strided)
        for b, length in enumerate(lengths.tolist()):
            one, keys = slice(b, b + 1), slice(length)
            assert torch.equal(o[one], attn.attention(q[one], k[one, :, keys], v[one, :, keys]))


@pytest.mark.field("R127")
@pytest.mark.parametrize("n", [1, 63, 65, 100])
def test_any_length(attn, n):
    """One visible key per row: O is V, bit for bit."""
    v = random(1, 2, n, D)
    k = torch.zeros(1, 2, n, D)
    assert torch.equal(attn.attention(k[:, :, :1], k, v, causal="top_left"), v[:, :, :1])


def test_outputs_are_contiguous_and_typed(attn):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = random(2, 9, 4, D, dtype=dtype).transpose(1, 2)
        o, lse = attn.attention(x, x, x, return_lse=True)
        assert o.dtype == dtype and o.is_contiguous()
        assert lse.dtype == (dtype if dtype == torch.float64 else torch.float32) and lse.is_contiguous()


def test_threads_share_the_work(attn):
    """A problem above the size that one thread takes alone: the same bits with any number of threads."""
    x = random(2, 4, 64, D)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(attn.attention(x, x, x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_default_scale_is_one_over_sqrt_d(attn):
    x = random(1, 1, 5, D)
    assert torch.equal(attn.attention(x, x, x), attn.attention(x, x, x, scale=0.25))
    assert not torch.equal(attn.attention(x, x, x), attn.attention(x, x, x, scale=0.5))


def backward_of(attn, q, k, v, o, lse, dout, dlse, causal=0):
    op = getattr(torch.ops, attn.op.NAMESPACE).backward
    return op(dout, dlse, q, k, v, o, lse, None, 0.25, causal, [True, True, True], False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_backward_op_takes_any_strides_of_every_tensor(attn, dtype):
    """The bits of contiguous copies, for dO with any last stride, with stride 0, and for a strided LSE."""
    q, k, v = (random(2, h, n, D, dtype=dtype, seed=h * n) for h, n in ((4, 5), (2, 7), (2, 7)))
    o, lse = attn.attention(q, k, v, scale=0.25, causal=True, return_lse=True)
    dout, dlse = random(2, 4, 5, D, dtype=dtype, seed=3), random(2, 4, 5, seed=4).to(lse.dtype)
    want = backward_of(attn, q, k, v, o, lse, dout, dlse, causal=1)

    def scattered(x):
        wide = torch.full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 1), torch.nan, dtype=x.dtype)
        wide[:, :, ::2, 1:] = x
        return wide[:, :, ::2, 1:]

    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, o)]
    turned = [x.mT.contiguous().mT for x in (lse, dout, dlse)]
    for changed in (
        backward_of(attn, *heads_last, *turned, causal=1),
        backward_of(attn, *map(scattered, (q, k, v, o)), lse, scattered(dout), dlse, causal=1),
    ):
        assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(want, changed, strict=True))
    for few in (dout[:1, :1, :1, :1], dout[:, :, :1], dout[..., :1]):
        spread = few.expand(dout.shape)
        got = backward_of(attn, q, k, v, o, lse, spread, None, causal=1)
        again = backward_of(attn, q, k, v, o, lse, spread.contiguous(), torch.zeros_like(lse), causal=1)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.field("R056", "R057", "R058")
@pytest.mark.parametrize("b, hq, hkv, nq, nk", [(0, 2, 1, 3, 4), (2, 0, 0, 3, 4), (2, 0, 3, 3, 4), (2, 2, 2, 0, 4),
                                                (0, 0, 0, 2, 0), (1, 2, 1, 3, 0), (0, 1, 1, 7, 0)])  # fmt: skip
def test_gradients_of_empty_problems_are_zero(attn, b, hq, hkv, nq, nk):
    leaves = [torch.ones(b, h, n, D, requires_grad=True) for h, n in ((hq, nq), (hkv, nk), (hkv, nk))]
    got = torch.autograd.grad(attn.attention(*leaves).sum(), leaves)
    assert [g.shape for g in got] == [x.shape for x in leaves] and not any(g.any() for g in got)


def test_threads_share_the_work_of_the_gradients(attn):
    x = random(2, 4, 64, D)
    o, lse = attn.attention(x, x, x, scale=0.25, return_lse=True)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(backward_of(attn, x, x, x, o, lse, o, lse))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
