"""Slow-memory traffic of the emitted mma.sync backward kernels, in bytes of each tensor: closed formulas for calls.

Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2 with empty tiles skipped (`io_counts.flash2_backward_masked`),
as `codegen/templates/sm80/backward_sm80.cu.j2` carries it out. Two forms:

  * default: `prepare` (D and LSE log2 e to "rows", zeroes "sums"), `key_tiles` (dK and dV on chip, dQ added to "sums"
    by reductions: a read and a write each), `finish_dq` (sums to dQ);
  * deterministic, or dQ alone: `prepare`, `key_tiles` without sums, `query_tiles` (Algorithm 2 by rows: dQ on chip).

What is the kernels' own, none of which is in the paper's count:

  * O is read once, by `prepare`, and dO by it and by each pass. "rows" and "sums" are padded to whole tiles of rows,
    "sums" also to whole columns of the matrix unit. `finish_dq` and `query_tiles` read a row's statistic once per
    thread that holds a part of the row.
  * K and V, and dK and dV, count once per K/V head: all query heads that share one pass through the same block.
  * A key tile reads of Q and dO only rows that see its first key, if there were a row for it: from `first_row` on. It
    visits the tile that this row would be in even where no such row exists (keys beyond the last row, from the top
    left).
  * With key lengths, every thread of a block reads its entry's length. A length outside [0, Nk] stands for no keys.

`io_backward_loops.py` counts the same by walking the blocks; tests hold the two equal, and `python -m verify io` holds
both against the kernels' own loads and stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spec import io_counts, masks
from spec.io_counts import Sizes
from spec.io_kernels import LENGTH_BYTES, LSE_BYTES, STATISTIC_BYTES, Bytes, Call, parts
from spec.tiling import check_tile, count

TENSORS = ("q", "k", "v", "o", "do", "lse", "dlse", "key_lengths", "rows", "sums", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")
ROWS_BYTES = 8  # LSE log2 e and D of a row, float32
LANES_PER_ROW = 4  # threads that hold a row of an accumulator of the matrix unit


@dataclass(frozen=True, kw_only=True)
class BackwardKernel:
    """What the traffic of one plan depends on. `br`, `bc`, `threads` are those of `key_tiles`."""

    br: int
    bc: int
    threads: int
    d_padded: int  # d in whole steps of the matrix unit
    tile_sums: int  # float32 of one tile of "sums", unused ones included
    dq_column_warps: int  # warps that share a row of dQ in `finish_dq`
    query_br: int  # the tile of `query_tiles`
    query_bc: int
    query_threads: int
    itemsize: int = 2
    gradient_itemsize: int = 2  # 4 in the debug form

    def __post_init__(self) -> None:
        check_tile(self.br, self.bc)
        check_tile(self.query_br, self.query_bc)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is asked of a call: which gradients, whether equal calls must give equal bits, and whether LSE has a
    gradient."""

    wanted: tuple[str, ...] = GRADIENTS
    deterministic: bool = False
    dlse: bool = False

    @property
    def key_tiles(self) -> bool:
        return "dk" in self.wanted or "dv" in self.wanted

    @property
    def query_tiles(self) -> bool:
        return "dq" in self.wanted and (self.deterministic or not self.key_tiles)

    @property
    def sums(self) -> bool:
        return "dq" in self.wanted and not self.query_tiles


DEFAULT = Form()


def backward(call: Call, kernel: BackwardKernel, form: Form = DEFAULT) -> Bytes:
    """Bytes that the kernels of one call move. Holds for contiguous and strided tensors alike."""
    read, written = dict.fromkeys(TENSORS, 0), dict.fromkeys(TENSORS, 0)
    for entry in range(call.batch):
        _prepare(call, kernel, form, read, written)
        if form.key_tiles:
            _key_tiles(call, entry, kernel, form, read, written)
        if form.sums:
            _finish_dq(call, entry, kernel, read, written)
        if form.query_tiles:
            _query_tiles(call, entry, kernel, read, written)
    return Bytes(read=read, written=written)


def _prepare(call: Call, kernel: BackwardKernel, form: Form, read: dict[str, int], written: dict[str, int]) -> None:
    tiles = count(call.nq, kernel.br)
    for name in ("o", "do"):
        read[name] += call.hq * call.nq * call.dv * kernel.itemsize
    read["lse"] += call.hq * call.nq * LSE_BYTES
    read["dlse"] += call.hq * call.nq * LSE_BYTES * form.dlse
    written["rows"] += call.hq * tiles * kernel.br * ROWS_BYTES
    written["sums"] += call.hq * tiles * kernel.tile_sums * STATISTIC_BYTES * form.sums


def _key_tiles(
    call: Call, entry: int, kernel: BackwardKernel, form: Form, read: dict[str, int], written: dict[str, int]
) -> None:
    keys, row_tiles = call.length(entry), count(call.nq, kernel.br)
    first_key = np.arange(0, call.nk, kernel.bc, dtype=np.int64)
    first_row = np.maximum(first_key - _shift(call), 0) if call.causal is not None else np.zeros_like(first_key)
    skipped = np.where(first_key < keys, np.minimum(first_row // kernel.br, row_tiles), row_tiles)
    visited = row_tiles - skipped
    live = (visited > 0) & (call.hq > 0)
    seen = int(np.minimum(kernel.bc, keys - first_key)[live].sum())  # keys of the tiles that some row visits
    rows = call.hq * int(np.maximum(call.nq - first_row, 0)[live].sum())
    tiles = call.hq * int(visited.sum())
    read["k"] += call.hkv * seen * call.dk * kernel.itemsize
    read["v"] += call.hkv * seen * call.dv * kernel.itemsize
    read["q"] += rows * call.dk * kernel.itemsize
    read["do"] += rows * call.dv * kernel.itemsize
    read["rows"] += tiles * kernel.br * ROWS_BYTES
    if form.sums:
        added = tiles * kernel.br * kernel.d_padded * STATISTIC_BYTES
        read["sums"] += added
        written["sums"] += added
    if call.key_lengths is not None:
        read["key_lengths"] += call.hkv * len(first_key) * kernel.threads * LENGTH_BYTES
    for name, width in (("dk", call.dk), ("dv", call.dv)):
        if name in form.wanted:
            written[name] += call.hkv * call.nk * width * kernel.gradient_itemsize


def _finish_dq(call: Call, entry: int, kernel: BackwardKernel, read: dict[str, int], written: dict[str, int]) -> None:
    tiles = call.hq * count(call.nq, kernel.br)
    read["sums"] += tiles * kernel.br * kernel.d_padded * STATISTIC_BYTES
    if _is_valid(call, entry):
        read["rows"] += tiles * kernel.br * LANES_PER_ROW * kernel.dq_column_warps * STATISTIC_BYTES
    if call.key_lengths is not None:
        read["key_lengths"] += tiles * kernel.threads * LENGTH_BYTES
    written["dq"] += call.hq * call.nq * call.dk * kernel.gradient_itemsize


def _query_tiles(call: Call, entry: int, kernel: BackwardKernel, read: dict[str, int], written: dict[str, int]) -> None:
    (part,) = (part for at, part in parts(call, kernel.query_br, kernel.query_bc) if at == entry)
    rows = call.hq * (call.nq - part.idle_rows)
    read["q"] += rows * call.dk * kernel.itemsize
    read["do"] += rows * call.dv * kernel.itemsize
    read["k"] += call.hq * part.live_keys * call.dk * kernel.itemsize
    read["v"] += call.hq * part.live_keys * call.dv * kernel.itemsize
    statistics = ROWS_BYTES + STATISTIC_BYTES * _is_valid(call, entry)
    read["rows"] += call.hq * call.nq * LANES_PER_ROW * statistics
    if call.key_lengths is not None:
        read["key_lengths"] += call.hq * part.row_tiles * kernel.query_threads * LENGTH_BYTES
    written["dq"] += call.hq * call.nq * call.dk * kernel.gradient_itemsize


def flash2(call: Call, *, br: int, bc: int, itemsize: int) -> int:
    """FlashAttention-2, Algorithm 2, with empty tiles skipped: the paper's count in bytes; L, D and dQ in float32."""
    total = 0
    for _, part in parts(call, br, bc):
        s = part.sizes
        moved = io_counts.flash2_backward_masked(s, part.live_rows)
        # L5 to L15: every visit reads Li, Di and dQi and writes dQi; L3 and L4 write dQ and D once.
        wide = part.live_rows * (2 * s.dk + 2) + s.nq * (s.dk + 1)
        total += call.hq * (wide * STATISTIC_BYTES + (moved.total - wide) * itemsize)
    return total


def flash1(call: Call, *, br: int, bc: int, itemsize: int) -> int:
    """FlashAttention, Algorithm 4, with empty tiles skipped: the paper's count in bytes; l, m and dQ in float32."""
    total = 0
    for _, part in parts(call, br, bc):
        s = part.sizes
        moved = io_counts.flash1_backward_masked(s, part.live_rows)
        wide = part.live_rows * (2 * s.dk + 2) + s.nq * s.dk
        total += call.hq * (wide * STATISTIC_BYTES + (moved.total - wide) * itemsize)
    return total


def standard(call: Call, *, itemsize: int) -> int:
    """FlashAttention, Algorithm 3: P, dP and dS of every head in slow memory at the width of the inputs."""
    sizes = (Sizes(nq=call.nq, nk=call.length(entry), dk=call.dk, dv=call.dv) for entry in range(call.batch))
    return sum(call.hq * itemsize * io_counts.standard_backward(s).total for s in sizes)


def compulsory(call: Call, *, itemsize: int) -> int:
    """Bytes that every algorithm moves for all three gradients: what some pair needs of Q, dO, O, LSE, K and V, and
    dQ, dK, dV whole."""
    total = 0
    for entry in range(call.batch):
        seen_by_row = masks.row_counts(call.mask(entry), call.nq, call.nk)
        rows = int((seen_by_row > 0).sum())
        keys = int(seen_by_row.max(initial=0))  # causal and length masks: what one row sees, a longer row sees too
        total += call.hq * rows * ((call.dk + 2 * call.dv) * itemsize + LSE_BYTES)
        total += call.hkv * keys * (call.dk + call.dv) * itemsize
        total += (call.hq * call.nq * call.dk + call.hkv * call.nk * (call.dk + call.dv)) * itemsize
    return total


def _shift(call: Call) -> int:
    """Row i sees key j iff j <= i + shift."""
    return call.nk - call.nq if call.causal == masks.BOTTOM_RIGHT else 0


def _is_valid(call: Call, entry: int) -> bool:
    return call.key_lengths is None or 0 <= call.key_lengths[entry] <= call.nk
