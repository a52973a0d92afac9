"""Slow-memory traffic of each algorithm, in elements: closed formulas, exact for the listings as written.

Source: the listings themselves (FlashAttention arXiv:2205.14135, FlashAttention-2 arXiv:2307.08691); the papers give
only the order of growth. `io_loops.py` counts the same by walking the loops, and the tests hold the two equal.

A short last tile moves only its rows, so Br and Bc enter through Tr and Tc alone. Conventions: zeroing of outputs
counts as writes (A1: O, l, m; A4: dQ, dK, dV; F2b: dQ, or by rows dK, dV); standard attention counts each matrix once
per kernel; masks and dropout that are functions of the position cost nothing. One head; K/V terms count once per K/V
head if its query heads share a tile row. This is the traffic of the algorithm: a cache may lower what a counter sees,
spills and sectors raise it.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec.tiling import check_tile, count


@dataclass(frozen=True)
class Traffic:
    """Elements read from and written to slow memory."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One head: Nq query rows and Nk keys, dk wide, values dv wide."""

    nq: int
    nk: int
    dk: int
    dv: int

    @property
    def kv(self) -> int:
        """Elements of K and V together."""
        return self.nk * (self.dk + self.dv)


def standard_forward(s: Sizes) -> Traffic:
    """Algorithm 0: S and P are each written once and read once."""
    return Traffic(2 * s.nq * s.nk + s.nq * s.dk + s.kv, 2 * s.nq * s.nk + s.nq * s.dv)


def standard_backward(s: Sizes) -> Traffic:
    """Algorithm 3."""
    return Traffic(5 * s.nq * s.nk + s.nq * (s.dk + 2 * s.dv) + s.kv, 2 * s.nq * s.nk + s.nq * s.dk + s.kv)


def flash1_forward(s: Sizes, bc: int) -> Traffic:
    """Algorithms 1 and 2: every column tile passes over Q, O, l, m. Algorithm 2 adds O(1) for the RNG state."""
    tc = _tiles(s.nk, bc)
    return Traffic(s.kv + tc * s.nq * (s.dk + s.dv + 2), (1 + tc) * s.nq * (s.dv + 2))


def flash1_backward(s: Sizes, bc: int) -> Traffic:
    """Algorithm 4."""
    tc = _tiles(s.nk, bc)
    return Traffic(s.kv + tc * s.nq * (2 * s.dk + 2 * s.dv + 2), (1 + tc) * s.nq * s.dk + 2 * s.kv)


def flash1_backward_masked(s: Sizes, live_rows: int) -> Traffic:
    """The same with empty tiles skipped. live_rows = R, the rows of all live tiles together."""
    per_row = 2 * s.dk + 2 * s.dv + 2
    return Traffic(s.kv + live_rows * per_row, (s.nq + live_rows) * s.dk + 2 * s.kv)


def block_sparse(s: Sizes, live_rows: int, live_keys: int | None = None) -> Traffic:
    """Algorithm 5. live_rows = R, the rows of all live tiles together.

    live_keys: keys of the columns that have a live tile, for the variant that skips the others; the listing as printed
    loads Kj and Vj before it looks (None).
    """
    kv = s.kv if live_keys is None else live_keys * (s.dk + s.dv)
    return Traffic(kv + live_rows * (s.dk + s.dv + 2), (s.nq + live_rows) * (s.dv + 2))


def flash2_forward(s: Sizes, br: int) -> Traffic:
    """Algorithm 1 of FlashAttention-2: every row tile passes over K and V; O and L are written once."""
    return Traffic(s.nq * s.dk + _tiles(s.nq, br) * s.kv, s.nq * (s.dv + 1))


def flash2_forward_masked(s: Sizes, live_keys: int) -> Traffic:
    """The same with empty tiles skipped. live_keys = C, the keys of all live tiles together."""
    return Traffic(s.nq * s.dk + live_keys * (s.dk + s.dv), s.nq * (s.dv + 1))


def flash2_backward(s: Sizes, bc: int, *, as_printed: bool = False) -> Traffic:
    """Algorithm 2 of FlashAttention-2. As printed it also loads Oi, which it does not use, and dQi twice."""
    tc = _tiles(s.nk, bc)
    extra = tc * s.nq * (s.dk + s.dv) if as_printed else 0
    reads = 2 * s.nq * s.dv + s.kv + tc * s.nq * (2 * s.dk + s.dv + 2) + extra
    return Traffic(reads, (1 + tc) * s.nq * s.dk + s.nq + s.kv)


def flash2_backward_masked(s: Sizes, live_rows: int) -> Traffic:
    """The same, not as printed, with empty tiles skipped. live_rows = R, the rows of all live tiles together."""
    reads = 2 * s.nq * s.dv + s.kv + live_rows * (2 * s.dk + s.dv + 2)
    return Traffic(reads, (s.nq + live_rows) * s.dk + s.nq + s.kv)


def flash2_backward_by_rows(s: Sizes, br: int) -> Traffic:
    """Algorithm 2 with its loops exchanged: dQ stays on chip, dK and dV are summed in slow memory; D needs no pass."""
    return flash2_backward_by_rows_masked(s, _tiles(s.nq, br) * s.nk)


def flash2_backward_by_rows_masked(s: Sizes, live_keys: int) -> Traffic:
    """The same with empty tiles skipped. live_keys = C, the keys of all live tiles together."""
    sums = live_keys * (s.dk + s.dv)
    return Traffic(s.nq * (s.dk + 2 * s.dv + 1) + 2 * sums, s.kv + sums + s.nq * s.dk)


def split(s: Sizes, br: int, parts: int) -> Traffic:
    """Split-KV: each part is a forward pass on its keys, then one pass merges the partial (O, L)."""
    reads = parts * s.nq * s.dk + _tiles(s.nq, br) * s.kv + parts * s.nq * (s.dv + 1)
    return Traffic(reads, (parts + 1) * s.nq * (s.dv + 1))


def causal_live_keys(n: int, side: int) -> int:
    """C of the causal mask for Nq = Nk = N and square tiles: side T(T-1)/2 + N."""
    t = _tiles(n, side)
    return side * t * (t - 1) // 2 + n


def _tiles(n: int, size: int) -> int:
    check_tile(size, size)
    return count(n, size)
