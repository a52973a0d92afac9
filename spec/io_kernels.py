"""Slow-memory traffic of the emitted forward kernels, in bytes of each tensor: closed formulas for whole calls.

Source: `io_counts.flash2_forward_masked` (FlashAttention-2, arXiv:2307.08691, Algorithm 1, empty tiles skipped), summed
over batch entries and query heads and weighed by the width of each tensor. A block of the kernel is one row tile of
one query head, so K and V count once per *query* head (`io_counts`: once per K/V head only if its query heads share a
tile row). Three terms are the kernel's own, none of which is in the paper's count:

  * A row tile without a live key tile returns O = 0 and L = -inf without reading its rows of Q: `Part.idle_rows`.
  * Keys end at the batch entry's length, not at Nk: C sums min(n_i Bc, length), and n_i counts tiles below the length.
  * With key lengths, every thread of a block reads its entry's length, a word of 8 bytes: it decides which tiles the
    block visits, and a load by all is cheaper than one load and a broadcast through shared memory.

`io_kernel_loops.py` counts the same by walking the blocks; tests hold the two equal, and `python -m verify io` holds
both against the kernel's own loads and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from spec import io_counts, masks
from spec.errors import ShapeError
from spec.io_counts import Sizes, Traffic
from spec.tiling import check_tile, count

LSE_BYTES = 4  # one float32 per row
LENGTH_BYTES = 8  # one int64 per batch entry
STATISTIC_BYTES = 4  # l and m of Algorithm 1 of FlashAttention: float32 in every kernel that we know
TENSORS = ("q", "k", "v", "o", "lse", "key_lengths")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the op. Q (B,Hq,Nq,dk), K (B,Hkv,Nk,dk), V (B,Hkv,Nk,dv); query head h reads K/V head h Hkv/Hq."""

    nq: int
    nk: int
    dk: int
    dv: int
    batch: int = 1
    hq: int = 1
    hkv: int = 1
    causal: str | None = None  # masks.BOTTOM_RIGHT or masks.TOP_LEFT
    key_lengths: tuple[int, ...] | None = None  # a length outside [0, Nk] reads no key

    def __post_init__(self) -> None:
        lengths = self.key_lengths
        if (lengths is not None and len(lengths) != self.batch) or self.hkv < 1 or self.hq % self.hkv:
            raise ShapeError(f"B={self.batch} Hq={self.hq} Hkv={self.hkv} key_lengths={lengths}")

    def length(self, entry: int) -> int:
        """Keys that exist for a batch entry."""
        if self.key_lengths is None:
            return self.nk
        stated = self.key_lengths[entry]
        return stated if 0 <= stated <= self.nk else 0

    def mask(self, entry: int) -> masks.Mask:
        """Which (row, key) pairs of a batch entry are allowed."""
        length = None if self.key_lengths is None else self.length(entry)
        return masks.of_call(self.causal or False, length)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one query head of a batch entry contributes, in elements of its tensors."""

    sizes: Sizes
    live_keys: int  # C: keys of all live tiles together
    live_rows: int  # R: rows of all live tiles together
    idle_rows: int  # rows of the row tiles without a live tile
    row_tiles: int


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes read and written per tensor, in the order of TENSORS."""

    read: dict[str, int]
    written: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())


def parts(call: Call, br: int, bc: int) -> Iterator[tuple[int, Part]]:
    """(batch entry, its part); each holds for every one of the call's query heads."""
    check_tile(br, bc)
    rows = np.minimum(br, call.nq - np.arange(0, call.nq, br, dtype=np.int64))
    for entry in range(call.batch):
        length = call.length(entry)
        live = np.full(count(call.nq, br), count(length, bc), dtype=np.int64)  # n_i
        if call.causal is not None:
            live = np.minimum(live, masks.causal_tiles(call.nq, call.nk, br, bc, call.causal)[0])
        yield (
            entry,
            Part(
                sizes=Sizes(nq=call.nq, nk=length, dk=call.dk, dv=call.dv),
                live_keys=int(np.minimum(live * bc, length).sum()),
                live_rows=int((live * rows).sum()),
                idle_rows=int(rows[live == 0].sum()),
                row_tiles=len(rows),
            ),
        )


def forward(call: Call, *, br: int, bc: int, threads: int, itemsize: int, o_itemsize: int | None = None) -> Bytes:
    """Bytes that the emitted forward kernel moves. o_itemsize: bytes of an element of O if not those of Q, K, V.

    Holds for contiguous and strided tensors alike: rows are read and written by their own width, gaps are not touched.
    """
    read, written = dict.fromkeys(TENSORS, 0), dict.fromkeys(TENSORS, 0)
    for _, part in parts(call, br, bc):
        s = part.sizes
        read["q"] += call.hq * itemsize * (s.nq - part.idle_rows) * s.dk
        read["k"] += call.hq * itemsize * part.live_keys * s.dk
        read["v"] += call.hq * itemsize * part.live_keys * s.dv
        written["o"] += call.hq * (o_itemsize or itemsize) * s.nq * s.dv
        written["lse"] += call.hq * LSE_BYTES * s.nq
        if call.key_lengths is not None:
            read["key_lengths"] += call.hq * part.row_tiles * threads * LENGTH_BYTES
    return Bytes(read=read, written=written)


def own_terms(
    call: Call, *, br: int, bc: int, threads: int, itemsize: int, o_itemsize: int | None = None
) -> dict[str, int]:
    """The kernel's bytes minus the paper's (`flash2`), by reason."""
    every = list(parts(call, br, bc))
    idle = sum(part.idle_rows for _, part in every)
    blocks = call.hq * sum(part.row_tiles for _, part in every)
    lengths = 0 if call.key_lengths is None else blocks * threads * LENGTH_BYTES
    wider = (o_itemsize or itemsize) - itemsize
    return {
        "Q rows of row tiles without a live key tile, not read": -call.hq * itemsize * idle * call.dk,
        "key length of the batch entry, read by every thread of a block": lengths,
        "O stored wider than the inputs, as the debug form does": wider * call.batch * call.hq * call.nq * call.dv,
    }


def flash2(call: Call, *, br: int, bc: int, itemsize: int) -> int:
    """FlashAttention-2, Algorithm 1, with empty tiles skipped: the paper's count, L in float32."""

    def traffic(s: Sizes, part: Part) -> Traffic:
        return io_counts.flash2_forward_masked(s, part.live_keys)

    return sum(call.hq * _weighed(traffic, part, itemsize, LSE_BYTES) for _, part in parts(call, br, bc))


def flash1(call: Call, *, br: int, bc: int, itemsize: int) -> int:
    """FlashAttention, Algorithm 1 (Algorithm 5 where a mask leaves tiles empty), l and m in float32."""

    def traffic(s: Sizes, part: Part) -> Traffic:
        return io_counts.block_sparse(s, part.live_rows)

    return sum(call.hq * _weighed(traffic, part, itemsize, STATISTIC_BYTES) for _, part in parts(call, br, bc))


def standard(call: Call, *, itemsize: int) -> int:
    """FlashAttention, Algorithm 0: S and P of every head in slow memory at the width of the inputs; no tile to skip."""
    sizes = (Sizes(nq=call.nq, nk=call.length(entry), dk=call.dk, dv=call.dv) for entry in range(call.batch))
    return sum(call.hq * itemsize * io_counts.standard_forward(s).total for s in sizes)


def pairs(call: Call) -> int:
    """Allowed (row, key) pairs of all query heads: the dot products that every algorithm must form."""
    return call.hq * sum(int(masks.row_counts(call.mask(entry), call.nq, call.nk).sum()) for entry in range(call.batch))


def compulsory(call: Call) -> int:
    """Elements that every algorithm moves: rows of Q that see a key, keys that some row sees with their values, O."""
    moved = 0
    for entry in range(call.batch):
        seen_by_row = masks.row_counts(call.mask(entry), call.nq, call.nk)
        rows = int((seen_by_row > 0).sum())
        keys = int(seen_by_row.max(initial=0))  # causal and length masks: what one row sees, a longer row sees too
        moved += call.hq * rows * call.dk + call.hkv * keys * (call.dk + call.dv) + call.hq * call.nq * call.dv
    return moved


def _weighed(traffic: Callable[[Sizes, Part], Traffic], part: Part, itemsize: int, statistic: int) -> int:
    """Bytes of a count; what is left of it at dk = dv = 0 is its statistics, which have a width of their own."""
    bare = Sizes(nq=part.sizes.nq, nk=part.sizes.nk, dk=0, dv=0)
    statistics = traffic(bare, part).total
    return (traffic(part.sizes, part).total - statistics) * itemsize + statistics * statistic
