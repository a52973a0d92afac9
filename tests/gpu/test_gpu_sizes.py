"""Sizes at which others overflowed: 2^16 blocks in a grid dimension, 2^31 elements, 2^32 bytes between two rows.

Inputs repeat with a prime period, so that an offset which wraps at a power of two meets other values. Every element is
compared, bit for bit, with a small problem; small problems are judged by their bound elsewhere.
"""

from __future__ import annotations

import math

import pytest
import torch

from verify import judge
from verify.cases import Case

pytestmark = pytest.mark.gpu

PERIOD = 61
D16, D64, D72, D80, D256 = (
    "smallest rows of d=16, Br=32, Bc=16", "fast tile at d=64", "d=72, one warp", "d=80", "widest",
)  # fmt: skip


def room(gigabytes: float) -> None:
    """Skip the test on a card without that much memory free."""
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes:.0f} GiB of free GPU memory")


def random(*shape, seed=0):
    made = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=made, device="cuda", dtype=torch.bfloat16)


def repeated(x, dim, count):
    """`x` over and over along `dim`, up to `count` entries."""
    return x.index_select(dim, torch.arange(count, device="cuda") % x.shape[dim])


def check_repeats(attn, small, dim, count, **options):
    """Attention over inputs that repeat along `dim` (batch or heads) repeats likewise."""
    want = attn.attention(*small, return_lse=True, **options)
    got = attn.attention(*(repeated(x, dim, count) for x in small), return_lse=True, **options)
    for a, b in zip(got, want, strict=True):
        assert a.shape[dim] == count and not a.isnan().any()
        assert torch.equal(a, repeated(b, dim, count))


@pytest.mark.field("R075", "R076")
def test_65536_batches(attn_of):
    room(4)
    check_repeats(attn_of(D80), [random(PERIOD, 1, 16, 80, seed=s) for s in range(3)], 0, 65536)


@pytest.mark.field("R075", "R076")
def test_65536_heads(attn_of):
    room(2)
    check_repeats(attn_of(D16), [random(1, PERIOD, 10, 16, seed=s) for s in range(3)], 1, 65536, causal=True)


@pytest.mark.field("R075")
def test_80000_sequences(attn_of):
    room(2)
    check_repeats(attn_of(D16), [random(PERIOD, 1, 16, 16, seed=s) for s in range(3)], 0, 80000, causal=True)


@pytest.mark.field("R075")
def test_more_than_65535_row_tiles(attn_of):
    room(2)
    rows = 65536 * 32 + 1
    q, k, v = random(1, 1, PERIOD, 16), random(1, 1, 7, 16, seed=1), random(1, 1, 7, 16, seed=2)
    attn = attn_of(D16)
    want = attn.attention(q, k, v, return_lse=True)
    got = attn.attention(repeated(q, 2, rows), k, v, return_lse=True)
    assert all(torch.equal(a, repeated(b, 2, rows)) for a, b in zip(got, want, strict=True))


@pytest.mark.field("R073")
def test_a_large_batch_of_many_heads(attn_of):
    """1.34e9 elements per tensor, stored (B,N,H,d)."""
    room(28)
    small = [random(PERIOD, 729, 16, 72, seed=s).transpose(1, 2) for s in range(3)]
    attn = attn_of(D72)
    want = attn.attention(*small, return_lse=True)
    large = [repeated(x.transpose(1, 2), 0, 1600).transpose(1, 2) for x in small]
    assert large[0].stride() == (729 * 16 * 72, 72, 16 * 72, 1)
    for a, b in zip(attn.attention(*large, return_lse=True), want, strict=True):
        for start in range(0, 1600, PERIOD):
            assert torch.equal(a[start : start + PERIOD], b[: min(PERIOD, 1600 - start)])


@pytest.mark.field("R077")
def test_element_counts_on_both_sides_of_two_to_31(attn_of):
    room(36)
    attn = attn_of(D256)
    small = [random(PERIOD, 32, 512, 256, seed=s) for s in range(3)]
    want = attn.attention(*small, return_lse=True)
    large = [repeated(x, 0, 513) for x in small]
    for n in (511, 512, 513):
        got = attn.attention(*(x[:n] for x in large), return_lse=True)
        assert (got[0].numel() > 2**31) == (n > 512)
        for a, b in zip(got, want, strict=True):
            for start in range(0, n, PERIOD):
                assert torch.equal(a[start : start + PERIOD], b[: min(PERIOD, n - start)])


@pytest.mark.field("R077")
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_strides_beyond_four_gigabytes(attn_of, which, dim):
    """The last batch, head or row lies 2^32 elements and more behind the first; all between is NaN."""
    room(12)
    shape = [2, 2, 33, 64]
    small = [random(*shape, seed=s) for s in range(3)]
    stride = 2**32 // (shape[dim] - 1) + 8
    strides = [33 * 64 * 2, 33 * 64, 64, 1]
    strides[dim] = stride - stride % 8
    home = torch.full((2**32 + 2**20,), math.nan, dtype=torch.bfloat16, device="cuda")
    far = home.as_strided(shape, strides)
    far.copy_(small[which])
    args = list(small)
    args[which] = far
    attn = attn_of(D64)
    for causal in (False, True):
        got, want = (attn.attention(*x, causal=causal, return_lse=True) for x in (args, small))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.field("R070")
def test_rows_beyond_two_to_32_scores(attn_of, cuda):
    n, rows = 65537, 24
    attn = attn_of(D16)
    q, k, v = (random(1, 1, n, 16, seed=s) for s in range(3))
    o, lse = attn.attention(q, k, v, causal=True, return_lse=True)
    wide = [x.double().cpu().numpy() for x in (q[:, :, -rows:], k, v, o[:, :, -rows:], lse[:, :, -rows:])]
    last = Case(name="the last rows", family="gaussian", dtype="bf16", q=wide[0], k=wide[1], v=wide[2], scale=0.25,
                causal="bottom_right")  # fmt: skip
    (path,) = cuda.paths(attn, "bf16", last)
    truth = judge.Truth(last, with_balls=False)
    (verdict,) = judge.hear(last, [(path, wide[3], wide[4])], truth=truth, spec=False, rows=2, device="cuda")
    assert verdict.holds, verdict.message()
    first = attn.attention(q[:, :, :4096], k[:, :, :4096], v[:, :, :4096], causal=True, return_lse=True)
    assert torch.equal(o[:, :, :4096], first[0]) and torch.equal(lse[:, :, :4096], first[1])


@pytest.mark.field("R078")
def test_500_queries_against_350000_keys(attn_of):
    room(40)
    q, k, v = (random(32, 12, n, 64, seed=s) for s, n in enumerate((500, 350000, 350000)))
    attn = attn_of(D64)
    o, lse = attn.attention(q, k, v, return_lse=True)
    assert not o.isnan().any()
    for i in (0, 17, 31):
        alone = attn.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], return_lse=True)
        assert torch.equal(o[i : i + 1], alone[0]) and torch.equal(lse[i : i + 1], alone[1])


@pytest.mark.field("R076")
def test_a_problem_that_no_launch_can_take_raises_and_the_next_call_works(attn_of):
    room(48)
    attn = attn_of("narrowest")
    x = random(1, 1, 5, 8)
    want = attn.attention(x, x, x)
    with pytest.raises(RuntimeError, match="the attention kernel was not launched"):
        attn.attention(x[:, :, :1].expand(1, 1, 2**31, 8), x, x)
    assert torch.equal(attn.attention(x, x, x), want)
