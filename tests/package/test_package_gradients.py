"""The gradients of a package: right by finite differences, and the same however they are asked for.

The kernels are those of packages.py: a second derivative and forward mode, which no kernel has, raise one sentence.
tests/package/test_autograd_*.py ask for more, of the real CPU kernels.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.autograd import forward_ad, gradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

D = 16
SECOND = "attn_test has no second derivative: its gradients are not differentiable"
FORWARD = "attn_test has no jvp (forward-mode derivative): an input has a tangent"


def inputs(dtype=torch.float32, b=2, hq=4, hkv=2, nq=5, nk=7):
    shapes = (b, hq, nq, D), (b, hkv, nk, D), (b, hkv, nk, D)
    return [torch.randn(s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes)]


def calls(attn, forward):
    """The public function and the op, as functions of (q, k, v) that return (o, lse)."""
    return {
        "attention": functools.partial(attn.attention, scale=0.25, causal=True, return_lse=True),
        "torch.ops": lambda q, k, v: forward(q, k, v, None, 0.25, 1),
    }


def gradients(call, q, k, v, wanted=(True, True, True)):
    """Of sum(o^2) + sum(lse^2) by the wanted inputs."""
    leaves = [x.detach().clone().requires_grad_(w) for x, w in zip((q, k, v), wanted, strict=True)]
    return torch.autograd.grad(loss(call(*leaves)), [x for x in leaves if x.requires_grad])


def loss(results):
    return sum(x.double().square().sum() for x in results)


def same(got, want):
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def refused(call, sentence):
    with pytest.raises(NotImplementedError) as caught:
        call()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("hq, hkv, nq, nk", [(2, 2, 3, 4), (4, 2, 4, 2), (2, 1, 1, 5)])
def test_finite_differences(attn, causal, hq, hkv, nq, nk):
    """In rows that see no key the LSE is -inf, so only O is compared there."""
    q, k, v = (x.requires_grad_() for x in inputs(torch.float64, 2, hq, hkv, nq, nk))
    lengths = torch.tensor([nk, nk - 1])

    def call(q, k, v):
        o, lse = attn.attention(q, k, v, causal=causal, key_lengths=lengths, return_lse=True)
        return o, torch.where(lse.isneginf(), 0.0, lse)

    assert gradcheck(call, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_have_the_dtype_and_the_shape_of_the_inputs(attn, forward, dtype):
    q, k, v = inputs(dtype)
    want = gradients(calls(attn, forward)["torch.ops"], q, k, v)
    assert [(g.dtype, g.shape) for g in want] == [(x.dtype, x.shape) for x in (q, k, v)]
    assert all(g.is_contiguous() and g.abs().max() > 0 for g in want)
    assert same(gradients(calls(attn, forward)["attention"], q, k, v), want)


@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)])
def test_any_subset_of_inputs(attn, forward, wanted):
    call, qkv = calls(attn, forward)["attention"], inputs()
    every = gradients(call, *qkv)
    assert same(gradients(call, *qkv, wanted=wanted), [g for g, w in zip(every, wanted, strict=True) if w])
    o, lse = call(*qkv)
    backward = getattr(torch.ops, attn.op.NAMESPACE).backward
    got = backward(2 * o, 2 * lse, *qkv, o, lse, None, 0.25, 1, list(wanted), False)
    for mine, want, is_wanted in zip(got, every, wanted, strict=True):
        assert torch.equal(mine, want) if is_wanted else mine.shape == (0,)


def test_either_output_alone(attn, forward):
    """The gradient is linear in (dO, dLSE)."""
    q, k, v = (x.double().requires_grad_() for x in inputs())
    o, lse = calls(attn, forward)["attention"](q, k, v)
    both = torch.autograd.grad((o, lse), (q, k, v), (o, lse), retain_graph=True)
    of_o = torch.autograd.grad(o, (q, k, v), o, retain_graph=True)
    of_lse = torch.autograd.grad(lse, (q, k), lse)
    for got, one, other, room in zip(both, of_o, of_lse, rounding(q, k, v, o, lse), strict=False):
        assert ((got - (one + other)).abs() <= room).all() and other.abs().max() > 0.1
    assert torch.equal(both[2], of_o[2])


@torch.no_grad()
def rounding(q, k, v, o, lse):
    """How far dQ and dK at dO = O, dLSE = LSE may lie from the sum of two calls, one with each.

    dQ = sum_j P_j (dP_j - D) scale k_j with dP_j = dO.v_j, D = dO.o - dLSE (reference_backward.cpp.j2). P has equal
    bits in all calls, and so has dP where it is not 0. A term of D is rounded in its product and d + 1 additions, then
    everything in the subtraction, two factors, the product with k and the additions over keys, for dK over the rows of
    all heads that share the key. The sum of the two calls rounds once more. One is added for terms of second order.
    """
    group, (nq, nk) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    p = (0.25 * q @ keys.mT - lse[..., None]).exp() * torch.ones(nq, nk).tril(nk - nq)
    d = 0.25 * p * (o.square().sum(-1) + lse.abs())[..., None]
    ds = 0.25 * p * (o @ values.mT).abs() + d
    for added, of_q in ((nk, True), (group * nq, False)):
        terms = (1 + (D + 1)) * d + (1 + 2 + 1 + added + 1 + 1) * ds
        size = terms @ keys.abs() if of_q else (terms.mT @ q.abs()).unflatten(1, (-1, group)).sum(2)
        yield 2 * torch.finfo(q.dtype).eps / 2 * size  # both sides round, each by at most half an eps


@pytest.mark.field("R081")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_torch_func_transforms(attn, forward, which):
    call, (q, k, v) = calls(attn, forward)[which], inputs()
    dq, dk, dv = gradients(call, q, k, v)
    assert torch.equal(grad(lambda x: loss(call(x, k, v)))(q), dq)
    assert torch.equal(vjp(lambda x: loss(call(q, x, v)), k)[1](torch.tensor(1.0).double())[0], dk)
    assert torch.equal(jacrev(lambda x: loss(call(q, k, x)))(v), dv)
    qs = torch.stack([q, 2 * q, q - 1])
    want = torch.stack([gradients(call, x, k, v)[0] for x in qs])
    assert torch.equal(vmap(grad(lambda x: loss(call(x, k, v))))(qs), want)
    assert torch.equal(grad(lambda x: loss(vmap(lambda y: call(y, k, v))(x)))(qs), want)
    each = jacrev(lambda x: call(x, k, v)[1].sum((1, 2)))(q)  # one backward per batch entry, mapped over
    lse = grad(lambda x: call(x, k, v)[1].sum())(q)
    assert torch.equal(each.sum(0), lse) and not each[0, 1].any()


@pytest.mark.field("R081")
def test_vmap_over_some_inputs_only(attn, forward):
    """What is not mapped is shared: its gradients add up."""
    call, (q, k, v) = calls(attn, forward)["torch.ops"], [x.double() for x in inputs()]
    qs = torch.stack([q, 2 * q, q - 1])
    got = grad(lambda y: loss(vmap(lambda x: call(x, y, v))(qs)))(k)
    parts = torch.stack([gradients(call, x, k, v)[1] for x in qs])
    # The parts have the same bits (see below); each side adds the three with two roundings, in an order of its own.
    room = 2 * 2 * torch.finfo(got.dtype).eps * parts.abs().sum(0)
    assert ((got - parts.sum(0)).abs() <= room).all()
    per_q = vmap(lambda x: grad(lambda y: loss(call(x, y, v)))(k))(qs)
    assert torch.equal(per_q, torch.stack([gradients(call, x, k, v)[1] for x in qs]))


@pytest.mark.field("R081")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_a_second_derivative_is_refused_when_it_is_asked_for(attn, forward, which):
    call, (q, k, v) = calls(attn, forward)[which], inputs()
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(call(leaf, k, v)), leaf, create_graph=True)
    assert torch.equal(first, gradients(call, q, k, v)[0])
    refused(lambda: first.sum().backward(), SECOND)
    refused(lambda: grad(lambda x: grad(lambda y: loss(call(y, k, v)))(x).sum())(q), SECOND)
    refused(lambda: grad(lambda y: grad(lambda x: loss(call(x, y, v)))(q).sum())(k), SECOND)
    refused(lambda: jacrev(jacrev(lambda x: loss(call(x, k, v))))(q), SECOND)


@pytest.mark.field("R081")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_forward_mode_is_refused(attn, forward, which):
    call, (q, k, v) = calls(attn, forward)[which], inputs()
    refused(lambda: jvp(lambda x: call(q, x, v), (k,), (k,)), FORWARD)
    refused(lambda: jacfwd(lambda x: call(q, k, x)[0])(v), FORWARD)
    refused(lambda: hessian(lambda x: loss(call(x, k, v)))(q), FORWARD)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, v)
        refused(lambda: call(q, k, dual), FORWARD)
        refused(lambda: call(q, k, dual.requires_grad_()), FORWARD)
        call(q, k, v)


@pytest.mark.field("R081")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_vmap_equals_a_loop(attn, forward, which):
    call = calls(attn, forward)[which]
    qs, ks, vs = (torch.stack([x, 2 * x, x - 1], dim=1) for x in inputs())
    want = [torch.stack(x) for x in zip(*(call(qs[:, i], ks[:, i], vs[:, i]) for i in range(3)), strict=True)]
    assert same(vmap(call, in_dims=1)(qs, ks, vs), want)
    want = [torch.stack(x) for x in zip(*(call(qs[:, i], ks[:, 0], vs[:, 1]) for i in range(3)), strict=True)]
    assert same(vmap(call, in_dims=(1, None, None))(qs, ks[:, 0], vs[:, 1]), want)


def test_vmap_over_key_lengths(attn):
    q, k, v = inputs()
    lengths = torch.tensor([[1, 2], [5, 0]])
    got = vmap(lambda n: attn.attention(q, k, v, key_lengths=n))(lengths)
    assert torch.equal(got, torch.stack([attn.attention(q, k, v, key_lengths=n) for n in lengths]))


@pytest.mark.parametrize("which", ["attention", "torch.ops"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_training_step_compiles_into_one_graph(attn, forward, backend, which):
    torch._dynamo.reset()
    call, (q, k, v) = calls(attn, forward)[which], inputs()
    compiled = torch.compile(lambda q, k, v: call(q * 1, k, v), fullgraph=True, backend=backend)
    for wanted in ((True, True, True), (False, True, False)):
        assert same(gradients(compiled, q, k, v, wanted), gradients(call, q, k, v, wanted))
    with torch.no_grad():
        assert same(compiled(q, k, v), call(q, k, v))


def test_opcheck_of_both_ops(attn, forward):
    for q, k, v in (inputs(), (x.requires_grad_() for x in inputs(torch.bfloat16))):
        torch.library.opcheck(forward, (q, k, v, torch.tensor([3, 7]), 0.25, 1))
        torch.library.opcheck(forward, (q, k, v, None, 0.25, 2, True))
        q, k, v = q.detach(), k.detach(), v.detach()
        o, lse = forward(q, k, v, None, 0.25, 2)
        backward = getattr(torch.ops, attn.op.NAMESPACE).backward.default
        torch.library.opcheck(backward, (o, lse, q, k, v, o, lse, None, 0.25, 2, [True, True, True], True))
        lengths = torch.tensor([3, 7])
        torch.library.opcheck(backward, (o, None, q, k, v, o, lse, lengths, 0.25, 2, [False, True, False], False))


def test_meta_tensors_have_gradients_of_the_right_shape(attn):
    q, k, v = (x.to("meta").requires_grad_() for x in inputs())
    got = torch.autograd.grad(attn.attention(q, k, v).sum(), (q, k, v))
    assert [g.shape for g in got] == [x.shape for x in (q, k, v)] and got[0].is_meta


def test_deterministic_is_none_or_a_bool(attn):
    q, k, v = inputs()
    for value in (None, False, True):
        assert same(gradients(functools.partial(attn.attention, return_lse=True, deterministic=value), q, k, v),
                    gradients(functools.partial(attn.attention, return_lse=True), q, k, v))  # fmt: skip
    with pytest.raises(ValueError, match="deterministic must be None, False or True; got 'yes'"):
        attn.attention(q, k, v, deterministic="yes")


def test_the_path_back_names_the_next_unit_where_one_has_no_kernel(attn, monkeypatch):
    """The reference unit v3 has a forward kernel of fp16 and none for its gradients."""
    if "v3" not in attn.isas("fp16"):
        pytest.skip("needs an x86-64-v3 machine")
    for dtype, isa in ((torch.float32, "v3"), (torch.float16, "baseline"), (torch.float64, "baseline")):
        told = attn.path(*inputs(dtype), backward=True)
        assert (told["target"], told["isa"], told["plan"]) == ("cpu", isa, {"br": 16, "bc": 16})
    assert attn.path(*inputs(torch.float16))["isa"] == "v3"
    monkeypatch.setenv("TILEPROOF_CPU_ISA", "v3")
    assert attn.path(*inputs(torch.float16), backward=True)["isa"] == "baseline"
    assert gradients(functools.partial(attn.attention, return_lse=True), *inputs(torch.float16))[0].abs().max() > 0
    monkeypatch.setenv("TILEPROOF_CPU_ISA", "baseline")
    assert attn.path(*inputs(), backward=True)["isa"] == "baseline"
