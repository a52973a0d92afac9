"""torch.compile, fake tensors and opcheck: whole graphs, right shapes, and one graph for all lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

D = 16
ALL_GOOD = {
    "test_schema": "SUCCESS", "test_autograd_registration": "SUCCESS",
    "test_faketensor": "SUCCESS", "test_aot_dispatch_dynamic": "SUCCESS",
}  # fmt: skip


def inputs(b=2, hq=4, hkv=2, nq=5, nk=7, dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    shapes = ((b, hq, nq, D), (b, hkv, nk, D), (b, hkv, nk, D))
    return [torch.randn(*shape, generator=make).to(dtype) for shape in shapes]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.field("R103")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_opcheck(forward, dtype):
    q, k, v = inputs(dtype=dtype)
    view, lengths = q.transpose(1, 2).contiguous().transpose(1, 2), torch.tensor([3, 7])
    for args in (
        (q, k, v, lengths, 0.25, 1),
        (view, k, v, lengths.int(), 1.0, 2),
        (q, k[:, :, :0], v[:, :, :0], None, 0.25, 0),
    ):
        assert torch.library.opcheck(forward, args) == ALL_GOOD


@pytest.mark.field("R103")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_whole_graph(attn, forward, backend):
    q, k, v = inputs()
    lengths = torch.tensor([3, 7])

    def public(q, k, v, lengths):
        o, lse = attn.attention(q.sin(), k, v, causal=True, scale=0.3, key_lengths=lengths, return_lse=True)
        return o + 1, lse

    def direct(q, k, v, lengths):
        return forward(q.sin(), k, v, lengths, 0.3, 1)[0] + 1

    for f in (public, direct):
        got = torch.compile(f, fullgraph=True, backend=backend)(q, k, v, lengths)
        want = f(q, k, v, lengths)
        if backend == "inductor":  # its sin differs in the last bit
            want = torch.compile(torch.sin, backend=backend)(q)
            want = attn.attention(want, k, v, causal=True, scale=0.3, key_lengths=lengths) + 1
            got = got[0] if isinstance(got, tuple) else got
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.field("R103")
def test_a_first_call_inside_compile_builds_without_a_graph_break(packages, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path / "cache"))
    attn = packages.imported(packages.emitted(tmp_path, "attn_cold_compile"))
    q, k, v = inputs()
    o = torch.compile(lambda q, k, v: attn.attention(q, k, v) * 2, fullgraph=True, backend="aot_eager")(q, k, v)
    assert capfd.readouterr().err.count("attn_cold_compile: building for cpu") == 1
    assert torch.equal(o, attn.attention(q, k, v) * 2)


@pytest.mark.field("R103")
def test_fake_outputs_have_the_shape_type_and_strides_of_real_ones(attn):
    q, k, v = inputs(dtype=torch.bfloat16)
    for a in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        real = attn.attention(a, k, v, return_lse=True)
        with FakeTensorMode() as mode:
            fake = attn.attention(*(mode.from_tensor(x) for x in (a, k, v)), return_lse=True)
        meta = attn.attention(*(x.to("meta") for x in (a, k, v)), return_lse=True)
        for other in (fake, meta):
            facts = [(x.shape, x.dtype, x.stride()) for x in other]
            assert facts == [(x.shape, x.dtype, x.stride()) for x in real]


def test_one_graph_serves_all_lengths(attn):
    compiled = torch.compile(lambda q, k, v: attn.attention(q, k, v, causal=True), fullgraph=True, dynamic=True,
                             backend="aot_eager")  # fmt: skip
    for nq, nk in [(5, 7), (9, 33), (64, 3), (17, 19)]:
        q, k, v = inputs(nq=nq, nk=nk)
        assert torch.equal(compiled(q, k, v), attn.attention(q, k, v, causal=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_bad_scale_is_refused_under_compile(attn):
    q, k, v = inputs()
    compiled = torch.compile(lambda q, k, v: attn.attention(q, k, v, scale=-1.0), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"scale must be a number from .* got -1"):
        compiled(q, k, v)


def test_export(attn):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attn.attention(q, k, v, causal=True)

    q, k, v = inputs()
    program = torch.export.export(Module(), (q, k, v))
    assert torch.equal(program.module()(q, k, v), attn.attention(q, k, v, causal=True))


@pytest.mark.field("R093")
def test_sizes_and_options_of_any_integer_type_build_once(attn, cache):
    before = sorted(cache.rglob("*.so"))
    for n in range(1, 101):
        size = [np.int64(n % 9 + 1), torch.tensor(n % 9 + 1), n % 9 + 1][n % 3]
        x = torch.zeros(1, 2, int(size), D)[:, :, :size]
        scale = [np.float32(0.25), torch.tensor(0.25), 0.25, 1][n % 4]
        attn.attention(x, x, x, scale=scale, causal=np.bool_(n % 2))
    after = sorted(cache.rglob("*.so"))
    assert not before or after == before
    assert len([so for so in after if attn.op.NAMESPACE in str(so)]) == 1


@pytest.mark.field("R121")
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_floating_inputs_as_sdpa_does(attn, compiled):
    """To its dtype, whatever mixture of float32 and 16-bit they are; float64 stays. Gradients are the inputs' own."""
    torch._dynamo.reset()
    call = torch.compile(attn.attention, fullgraph=True) if compiled else attn.attention
    q, k, v = inputs()
    for dtype in (torch.bfloat16, torch.float16):
        want = attn.attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True)
        with torch.autocast("cpu", dtype=dtype):
            leaves = [q.clone().requires_grad_(), k.clone().requires_grad_(), v.to(dtype).requires_grad_()]
            got = call(*leaves, causal=True)
            assert torch.equal(got, want) and got.dtype == dtype
            assert torch.nn.functional.scaled_dot_product_attention(q, q, q.to(dtype)).dtype == dtype
            assert call(q.double(), k.double(), v.double()).dtype == torch.float64
            with torch.autocast("cpu", enabled=False):
                assert call(q, k, v).dtype == torch.float32
        assert [g.dtype for g in torch.autograd.grad(got.sum(), leaves)] == [torch.float32, torch.float32, dtype]


def test_autocast_says_when_no_kernel_takes_its_dtype(packages, tmp_path):
    attn = packages.imported(packages.emitted(tmp_path, "attn_narrow", dtypes=("float32", "bf16")))
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ValueError) as caught:
        attn.attention(q, k, v)
    assert str(caught.value) == (
        "autocast casts q, k and v to float16, which no cpu kernel of this package takes; it has float32, bfloat16: "
        "turn autocast off around the call"
    )


def test_autocast_says_what_it_leaves_as_it_is(attn):
    q, k, v = inputs()
    want = r"got q float64, k bfloat16, v bfloat16 \(autocast leaves float64 as it is: cast them\)"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=want):
        attn.attention(q.double(), k, v)
