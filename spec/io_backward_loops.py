"""Slow-memory traffic of the emitted backward kernels counted block by block: the slow twin of `io_backward.py`.

Nothing is computed here but which tiles a block visits, row by row and key by key. Read it beside the kernels
(`codegen/templates/sm80/backward_sm80.cu.j2`): each load and store adds the rows that exist, times what a row takes.
"""

from __future__ import annotations

from spec import masks
from spec.io_backward import DEFAULT, TENSORS, BackwardKernel, Form
from spec.io_kernels import Bytes, Call
from spec.tiling import length, tiles


class _Moved:
    def __init__(self) -> None:
        self.read, self.written = dict.fromkeys(TENSORS, 0), dict.fromkeys(TENSORS, 0)

    def load(self, name: str, rows: int, row_bytes: int) -> None:
        self.read[name] += rows * row_bytes

    def store(self, name: str, rows: int, row_bytes: int) -> None:
        self.written[name] += rows * row_bytes


def backward(call: Call, kernel: BackwardKernel, form: Form = DEFAULT) -> Bytes:
    """Bytes that the blocks of one call move, per tensor."""
    moved, group = _Moved(), call.hq // call.hkv
    for entry in range(call.batch):
        for _ in range(call.hq):
            for _, rows in tiles(call.nq, kernel.br):
                _prepare(moved, call, kernel, form, rows)
        if form.key_tiles:
            for _ in range(call.hkv):
                for _, cols in tiles(call.nk, kernel.bc):
                    _key_tile(moved, call, entry, kernel, form, cols, group)
        for _ in range(call.hq):
            if form.sums:
                for _, rows in tiles(call.nq, kernel.br):
                    _finish_dq(moved, call, entry, kernel, rows)
            if form.query_tiles:
                for _, rows in tiles(call.nq, kernel.query_br):
                    _query_tile(moved, call, entry, kernel, rows)
    return Bytes(read=moved.read, written=moved.written)


def _prepare(moved: _Moved, call: Call, kernel: BackwardKernel, form: Form, rows: slice) -> None:
    moved.load("o", length(rows), call.dv * kernel.itemsize)
    moved.load("do", length(rows), call.dv * kernel.itemsize)
    moved.load("lse", length(rows), 4)
    if form.dlse:
        moved.load("dlse", length(rows), 4)
    moved.store("rows", kernel.br, 8)
    if form.sums:
        moved.store("sums", kernel.tile_sums, 4)


def _key_tile(
    moved: _Moved, call: Call, entry: int, kernel: BackwardKernel, form: Form, cols: slice, group: int
) -> None:
    keys = call.length(entry)
    if call.key_lengths is not None:
        moved.load("key_lengths", kernel.threads, 8)
    first = cols.start if cols.start < keys else None  # the key that the first rows are asked about
    visited = (
        [] if first is None else [rows for _, rows in tiles(call.nq, kernel.br) if _reaches(call, rows, first, kernel)]
    )
    if visited and group:
        moved.load("k", min(cols.stop, keys) - cols.start, call.dk * kernel.itemsize)
        moved.load("v", min(cols.stop, keys) - cols.start, call.dv * kernel.itemsize)
    for _ in range(group):
        for rows in visited:
            seeing = sum(_sees(call, row, cols.start) for row in range(rows.start, rows.stop))
            moved.load("q", seeing, call.dk * kernel.itemsize)
            moved.load("do", seeing, call.dv * kernel.itemsize)
            moved.load("rows", kernel.br, 8)
            if form.sums:  # a reduction reads and writes
                moved.load("sums", kernel.br, kernel.d_padded * 4)
                moved.store("sums", kernel.br, kernel.d_padded * 4)
    for name, width in (("dk", call.dk), ("dv", call.dv)):
        if name in form.wanted:
            moved.store(name, length(cols), width * kernel.gradient_itemsize)


def _finish_dq(moved: _Moved, call: Call, entry: int, kernel: BackwardKernel, rows: slice) -> None:
    if call.key_lengths is not None:
        moved.load("key_lengths", kernel.threads, 8)
    moved.load("sums", kernel.br, kernel.d_padded * 4)
    if _states_a_length(call, entry):
        moved.load("rows", kernel.br, 4 * kernel.dq_column_warps * 4)  # 4 lanes of every warp that shares the row
    moved.store("dq", length(rows), call.dk * kernel.gradient_itemsize)


def _query_tile(moved: _Moved, call: Call, entry: int, kernel: BackwardKernel, rows: slice) -> None:
    keys = call.length(entry)
    if call.key_lengths is not None:
        moved.load("key_lengths", kernel.query_threads, 8)
    moved.load("rows", length(rows), 4 * 8)  # 4 lanes
    live = [cols for _, cols in tiles(keys, kernel.query_bc) if _sees(call, rows.stop - 1, cols.start)]
    if live:
        moved.load("q", length(rows), call.dk * kernel.itemsize)
        moved.load("do", length(rows), call.dv * kernel.itemsize)
    for cols in live:
        moved.load("k", length(cols), call.dk * kernel.itemsize)
        moved.load("v", length(cols), call.dv * kernel.itemsize)
    if _states_a_length(call, entry):
        moved.load("rows", length(rows), 4 * 4)
    moved.store("dq", length(rows), call.dk * kernel.gradient_itemsize)


def _sees(call: Call, row: int, key: int) -> bool:
    """Whether the causal mask, if there is one, shows a key to a row."""
    if call.causal is None:
        return True
    return key <= row + (call.nk - call.nq if call.causal == masks.BOTTOM_RIGHT else 0)


def _reaches(call: Call, rows: slice, key: int, kernel: BackwardKernel) -> bool:
    """Whether a row of the whole tile, beyond the last row as well, sees the key."""
    return _sees(call, rows.start + kernel.br - 1, key)


def _states_a_length(call: Call, entry: int) -> bool:
    return call.key_lengths is None or 0 <= call.key_lengths[entry] <= call.nk
