"""What no algorithm can beat: lower bounds on slow-memory traffic, and the FLOPs of the products.

Sources: compulsory traffic is the size of inputs and output. The other bound has an explicit constant, derived from
Lemma 3.3 of Saha and Ye, "The I/O complexity of attention" (ICML 2024, arXiv:2402.07443), with the partition argument
of Hong and Kung (STOC 1981), Q >= M (P(2M) - 1): a part of a 2M-partition meets at most M^2/d^2 + 4M of the Nq Nk dot
products, hence I/O >= Nq Nk d^2 / (M + 4 d^2) - M. It holds for standard multiplication; for M >= d^2 also with fast
multiplication, as long as QK^T is formed. (Proposition 3 of FlashAttention is weaker: no algorithm is better for
*all* M.)
"""

from __future__ import annotations

from fractions import Fraction

from spec import io_kernels
from spec.errors import TileError
from spec.io_counts import Sizes, Traffic
from spec.io_kernels import Call


def compulsory(s: Sizes) -> int:
    """Elements that every forward pass moves: Q, K, V in, O out."""
    return s.nq * s.dk + s.kv + s.nq * s.dv


def product_bound(s: Sizes, m: int) -> Fraction:
    """Nq Nk d^2 / (M + 4 d^2) - M elements, d = dk; negative for small problems."""
    return product_bound_of_pairs(s.nq * s.nk, s.dk, m)


def product_bound_of_pairs(pairs: int, dk: int, m: int) -> Fraction:
    """The same for any set of `pairs` dot products, such as those that a mask allows, of all heads together.

    A part of the partition meets at most M^2/d^2 + 4M dot products whichever are asked for, and operands of several
    heads in one part meet fewer than as many operands of one. Blocks that share nothing but slow memory can run one
    after the other in the same M, so the bound holds for their sum, M being what one block has.
    """
    if m < 1:
        raise TileError(f"M={m}: must be at least 1")
    return Fraction(pairs * dk**2, m + 4 * dk**2) - m


def lower_bound(s: Sizes, m: int) -> Fraction:
    """The better of the two bounds: a forward pass with M elements of fast memory moves at least this much."""
    return max(Fraction(compulsory(s)), product_bound(s, m))


def lower_bound_of_call(call: Call, m: int) -> Fraction:
    """The same for a call with heads, masks and key lengths, in elements."""
    return max(Fraction(io_kernels.compulsory(call)), product_bound_of_pairs(io_kernels.pairs(call), call.dk, m))


def ratio(traffic: Traffic, s: Sizes, m: int) -> float:
    """Traffic in units of the lower bound: 1 would be optimal."""
    return float(traffic.total / lower_bound(s, m))


def flops_forward(s: Sizes) -> int:
    """QK^T and PV, two per multiply-add: 4 N^2 d for Nq = Nk, dk = dv."""
    return 2 * s.nq * s.nk * (s.dk + s.dv)


def flops_backward_standard(s: Sizes) -> int:
    """dV, dP, dQ, dK from a stored P: 8 N^2 d."""
    return 4 * s.nq * s.nk * (s.dk + s.dv)


def flops_backward_recomputed(s: Sizes) -> int:
    """The same and QK^T again: 10 N^2 d, 1.25 times the standard backward pass and 2.5 times the forward pass."""
    return flops_backward_standard(s) + 2 * s.nq * s.nk * s.dk


def intensity(flops: int, traffic: Traffic, itemsize: int) -> float:
    """FLOP per byte of slow-memory traffic, to be held against a machine's ridge (peak FLOP/s over bytes/s)."""
    return flops / (traffic.total * itemsize)
