"""Slow-memory traffic counted by walking the loops of each listing: the slow twin of `io_counts.py`.

Nothing is computed here. Each function is the listing with its arithmetic left out: every load and every store of a
tile adds that tile's elements, and a comment `# L8` names its line. Trust this file by reading it beside the paper,
and `io_counts.py` because the tests hold it equal to this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spec.io_counts import Sizes, Traffic
from spec.split import key_ranges
from spec.tiling import count, length, tiles

Array = npt.NDArray[Any]


class Counter:
    """Adds up loads and stores; a size is (rows, columns...)."""

    def __init__(self) -> None:
        self.reads = self.writes = 0

    def load(self, *size: int) -> None:
        self.reads += int(np.prod(size, dtype=np.int64))

    def store(self, *size: int) -> None:
        self.writes += int(np.prod(size, dtype=np.int64))

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.reads, self.writes)


def standard_forward(s: Sizes) -> Traffic:
    """FlashAttention, Algorithm 0: three kernels."""
    c = Counter()
    c.load(s.nq, s.dk)  # L1 Q
    c.load(s.nk, s.dk)  # L1 K
    c.store(s.nq, s.nk)  # L1 S
    c.load(s.nq, s.nk)  # L2 S
    c.store(s.nq, s.nk)  # L2 P
    c.load(s.nq, s.nk)  # L3 P
    c.load(s.nk, s.dv)  # L3 V
    c.store(s.nq, s.dv)  # L3 O
    return c.traffic


def standard_backward(s: Sizes) -> Traffic:
    """FlashAttention, Algorithm 3: five kernels."""
    c = Counter()
    c.load(s.nq, s.nk)  # L1 P
    c.load(s.nq, s.dv)  # L1 dO
    c.store(s.nk, s.dv)  # L1 dV
    c.load(s.nq, s.dv)  # L2 dO
    c.load(s.nk, s.dv)  # L2 V
    c.store(s.nq, s.nk)  # L2 dP
    c.load(s.nq, s.nk)  # L3 P
    c.load(s.nq, s.nk)  # L3 dP
    c.store(s.nq, s.nk)  # L3 dS
    c.load(s.nq, s.nk)  # L4 dS
    c.load(s.nk, s.dk)  # L4 K
    c.store(s.nq, s.dk)  # L4 dQ
    c.load(s.nq, s.nk)  # L5 dS
    c.load(s.nq, s.dk)  # L5 Q
    c.store(s.nk, s.dk)  # L5 dK
    return c.traffic


def flash1_forward(s: Sizes, br: int, bc: int) -> Traffic:
    """FlashAttention, Algorithms 1 and 2."""
    live = np.ones((count(s.nq, br), count(s.nk, bc)), dtype=bool)
    return block_sparse(s, br, bc, live)


def block_sparse(s: Sizes, br: int, bc: int, live: Array, *, skip_empty_columns: bool = False) -> Traffic:
    """FlashAttention, Algorithm 5; with every tile live it is Algorithm 1. live: boolean (Tr, Tc)."""
    c = Counter()
    c.store(s.nq, s.dv + 2)  # L2 O, l, m
    for j, cols in tiles(s.nk, bc):  # L5 (Algorithm 5: L4)
        if skip_empty_columns and not live[:, j].any():
            continue
        c.load(length(cols), s.dk + s.dv)  # L6 Kj, Vj
        for i, rows in tiles(s.nq, br):  # L7
            if live[i, j]:
                c.load(length(rows), s.dk)  # L8 Qi
                c.load(length(rows), s.dv + 2)  # L8 Oi, li, mi
                c.store(length(rows), s.dv)  # L12 Oi
                c.store(length(rows), 2)  # L13 li, mi
    return c.traffic


def flash1_backward(s: Sizes, br: int, bc: int, live: Array | None = None) -> Traffic:
    """FlashAttention, Algorithm 4. live: boolean (Tr, Tc), tiles that are not skipped (default: all)."""
    c = Counter()
    c.store(s.nq, s.dk)  # L5 dQ = 0
    c.store(s.nk, s.dk + s.dv)  # L5 dK, dV = 0
    for j, cols in tiles(s.nk, bc):  # L6
        c.load(length(cols), s.dk + s.dv)  # L7 Kj, Vj
        for i, rows in tiles(s.nq, br):  # L9
            if live is None or live[i, j]:
                c.load(length(rows), 2 * s.dk)  # L10 Qi, dQi
                c.load(length(rows), 2 * s.dv)  # L10 Oi, dOi
                c.load(length(rows), 2)  # L10 li, mi
                c.store(length(rows), s.dk)  # L21 dQi
        c.store(length(cols), s.dk + s.dv)  # L24 dKj, dVj
    return c.traffic


def flash2_forward(s: Sizes, br: int, bc: int, live: Array | None = None) -> Traffic:
    """FlashAttention-2, Algorithm 1. live: boolean (Tr, Tc), tiles that are not skipped (default: all)."""
    c = Counter()
    for i, rows in tiles(s.nq, br):  # L3
        c.load(length(rows), s.dk)  # L4 Qi
        for j, cols in tiles(s.nk, bc):  # L6
            if live is None or live[i, j]:
                c.load(length(cols), s.dk + s.dv)  # L7 Kj, Vj
        c.store(length(rows), s.dv)  # L14 Oi
        c.store(length(rows), 1)  # L15 Li
    return c.traffic


def flash2_backward(s: Sizes, br: int, bc: int, live: Array | None = None, *, as_printed: bool = False) -> Traffic:
    """FlashAttention-2, Algorithm 2. As printed, L9 loads Oi and dQi too, and L15 loads dQi again."""
    c = Counter()
    c.store(s.nq, s.dk)  # L3 dQ = 0
    c.load(s.nq, 2 * s.dv)  # L4 dO, O
    c.store(s.nq, 1)  # L4 D
    for j, cols in tiles(s.nk, bc):  # L5
        c.load(length(cols), s.dk + s.dv)  # L6 Kj, Vj
        for i, rows in tiles(s.nq, br):  # L8
            if live is None or live[i, j]:
                c.load(length(rows), s.dk + s.dv + 2)  # L9 Qi, dOi, Li, Di
                if as_printed:
                    c.load(length(rows), s.dv + s.dk)  # L9 Oi, dQi
                c.load(length(rows), s.dk)  # L15 dQi
                c.store(length(rows), s.dk)  # L15 dQi
        c.store(length(cols), s.dk + s.dv)  # L18 dKj, dVj
    return c.traffic


def flash2_backward_by_rows(s: Sizes, br: int, bc: int, live: Array | None = None) -> Traffic:
    """FlashAttention-2, Algorithm 2, with L5 and L8 exchanged: what L3 zeroes and L15 to L18 move exchange as well."""
    c = Counter()
    c.store(s.nk, s.dk + s.dv)  # L3 dK, dV = 0
    for i, rows in tiles(s.nq, br):  # L8
        c.load(length(rows), s.dk + 2 * s.dv + 1)  # L4, L9 Qi, dOi, Oi, Li; Di stays on chip
        for j, cols in tiles(s.nk, bc):  # L5
            if live is None or live[i, j]:
                c.load(length(cols), s.dk + s.dv)  # L6 Kj, Vj
                c.load(length(cols), s.dk + s.dv)  # L12, L16 dKj, dVj
                c.store(length(cols), s.dk + s.dv)  # L12, L16 dKj, dVj
        c.store(length(rows), s.dk)  # L15 dQi
    return c.traffic


def split(s: Sizes, br: int, bc: int, parts: int) -> Traffic:
    """Flash-Decoding: one FlashAttention-2 pass per key range, then the merge."""
    c = Counter()
    for start, stop in key_ranges(s.nk, parts):
        part = flash2_forward(Sizes(nq=s.nq, nk=stop - start, dk=s.dk, dv=s.dv), br, bc)
        c.reads += part.reads
        c.writes += part.writes
    for _ in range(parts):
        c.load(s.nq, s.dv + 1)  # partial O, L
    c.store(s.nq, s.dv + 1)
    return c.traffic
