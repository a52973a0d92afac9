"""Autocast: floating-point q, k and v but float64 are cast to its dtype; gradients come back in the inputs' dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.package import autograd_calls
from tests.package.autograd_calls import Shape, draw, draw_dlse, gradients, leaves, same_bits

SHAPE = Shape(2, 4, 2, 37, 101)
NARROW = [torch.bfloat16, torch.float16]

casts = pytest.mark.parametrize("dtype", NARROW, ids=str)


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


@casts
def test_inputs_are_cast_and_gradients_are_cast_back(attn, dtype):
    q, k, v, dout = draw(SHAPE)
    narrow = [x.to(dtype) for x in (q, k, v)]
    dlse = draw_dlse(SHAPE)
    inputs = leaves(q, k, v)
    with torch.autocast("cpu", dtype=dtype):
        o, lse = attn.attention(*inputs, causal=True, return_lse=True)
    assert same_bits((o, lse), attn.attention(*narrow, causal=True, return_lse=True))
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    torch.autograd.backward((o, lse), (dout.to(dtype), dlse))  # outside, where training code calls it
    want = gradients(attn, *narrow, dout.to(dtype), dlse, causal=True)
    assert same_bits([x.grad for x in inputs], [g.float() for g in want])


@pytest.mark.field("R121")
@casts
def test_any_mix_of_dtypes_becomes_one(attn, dtype):
    """q and k from a layer that keeps float32, v from a linear layer that does not: the case of the report."""
    tensors = draw(Shape(1, 2, 1, 5, 7))
    dout = tensors[3].to(dtype)
    for mix in itertools.product([torch.float32, *NARROW], repeat=3):
        inputs = leaves(*(x.to(t) for x, t in zip(tensors[:3], mix, strict=True)))
        with torch.autocast("cpu", dtype=dtype):
            o = attn.attention(*inputs)
        o.backward(dout)
        want = gradients(attn, *(x.detach().to(dtype) for x in inputs), dout)
        assert same_bits([x.grad for x in inputs], [g.to(t) for g, t in zip(want, mix, strict=True)])


@pytest.mark.field("R121")
@casts
def test_float64_is_left_as_it_is(attn, dtype):
    q, k, v, dout = draw(SHAPE, torch.float64)
    want = gradients(attn, q, k, v, dout)
    with torch.autocast("cpu", dtype=dtype):
        assert same_bits(gradients(attn, q, k, v, dout), want)
        for index in range(3):
            mixed = [x.float() if i == index else x for i, x in enumerate((q, k, v))]
            with pytest.raises(ValueError, match=r"must share one dtype; got .* \(autocast leaves float64 as it is"):
                attn.attention(*mixed)


@casts
def test_backward_inside_autocast_is_the_same(attn, dtype):
    q, k, v, dout = draw(SHAPE)
    want = []
    for inside in (False, True):
        inputs = leaves(q, k, v)
        with torch.autocast("cpu", dtype=dtype):
            loss = (attn.attention(*inputs).float() * dout).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        want.append([x.grad for x in inputs])
    assert same_bits(*want)


def test_autocast_that_is_off_casts_nothing(attn):
    q, k, v, dout = draw(SHAPE)
    want = gradients(attn, q, k, v, dout)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert same_bits(gradients(attn, q, k, v, dout), want)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert same_bits(gradients(attn, q, k, v, dout), want)


@casts
def test_the_op_itself_and_a_compiled_graph_follow_the_same_rule(attn, dtype):
    torch._dynamo.reset()
    q, k, v, dout = draw(SHAPE)
    op = getattr(torch.ops, attn.op.NAMESPACE).forward
    want = gradients(attn, *(x.to(dtype) for x in (q, k, v)), dout.to(dtype))
    for call in (
        lambda q, k, v: op(q, k, v, None, 0.25, 0)[0],
        torch.compile(lambda q, k, v: attn.attention(q, k, v), fullgraph=True, backend="aot_eager"),
    ):
        inputs = leaves(q, k, v)
        with torch.autocast("cpu", dtype=dtype):
            call(*inputs).backward(dout.to(dtype))
        assert same_bits([x.grad for x in inputs], [g.float() for g in want])


@casts
def test_checkpoints_cast_again(attn, dtype):
    q, k, v, dout = draw(SHAPE)
    want = gradients(attn, *(x.to(dtype) for x in (q, k, v)), dout.to(dtype))
    for reentrant in (False, True):
        inputs = leaves(q, k, v)
        with torch.autocast("cpu", dtype=dtype):
            o = torch.utils.checkpoint.checkpoint(attn.attention, *inputs, use_reentrant=reentrant)
        o.backward(dout.to(dtype))
        assert same_bits([x.grad for x in inputs], [g.float() for g in want])
