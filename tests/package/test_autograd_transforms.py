"""torch.func, vmap, forward mode and second derivatives: the bits of plain autograd, or one sentence of ours."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from tests.package import autograd_calls
from tests.package.autograd_calls import Shape, draw, gradients, leaves, same_bits

SHAPE = Shape(2, 4, 2, 7, 9)
NAME = "attn_d16_sram192k_cpu_br32_bc96"
SECOND = f"{NAME} has no second derivative: its gradients are not differentiable"
FORWARD = f"{NAME} has no jvp (forward-mode derivative): an input has a tangent"


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


def refused(call, sentence):
    with pytest.raises(NotImplementedError) as caught:
        call()
    assert str(caught.value) == sentence


def stack(tensors, dim):
    return torch.stack([tensors, 2 * tensors, tensors - 1], dim)


@pytest.mark.field("R080")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_second_derivative_is_refused(attn, index):
    """The gradient penalty of the report: never a silent zero."""
    inputs = leaves(*draw(SHAPE)[:3])
    o, lse = attn.attention(*inputs, causal=True, return_lse=True)
    (g,) = torch.autograd.grad((o**2).sum() + lse.sum(), inputs[index], create_graph=True)
    assert g.requires_grad
    refused((g**2).sum().backward, SECOND)


@pytest.mark.field("R080")
def test_a_second_derivative_by_the_incoming_gradient_alone_is_refused(attn):
    """The gradients are linear in dO: what autograd's double-vjp trick for forward mode relies on."""
    q, k, v = leaves(*draw(SHAPE)[:3])
    o = attn.attention(q, k, v)
    dout = torch.zeros_like(o, requires_grad=True)
    (g,) = torch.autograd.grad(o, q, dout, create_graph=True)
    refused(lambda: torch.autograd.grad(g.sum(), dout), SECOND)
    weight = torch.ones(16, requires_grad=True)
    (g,) = torch.autograd.grad((attn.attention(q, k, v) * weight).sum(), k, create_graph=True)
    refused(lambda: torch.autograd.grad(g.sum(), weight), SECOND)


@pytest.mark.field("R080")
def test_every_other_road_to_a_second_derivative_is_refused(attn):
    q, k, v, _ = draw(Shape(1, 1, 1, 2, 3), torch.float64)

    def loss(x):
        return attn.attention(x, k, v).square().sum()

    refused(lambda: torch.autograd.functional.hessian(loss, q), SECOND)
    refused(lambda: torch.autograd.functional.hvp(loss, q, q), SECOND)
    refused(lambda: grad(lambda x: grad(loss)(x).square().sum())(q), SECOND)
    refused(lambda: jacrev(jacrev(loss))(q), SECOND)
    refused(lambda: torch.autograd.gradgradcheck(attn.attention, leaves(q, k, v)), SECOND)
    refused(lambda: hessian(loss)(q), FORWARD)  # forward over reverse
    refused(lambda: jvp(grad(loss), (q,), (q,)), FORWARD)


def test_create_graph_alone_is_fine(attn):
    """Optimisers set it for other parts of a model; nothing of second order is asked of this op."""
    q, k, v, dout = draw(SHAPE)
    inputs = leaves(q, k, v)
    got = torch.autograd.grad(attn.attention(*inputs), inputs, dout, create_graph=True)
    assert same_bits(got, gradients(attn, q, k, v, dout))


@pytest.mark.field("R081")
@pytest.mark.parametrize("causal", [False, True])
def test_reverse_mode_transforms_have_the_bits_of_autograd(attn, causal):
    q, k, v, dout = draw(SHAPE)
    want = gradients(attn, q, k, v, dout, causal=causal)
    o = attn.attention(q, k, v, causal=causal)

    def loss(q, k, v):
        return (attn.attention(q, k, v, causal=causal) * dout).sum()

    for index in range(3):
        assert same_bits([grad(loss, argnums=index)(q, k, v)], [want[index]])
    assert same_bits(grad(loss, argnums=(0, 1, 2))(q, k, v), want)
    found, value = grad_and_value(loss, argnums=(0, 2))(q, k, v)
    assert same_bits(found, [want[0], want[2]]) and torch.equal(value, loss(q, k, v))
    out, pull = vjp(lambda q, k, v: attn.attention(q, k, v, causal=causal), q, k, v)
    assert same_bits([out], [o]) and same_bits(pull(dout), want)


@pytest.mark.field("R081")
def test_jacobians(attn):
    q, k, v, _ = draw(Shape(1, 2, 1, 2, 3))
    for index in range(3):
        inputs = [q, k, v]

        def call(x, index=index, inputs=inputs):
            return attn.attention(*inputs[:index], x, *inputs[index + 1 :])

        want = torch.autograd.functional.jacobian(call, inputs[index])
        assert want.any() and same_bits([jacrev(call)(inputs[index])], [want])


@pytest.mark.field("R081")
def test_gradients_per_sample(attn):
    """vmap over grad, with one input mapped, with all, and along another dimension than the first."""
    q, k, v, dout = draw(SHAPE)
    qs, ks, vs = (stack(x, 1) for x in (q, k, v))

    def loss(q, k, v):
        return (attn.attention(q, k, v, causal=True) * dout).sum()

    def each(i, *mapped):
        return [x[:, i] if m else x[:, 0] for x, m in zip((qs, ks, vs), mapped, strict=True)]

    for mapped in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)):
        args = [x if m else x[:, 0] for x, m in zip((qs, ks, vs), mapped, strict=True)]
        in_dims = tuple(1 if m else None for m in mapped)
        got = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=in_dims)(*args)
        want = [gradients(attn, *each(i, *mapped), dout, causal=True) for i in range(3)]
        assert same_bits(got, [torch.stack(x) for x in zip(*want, strict=True)]), mapped


@pytest.mark.field("R081")
def test_a_backward_pass_through_a_mapped_call(attn):
    """grad outside vmap, with key lengths that are mapped as well."""
    q, k, v, dout = draw(SHAPE)
    lengths = torch.tensor([[9, 3], [0, 8], [1, 1]])
    (qs,) = leaves(stack(q, 0))
    o = vmap(lambda q, n: attn.attention(q, k, v, key_lengths=n))(qs, lengths)
    (got,) = torch.autograd.grad(o, qs, dout.expand(o.shape))
    want = [gradients(attn, x, k, v, dout, key_lengths=n)[0] for x, n in zip(qs, lengths, strict=True)]
    assert same_bits([got], [torch.stack(want)])


@pytest.mark.field("R081")
def test_several_incoming_gradients_at_once(attn):
    q, k, v, dout = draw(SHAPE)
    douts = stack(dout, 0)
    inputs = leaves(q, k, v)
    got = torch.autograd.grad(attn.attention(*inputs), inputs, douts, is_grads_batched=True)
    want = [gradients(attn, q, k, v, g) for g in douts]
    assert same_bits(got, [torch.stack(x) for x in zip(*want, strict=True)])
    (only,) = torch.autograd.grad(attn.attention(*inputs), inputs[1:2], douts, is_grads_batched=True)
    assert same_bits([only], [got[1]])


@pytest.mark.field("R081")
def test_gradients_per_sample_of_a_module(attn):
    """x W^T sums small multiples of 1/64, exactly in any order: up to the gradient of W both sides have equal bits."""

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 3 * 32)

        def forward(self, x):
            return self.attend(self.project(x))

        def attend(self, y):
            q, k, v = y.unflatten(-1, (3, 2, 16)).permute(1, 2, 0, 3).unsqueeze(1)
            return attn.attention(q, k, v, causal=True).square().sum()

    made = torch.Generator().manual_seed(0)

    def whole(low, high, shape):
        return torch.randint(low, high + 1, shape, generator=made).double()

    module, xs, rows = Heads().double(), whole(-4, 4, (3, 5, 16)), 5
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(whole(-8, 8, weight.shape) / 64)
    weights = dict(module.named_parameters())
    got = vmap(grad(lambda w, x: functional_call(module, w, (x,))), in_dims=(None, 0))(weights, xs)
    for i, x in enumerate(xs):
        y = module.project(x)
        dy, *want = torch.autograd.grad(module.attend(y), [y, *weights.values()])
        # dW = dy^T x and db = dy^T 1 sum `rows` products, on each side in an order of its own: as many roundings each,
        # and one for the terms of second order.
        sizes = dy.abs().mT @ x.abs(), dy.abs().sum(0)
        for name, right, size in zip(weights, want, sizes, strict=True):
            room = 2 * (rows + 1) * torch.finfo(x.dtype).eps / 2 * size
            assert right.any() and ((got[name][i] - right).abs() <= room).all()


@pytest.mark.field("R081")
def test_forward_mode_is_refused(attn):
    q, k, v, dout = draw(SHAPE)
    for index in range(3):
        inputs = [q, k, v]

        def call(x, index=index, inputs=inputs):
            return attn.attention(*inputs[:index], x, *inputs[index + 1 :])

        x = inputs[index]
        refused(lambda call=call, x=x: jvp(call, (x,), (x,)), FORWARD)
        refused(lambda call=call, x=x: jacfwd(call)(x), FORWARD)
        refused(lambda call=call, x=x: linearize(call, x), FORWARD)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            refused(lambda call=call, dual=dual: call(dual), FORWARD)
            with torch.no_grad():
                refused(lambda call=call, dual=dual: call(dual), FORWARD)
            o = call(leaves(x)[0])  # an input without a tangent is fine
            tangent = forward_ad.make_dual(dout, dout)
            refused(lambda o=o, tangent=tangent: o.backward(tangent), FORWARD)
