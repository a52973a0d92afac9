"""How the op behaves on a GPU: the same bits every time, in graphs, on streams, under torch.compile, on any layout."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.gpu

D = 64
DTYPES = [torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def inputs(b=2, hq=8, hkv=4, nq=300, nk=400, dtype=torch.bfloat16, seed=0, d=D):
    return [random(b, h, n, d, dtype=dtype, seed=seed + i) for i, (h, n) in enumerate([(hq, nq), (hkv, nk), (hkv, nk)])]


def equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def same_as_contiguous(attn, q, k, v, **options):
    got = attn.attention(q, k, v, return_lse=True, **options)
    want = attn.attention(*(t.contiguous().clone() for t in (q, k, v)), return_lse=True, **options)
    return equal(got, want) and not got[0].isnan().any()


@pytest.mark.field("R007", "R106")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_runs_give_the_same_bits(attn, dtype):
    """Each run finds NaN in the memory of its outputs, and the leavings of NaN inputs in fast memory."""
    q, k, v = inputs(dtype=dtype)
    lengths = torch.tensor([400, 217], device="cuda")
    words = {"causal": True, "key_lengths": lengths, "return_lse": True}
    first = attn.attention(q, k, v, **words)
    assert not any(x.isnan().any() for x in first)
    dirt = [torch.full_like(x, math.nan) for x in (q, k, v)]
    met = 0
    for _ in range(1000):
        attn.attention(*dirt)
        poisoned = [torch.full_like(x, math.nan) for x in first]
        places = {x.data_ptr() for x in poisoned}
        del poisoned
        again = attn.attention(q, k, v, **words)
        met += len(places & {x.data_ptr() for x in again})
        assert equal(again, first)
    assert met > 1000  # the allocator did hand the poisoned memory out


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_a_captured_graph_replays_on_new_inputs(attn, kind):
    q, k, v = inputs()
    lengths = torch.tensor([400, 100], device="cuda", dtype=kind)
    attn.attention(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        attn.attention(q, k, v, key_lengths=lengths)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = attn.attention(q, k, v, causal=True, key_lengths=lengths, return_lse=True)
    for seed in range(3):
        for x, new in zip((q, k, v), inputs(seed=10 * seed + 1), strict=True):
            x.copy_(new)
        lengths.copy_(torch.tensor([37 * seed, 399], dtype=kind))
        for x in out:
            x.fill_(math.nan)
        graph.replay()
        assert equal(out, attn.attention(q, k, v, causal=True, key_lengths=lengths, return_lse=True))


def test_the_callers_stream_is_used(attn):
    """The inputs get their values late on a side stream: a kernel on another stream would see NaN."""
    values = inputs()
    want = attn.attention(*values, return_lse=True)
    late = [torch.full_like(x, math.nan) for x in values]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for x, value in zip(late, values, strict=True):
            x.copy_(value)
        got = attn.attention(*late, return_lse=True)
    side.synchronize()
    assert equal(got, want)


@pytest.mark.field("R103")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_a_whole_graph(attn, backend):
    torch._dynamo.reset()
    q, k, v = inputs()
    lengths = torch.tensor([400, 100], device="cuda")

    def f(q, k, v, lengths):
        return attn.attention(q * 2, k, v, causal=True, key_lengths=lengths, return_lse=True)

    compiled = torch.compile(f, fullgraph=True, backend=backend)
    assert equal(compiled(q, k, v, lengths), f(q, k, v, lengths))


@pytest.mark.field("R103")
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(attn, dtype):
    op = getattr(torch.ops, attn.op.NAMESPACE).forward.default
    q, k, v = inputs(nq=9, nk=20, dtype=dtype)
    for lengths, causal in ((None, 0), (torch.tensor([3, 20], device="cuda"), 1)):
        found = torch.library.opcheck(op, (q, k, v, lengths, 0.25, causal))
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.field("R122")
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("causal", [False, True])
def test_a_length_out_of_range_gives_nan_rows_and_no_other(attn, kind, causal):
    nk = 130
    far = 2**40 if kind == torch.int64 else 2**31 - 1
    lengths = torch.tensor([-1, nk + 1, far, -far, nk, 0, 7], device="cuda", dtype=kind)
    q, k, v = inputs(b=7, nq=129, nk=nk)
    o, lse = attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
    assert o[:4].isnan().all() and lse[:4].isnan().all()
    assert not o[4:].isnan().any() and not lse[4:].isnan().any()
    good = attn.attention(q[4:], k[4:], v[4:], causal=causal, key_lengths=lengths[4:], return_lse=True)
    assert equal((o[4:], lse[4:]), good)


@pytest.mark.field("R006")
def test_keys_beyond_the_length_have_no_influence(attn):
    lengths = torch.tensor([1, 130, 0, 77], device="cuda")
    q, k, v = inputs(b=4, nq=70, nk=131)
    want = attn.attention(q, k, v, key_lengths=lengths, return_lse=True)
    for i, n in enumerate(lengths.tolist()):
        k[i, :, n:] = v[i, :, n:] = math.nan
    assert equal(attn.attention(q, k, v, key_lengths=lengths, return_lse=True), want)


@pytest.mark.field("R043", "R048")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_view_equals_its_contiguous_copy(attn, attn_of, dtype):
    q, k, v = (random(2, 256, 4, D, dtype=dtype, seed=s).transpose(1, 2) for s in range(3))
    assert not q.is_contiguous() and same_as_contiguous(attn, q, k, v, causal=True)
    assert same_as_contiguous(attn, *(t.permute(1, 0, 2, 3) for t in (q, k, v)))
    q, k, v = (random(2, 4, 256, 256, dtype=dtype, seed=s).transpose(1, 2) for s in range(3))
    assert same_as_contiguous(attn_of("widest"), q, k, v)


@pytest.mark.field("R044")
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_row_strides_and_unaligned_pointers(attn, dtype):
    wide = [random(1, 65, 4, D + 1, dtype=dtype, seed=s).transpose(1, 2) for s in range(3)]
    assert wide[0].stride(2) % 8 != 0 and same_as_contiguous(attn, *(t[..., :D] for t in wide), causal=True)
    assert same_as_contiguous(attn, *(t[..., 1:] for t in wide))
    for offset in range(1, 9):
        flat = [random(2 * 3 * 65 * D + offset, dtype=dtype, seed=s) for s in range(3)]
        shifted = [t.as_strided((2, 3, 65, D), (3 * 65 * D, 65 * D, D, 1), offset) for t in flat]
        assert same_as_contiguous(attn, *shifted)
    rows = [random(2, 3, 65, D + 4, dtype=dtype, seed=s)[..., :D] for s in range(3)]  # 8 bytes off in every other row
    assert same_as_contiguous(attn, *rows)


@pytest.mark.field("R045", "R046", "R047")
def test_expanded_and_transposed_inputs(attn):
    q, k, v = inputs(b=1, hkv=1, nq=70, nk=90)
    assert same_as_contiguous(attn, q, k.expand(1, 8, 90, D), v.expand(1, 8, 90, D))
    assert torch.equal(attn.attention(q, k.expand(1, 8, 90, D), v.expand(1, 8, 90, D)), attn.attention(q, k, v))
    assert same_as_contiguous(attn, q.expand(3, 8, 70, D), k.expand(3, 1, 90, D), v.expand(3, 1, 90, D))
    assert same_as_contiguous(attn, *(random(1, 2, D, 70, seed=s).transpose(-1, -2) for s in range(3)))
    one = [random(1, 1, 1, D, seed=s).as_strided((1, 1, 1, D), (3, 5, 7, 1)) for s in range(3)]
    assert torch.equal(attn.attention(*one), one[2])


@pytest.mark.field("R014")
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_and_masked_tiles_agree_bit_for_bit(attn, dtype):
    """With equally many rows and keys the last row sees every key, as it does without a mask."""
    q, k, v = inputs(nq=512, nk=512, dtype=dtype)
    full, causal = (attn.attention(q, k, v, causal=c, return_lse=True) for c in (False, True))
    assert all(torch.equal(a[:, :, -1], b[:, :, -1]) for a, b in zip(full, causal, strict=True))
    top = attn.attention(q, k, v, causal="top_left", return_lse=True)
    assert equal(top, causal)
    prefix = attn.attention(q[:, :, :300], k[:, :, :300], v[:, :, :300], causal=True, return_lse=True)
    assert all(torch.equal(a[:, :, :300], b) for a, b in zip(causal, prefix, strict=True))


@pytest.mark.field("R033", "R078")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_item_does_not_depend_on_its_batch(attn, dtype):
    q, k, v = inputs(b=5, dtype=dtype)
    o, lse = attn.attention(q, k, v, causal=True, return_lse=True)
    for i in range(5):
        alone = attn.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=True, return_lse=True)
        assert equal((o[i : i + 1], lse[i : i + 1]), alone)
    row = attn.attention(q[:, :, -1:], k, v, causal=True, return_lse=True)
    assert equal((o[:, :, -1:], lse[:, :, -1:]), row)


@pytest.mark.field("R056", "R057", "R058")
@pytest.mark.parametrize("b, hq, hkv, nq, nk", [(0, 2, 1, 3, 4), (2, 0, 0, 3, 4), (2, 2, 2, 0, 4), (1, 2, 1, 130, 0)])
def test_empty_problems(attn, b, hq, hkv, nq, nk):
    q, k, v = (torch.ones(b, h, n, D, dtype=torch.bfloat16, device="cuda") for h, n in ((hq, nq), (hkv, nk), (hkv, nk)))
    for causal in (False, True, "top_left"):
        o, lse = attn.attention(q, k, v, causal=causal, return_lse=True)
        assert o.shape == (b, hq, nq, D) and not o.any() and torch.isneginf(lse).all()


def test_what_a_gpu_cannot_do_is_refused(attn):
    q, k, v = inputs(nq=5, nk=5)
    with pytest.raises(ValueError, match="no cuda kernel for float32; it has bfloat16, float16"):
        attn.attention(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="one device"):
        attn.attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="key_lengths must be on cuda"):
        attn.attention(q, k, v, key_lengths=torch.tensor([1, 2]))


@pytest.mark.field("R109")
def test_the_device_of_the_tensors_decides(attn):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = inputs()
    want = attn.attention(q, k, v)
    assert torch.cuda.current_device() == 0
    got = attn.attention(*(t.to("cuda:1") for t in (q, k, v)))
    assert got.device.index == 1 and torch.equal(got.cpu(), want.cpu())


@pytest.mark.field("R025")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_never_lost_silently_whatever_the_logit(attn, dtype):
    """Beyond the domain of the bound the only key's weight can underflow, or overflow: that must never look like "no
    key", and no wrong number may come out."""
    v = random(1, 1, 1, D, dtype=dtype, seed=3)
    lost = 0
    for exponent in range(15 if dtype == torch.float16 else 61):
        q = torch.full_like(v, 1.5 * 2.0**exponent)
        for key in (q, -q):
            o, lse = attn.attention(q, key, v, return_lse=True)
            whole = bool(o.isfinite().all() and (o != 0).all())
            assert (whole or not o.isfinite().any()) and lse.item() != -math.inf, exponent
            assert whole or exponent > 10  # base-2 logits below 2^27 are inside the domain
            lost += not whole
    assert lost
