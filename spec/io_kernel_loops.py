"""Slow-memory traffic of the emitted forward kernels counted block by block: the slow twin of `io_kernels.py`.

Nothing is computed here but which key tile a block visits, and that from the mask's own predicate, pair by pair. Read
it beside the kernel (`codegen/templates/sm80/forward_sm80.cu.j2`, "One block"): each load and store of a tile adds
that tile's rows that exist, times the width of the row in memory.
"""

from __future__ import annotations

from spec import masks
from spec.io_kernels import LENGTH_BYTES, LSE_BYTES, TENSORS, Bytes, Call
from spec.tiling import length, tiles


def forward(call: Call, *, br: int, bc: int, threads: int, itemsize: int, o_itemsize: int | None = None) -> Bytes:
    """Bytes that the blocks of one call move, per tensor."""
    read, written = dict.fromkeys(TENSORS, 0), dict.fromkeys(TENSORS, 0)
    for entry in range(call.batch):
        allowed = masks.dense(call.mask(entry), call.nq, call.nk)
        for _ in range(call.hq):
            for _, rows in tiles(call.nq, br):  # one block
                if call.key_lengths is not None:
                    read["key_lengths"] += threads * LENGTH_BYTES
                live = [cols for _, cols in tiles(call.nk, bc) if allowed[rows, cols].any()]
                if live:
                    read["q"] += length(rows) * call.dk * itemsize
                for cols in live:
                    keys = min(cols.stop, call.length(entry)) - cols.start
                    read["k"] += keys * call.dk * itemsize
                    read["v"] += keys * call.dv * itemsize
                written["o"] += length(rows) * call.dv * (o_itemsize or itemsize)
                written["lse"] += length(rows) * LSE_BYTES
    return Bytes(read=read, written=written)
