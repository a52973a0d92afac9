"""--no-backward: every way to ask for a derivative raises one sentence at the call; the rest just works."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

D = 16
REVERSE = (
    "attn_forward has no backward for cpu tensors, but grad mode is on and an input requires grad: "
    "call it under torch.no_grad(), or detach the inputs"
)
FORWARD = "attn_forward has no jvp (forward-mode derivative): an input has a tangent"


@pytest.fixture(scope="module")
def attn(packages, tmp_path_factory):
    return packages.imported(packages.emitted(tmp_path_factory.mktemp("emitted"), "attn_forward", backward=False))


def inputs(dtype=torch.float32):
    return [torch.randn(2, 2, 5, D, generator=torch.Generator().manual_seed(s)).to(dtype) for s in range(3)]


def calls(attn, forward):
    """The public function and the op, as functions of (q, k, v) that return o."""
    return {"attention": attn.attention, "torch.ops": lambda q, k, v: forward(q, k, v, None, 0.25, 0)[0]}


def refused(call, sentence):
    with pytest.raises(NotImplementedError) as caught:
        call()
    assert str(caught.value) == sentence


@pytest.mark.field("R080", "R082")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_input_that_requires_grad_is_refused_at_the_call(attn, forward, which, index):
    call, qkv = calls(attn, forward)[which], inputs()
    qkv[index].requires_grad_()
    refused(lambda: call(*qkv), REVERSE)
    refused(lambda: attn.attention(*qkv, return_lse=True), REVERSE)
    qkv[index] = qkv[index] * 1.0  # not a leaf
    refused(lambda: call(*qkv), REVERSE)


@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_it_runs_where_no_gradient_is_wanted(attn, forward, which):
    call = calls(attn, forward)[which]
    want = call(*inputs())
    asking = [x.requires_grad_() for x in inputs()]
    with torch.no_grad():
        o = call(*asking)
        assert torch.equal(o, want) and not o.requires_grad
    with torch.inference_mode():
        assert torch.equal(call(*asking), want)
        assert torch.equal(call(*inputs()), want)
    assert torch.equal(call(*(x.detach() for x in asking)), want)


def test_there_is_nothing_to_call(attn):
    assert not hasattr(getattr(torch.ops, attn.op.NAMESPACE), "backward")
    with pytest.raises(TypeError, match="deterministic"):
        attn.attention(*inputs(), deterministic=True)
    with pytest.raises(TypeError, match="backward"):
        attn.path(*inputs(), backward=True)


@pytest.mark.field("R081")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_functorch_transforms_are_refused(attn, forward, which):
    call, (q, k, v) = calls(attn, forward)[which], inputs()
    refused(lambda: torch.func.grad(lambda x: call(x, k, v).sum())(q), REVERSE)
    refused(lambda: torch.func.vjp(lambda x: call(q, x, v), k), REVERSE)
    refused(lambda: torch.func.jacrev(lambda x: call(q, k, x))(v), REVERSE)
    refused(lambda: torch.func.jvp(lambda x: call(q, x, v), (k,), (k,)), FORWARD)
    refused(lambda: torch.func.jacfwd(lambda x: call(q, k, x))(v), FORWARD)
    refused(lambda: torch.func.vmap(torch.func.grad(lambda x: call(x, k, v).sum()))(torch.stack([q, q])), REVERSE)


@pytest.mark.field("R081")
@pytest.mark.parametrize("which", ["attention", "torch.ops"])
def test_dual_tensors_are_refused(attn, forward, which):
    call, (q, k, v) = calls(attn, forward)[which], inputs()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, v)
        refused(lambda: call(q, k, dual), FORWARD)
        with torch.no_grad():
            refused(lambda: call(q, k, dual), FORWARD)
        call(q, k, v)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_gradient_is_refused_under_compile(attn, forward, backend):
    for call in calls(attn, forward).values():
        q, k, v = inputs()
        q.requires_grad_()
        compiled = torch.compile(lambda q, k, v, call=call: call(q, k, v) * 2, fullgraph=True, backend=backend)
        with pytest.raises(RuntimeError) as caught:
            compiled(q, k, v)
        assert REVERSE in str(caught.value)
        with torch.no_grad():
            assert torch.equal(compiled(q, k, v), call(q, k, v) * 2)


def test_jvp_is_refused_under_compile(attn):
    q, k, v = inputs()
    compiled = torch.compile(
        lambda x: torch.func.jvp(lambda y: attn.attention(y, k, v), (x,), (x,))[1], fullgraph=True, backend="eager"
    )
    with pytest.raises(RuntimeError) as caught:
        compiled(q)
    assert FORWARD in str(caught.value)


def test_a_gradient_past_the_call_is_untouched(attn):
    """Other parts of a compiled training graph may differentiate; the op sees detached inputs."""
    q, k, v = inputs()
    w = torch.ones(D, requires_grad=True)

    def loss(w):
        return (attn.attention(q, k, v) * w).sum()

    (want,) = torch.autograd.grad(loss(w), w)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(w), w)
    assert torch.equal(got, want) and torch.equal(want, attn.attention(q, k, v).sum((0, 1, 2)))
