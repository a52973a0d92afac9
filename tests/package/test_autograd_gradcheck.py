"""torch.autograd.gradcheck in float64 on the real kernels: finite differences agree with every gradient.

The tolerances are gradcheck's own (eps 1e-6, relative 1e-3): a wrong formula is off by far more, and how many digits
are right is what the certificates say. `nondet_tol` stays 0: a second backward has the same bits.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from tests.package import autograd_calls
from tests.package.autograd_calls import Shape

CAUSAL = [False, "bottom_right", "top_left"]
# Compared element by element. Nq > Nk leaves rows without a key when the mask is aligned at the bottom right.
SMALL = [
    Shape(1, 1, 1, 1, 1), Shape(1, 2, 1, 3, 4), Shape(2, 1, 1, 4, 3), Shape(1, 4, 2, 2, 5), Shape(1, 3, 1, 5, 2),
    Shape(1, 1, 1, 1, 6), Shape(1, 1, 1, 6, 1),
]  # fmt: skip
# Compared along random directions. Tiles have 12 or 24 rows and 240 to 384 keys; panels and blocks are smaller.
LARGE = [
    Shape(1, 2, 1, 25, 97), Shape(2, 2, 2, 65, 240), Shape(1, 4, 2, 23, 385), Shape(1, 1, 1, 96, 32),
    Shape(1, 6, 2, 12, 241),
]  # fmt: skip


@pytest.fixture(scope="module")
def attn():
    return autograd_calls.package("small")


@pytest.fixture(scope="module")
def uneven():
    return autograd_calls.package("d != dv")


@pytest.fixture(params=["baseline", "v3", "v4"])
def isa(attn, request, monkeypatch):
    """Forces the float64 kernels of one instruction set."""
    if request.param not in attn.isas("float64"):
        pytest.skip(f"this machine does not have the instructions of {request.param}")
    monkeypatch.setenv("TILEPROOF_CPU_ISA", request.param)


def call(attn, asked, **options):
    """`attention` as a function of (q, k, v) alone that returns what is asked of it."""

    def function(q, k, v):
        o, lse = attn.attention(q, k, v, return_lse=True, **options)
        lse = torch.where(lse.isneginf(), 0.0, lse)  # finite differences of -inf are no numbers
        return {"o": o, "lse": lse, "o and lse": (o, lse)}[asked]

    return function


def doubles(shape, **widths):
    return autograd_calls.leaves(*autograd_calls.draw(shape, torch.float64, **widths)[:3])


@pytest.mark.field("R013", "R083")
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_every_derivative_of_a_small_problem(attn, isa, shape, causal):
    assert gradcheck(call(attn, "o", causal=causal), doubles(shape))


@pytest.mark.field("R013", "R083")
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_derivatives_across_the_edges_of_tiles(attn, isa, shape, causal):
    assert gradcheck(call(attn, "o and lse", causal=causal), doubles(shape), fast_mode=True)


@pytest.mark.field("R082")
@pytest.mark.parametrize("asked", ["lse", "o and lse"])
@pytest.mark.parametrize("causal", CAUSAL)
def test_the_gradient_through_lse(attn, isa, causal, asked):
    for shape in (Shape(1, 2, 1, 3, 4), Shape(1, 2, 2, 5, 2)):
        assert gradcheck(call(attn, asked, causal=causal), doubles(shape))


@pytest.mark.field("R064")
@pytest.mark.parametrize("causal", CAUSAL)
def test_d_other_than_dv(uneven, isa, causal):
    for shape in (Shape(1, 2, 1, 2, 3), Shape(1, 2, 2, 3, 2)):
        assert gradcheck(call(uneven, "o and lse", causal=causal), doubles(shape, d=8, dv=24))
    for shape in (Shape(2, 2, 1, 33, 97), Shape(1, 3, 3, 70, 50)):
        assert gradcheck(call(uneven, "o and lse", causal=causal), doubles(shape, d=8, dv=24), fast_mode=True)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("lengths", "kind"), [([3, 4], torch.int32), ([0, 2], torch.int64), ([1, 0], torch.int64)])
def test_key_lengths(attn, causal, lengths, kind):
    lengths = torch.tensor(lengths, dtype=kind)
    assert gradcheck(call(attn, "o and lse", causal=causal, key_lengths=lengths), doubles(Shape(2, 2, 1, 3, 4)))


@pytest.mark.parametrize("scale", [2.0**-20, 0.1, 3.0])
def test_any_scale(attn, scale):
    assert gradcheck(call(attn, "o and lse", scale=scale), doubles(Shape(1, 2, 1, 3, 4)))


def test_derivatives_through_views_of_the_inputs(attn):
    """Transposed, sliced, expanded over heads and over the batch, and one tensor for all three."""

    def views(qt, kt, v):
        wide = torch.cat([qt, qt + 1], -1)
        return attn.attention(
            wide.transpose(1, 2)[..., 3 : 3 + 16], kt.transpose(2, 3).expand(2, 4, 5, 16), v.expand(2, 4, 5, 16)
        )

    make = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 4, 16), (2, 1, 16, 5), (1, 1, 5, 16)]
    assert gradcheck(views, autograd_calls.leaves(*(torch.randn(s, generator=make).double() for s in sizes)))


@pytest.mark.field("R039")
def test_one_tensor_for_q_k_and_v(attn):
    (x,) = doubles(Shape(1, 2, 2, 5, 5))[:1]
    for causal in CAUSAL:
        assert gradcheck(lambda x, causal=causal: attn.attention(x, x, x, causal=causal), (x,))


@pytest.mark.field("R045", "R065")
def test_derivatives_by_a_tensor_that_heads_share(attn):
    """K and V expanded over the heads (stride 0), and shared by the op itself: one derivative."""
    q, k, v = doubles(Shape(1, 4, 1, 3, 5))

    def expanded(q, k, v):
        return attn.attention(q, k.expand(1, 4, 5, 16), v.expand(1, 4, 5, 16))

    assert gradcheck(expanded, (q, k, v))
    assert gradcheck(call(attn, "o"), (q, k, v))


def test_a_wrong_gradient_is_noticed(attn):
    """One key's gradient half a percent off, one dropped addend: finite differences tell."""
    q, k, v = doubles(Shape(1, 2, 1, 3, 4))

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            factor = torch.ones_like(g)
            factor[..., 1, :] = 1.005
            return g * factor

    with pytest.raises(GradcheckError):
        gradcheck(lambda q, k, v: attn.attention(q, Wrong.apply(k), v), (q, k, v))
    with pytest.raises(GradcheckError):
        gradcheck(lambda q, k, v: call(attn, "lse")(q, k.detach(), v), (q, k, v))
