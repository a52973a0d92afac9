"""Layouts and empty problems in the backward pass: the bits of contiguous copies, exact zeros where due."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.package import autograd_calls
from tests.package.autograd_calls import DTYPES, Shape, draw, draw_dlse, gradients, layouts, same_bits

CAUSAL = [False, "bottom_right", "top_left"]
SHAPE = Shape(2, 4, 2, 37, 101)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


@pytest.mark.field("R046", "R048", "R049", "R050")
@dtypes
def test_every_mix_of_layouts_gives_the_bits_of_contiguous_copies(attn, dtype):
    q, k, v, dout = draw(Shape(2, 2, 2, 9, 11), dtype)
    want = gradients(attn, q, k, v, dout, causal=True)
    assert all(x.isfinite().all() and x.any() for x in want)
    for mix in itertools.product(*(list(layouts(x).values())[:4] for x in (q, k, v, dout))):
        assert same_bits(gradients(attn, *mix, causal=True), want)


@pytest.mark.field("R043", "R044", "R049", "R050")
@dtypes
def test_each_layout_of_each_tensor(attn, dtype):
    """Tiles and blocks in part and whole. The strides of an input that is a leaf may become those of its gradient."""
    tensors = draw(SHAPE, dtype)
    want = gradients(attn, *tensors, causal=True)
    for index, x in enumerate(tensors):
        for name, other in layouts(x).items():
            changed = [*tensors[:index], other, *tensors[index + 1 :]]
            assert same_bits(gradients(attn, *changed, causal=True), want), f"{index}, {name}"
            if index < 3:
                inputs = autograd_calls.leaves(*changed[:3])
                attn.attention(*inputs, causal=True).backward(tensors[3])
                assert same_bits([t.grad for t in inputs], want), f"{index}, {name}"


@pytest.mark.field("R044")
@dtypes
def test_unaligned_pointers(attn, dtype):
    tensors = draw(SHAPE, dtype)
    want = gradients(attn, *tensors)
    for offset in (1, 3, 8):
        shifted = [torch.cat([x.new_full((offset,), math.nan), x.flatten()])[offset:].view(x.shape) for x in tensors]
        assert same_bits(gradients(attn, *shifted), want)


@dtypes
def test_an_expanded_gradient_equals_its_copy(attn, dtype):
    """What `sum`, `mean` and broadcasting hand to backward: strides of 0 in one, several or all dimensions."""
    q, k, v, dout = draw(SHAPE, dtype)
    expanded = [
        dout[..., :1], dout[:, :, :1], dout[:, :1], dout[:1], dout[:, :, :1, :1], dout[:1, :1], dout[:1, :1, :1, :1],
    ]  # fmt: skip
    for small in expanded:
        g = small.expand(dout.shape)
        assert 0 in g.stride()
        assert same_bits(gradients(attn, q, k, v, g), gradients(attn, q, k, v, g.contiguous()))
    inputs = autograd_calls.leaves(q, k, v)
    attn.attention(*inputs).sum().backward()
    assert same_bits([x.grad for x in inputs], gradients(attn, q, k, v, torch.ones_like(dout)))


@dtypes
def test_any_layout_of_the_gradient_of_lse(attn, dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    dlse = draw_dlse(SHAPE, dtype)
    want = gradients(attn, q, k, v, dout, dlse)
    assert not same_bits(want, gradients(attn, q, k, v, dout))
    room = torch.full((*dlse.shape, 2), math.nan, dtype=dlse.dtype)
    room[..., 1] = dlse
    for other in (
        dlse.transpose(1, 2).contiguous().transpose(1, 2),
        dlse.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        room[..., 1],
    ):
        assert not other.is_contiguous()
        assert same_bits(gradients(attn, q, k, v, dout, other), want)
    inputs = autograd_calls.leaves(q, k, v)
    attn.attention(*inputs, return_lse=True)[1].sum().backward()
    ones = torch.ones_like(dlse)
    got = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
    assert same_bits(got[:2], gradients(attn, q, k, v, torch.zeros_like(dout), ones)[:2]) and not got[2].any()


@pytest.mark.field("R045")
@dtypes
def test_an_expanded_input_has_the_gradient_of_its_copy(attn, dtype):
    """Of an input with strides of 0 itself, and of the tensor that was expanded: the sum over what shares it."""
    q, k, v, dout = draw(Shape(2, 4, 1, 37, 101), dtype)
    kx, vx = (x.expand(2, 4, 101, 16) for x in (k, v))
    want = gradients(attn, q, kx.contiguous(), vx.contiguous(), dout)
    got = gradients(attn, q, kx, vx, dout)
    assert same_bits(got, want) and all(x.is_contiguous() for x in got)
    base = autograd_calls.leaves(k, v)
    attn.attention(q, *(x.expand(2, 4, 101, 16) for x in base)).backward(dout)
    assert same_bits([x.grad for x in base], [x.sum(1, keepdim=True) for x in want[1:]])


@pytest.mark.field("R047")
def test_strides_of_dimensions_of_size_1_are_ignored(attn):
    tensors = draw(Shape(1, 1, 1, 1, 1))
    odd = [x.as_strided((1, 1, 1, 16), (3, 5, 7, 1)) for x in tensors]
    assert same_bits(gradients(attn, *odd), gradients(attn, *tensors))


@pytest.mark.field("R051")
@dtypes
def test_zero_inputs_have_zero_gradients_whatever_the_strides(attn, dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    for name in layouts(q):
        zero = [layouts(torch.zeros_like(x))[name] for x in (q, k, v)]
        first = gradients(attn, *zero, dout)
        for _ in range(3):
            assert same_bits(gradients(attn, *zero, dout), first)
        assert not first[0].any() and not first[1].any() and first[2].any(), name
        assert not any(x.any() for x in gradients(attn, q, k, v, layouts(torch.zeros_like(dout))[name]))


@pytest.mark.field("R053", "R055", "R059")
@dtypes
@pytest.mark.parametrize("causal", CAUSAL)
def test_empty_problems_have_zero_gradients(attn, dtype, causal):
    """Without queries, keys, batch entries or heads: gradients of the inputs' shapes, all of them written."""
    for shape in (Shape(2, 4, 2, 0, 5), Shape(2, 4, 2, 5, 0), Shape(0, 4, 2, 5, 7), Shape(2, 0, 0, 5, 7),
                  Shape(2, 0, 3, 5, 7), Shape(2, 4, 2, 0, 0)):  # fmt: skip
        tensors = draw(shape, dtype)
        dirt = [torch.full_like(x, math.nan) for x in tensors]  # for the allocator to hand out again
        del dirt
        for dlse in (None, draw_dlse(shape, dtype)):
            got = gradients(attn, *tensors, dlse, causal=causal)
            assert [x.shape for x in got] == [x.shape for x in tensors[:3]] and not any(x.any() for x in got)
            assert {x.dtype for x in got} == {dtype}
