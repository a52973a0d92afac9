"""The emitted sm_80 forward kernel on the emulator: exact results, exact counts, and what breaks when it is broken.

The inputs make attention a selection that no rounding touches: key j carries the bits of j as +-1, query i is 64 times
the code of the one key that it selects. Every other score is lower by 896 or more, so its weight is exactly 0; O is
that key's row of V, bit for bit, and LSE the score itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from verify import packages, sanitize
from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, Run, guarded, guarded_copy
from verify.entry_points import DTYPE_CODES, ForwardArgs

FULL, BOTTOM_RIGHT, TOP_LEFT = range(3)  # csrc/forward.h
FACTOR = 64  # of the queries
BITS = 9  # of a key's number


@dataclass(frozen=True)
class Shape:
    nq: int = 150
    nk: int = 300
    causal: int = FULL
    lengths: tuple[int, ...] | None = None
    b: int = 1
    hq: int = 1
    hkv: int = 1
    dtype: str = "bf16"

    def seen(self, batch: int, row: int) -> int:
        """How many keys the row sees; they are the first ones."""
        keys = self.lengths[batch] if self.lengths else self.nk
        reach = {FULL: self.nk, BOTTOM_RIGHT: row + 1 + self.nk - self.nq, TOP_LEFT: row + 1}[self.causal]
        return max(0, min(keys, reach))


SHAPES = {
    "full": Shape(),
    "bottom-right": Shape(causal=BOTTOM_RIGHT),
    "top-left, fp16": Shape(causal=TOP_LEFT, dtype="fp16"),
    "rows without keys": Shape(nk=100, causal=BOTTOM_RIGHT),
    "lengths and groups": Shape(nq=70, b=2, hq=4, hkv=2, lengths=(300, 211), causal=BOTTOM_RIGHT),
    "one row": Shape(nq=1, nk=1),
}


def half_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of numbers that the format holds exactly."""
    if dtype == "fp16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def selection(shape: Shape, d: int):
    """q, k, v of the selection, as float64, and the O and LSE that it must give. d = dv."""
    rng = np.random.default_rng(0)
    repeats = d // BITS
    codes = np.zeros((shape.nk, d))
    codes[:, : BITS * repeats] = np.repeat((np.arange(shape.nk)[:, None] >> np.arange(BITS) & 1) * 2.0 - 1, repeats, 1)
    k = np.broadcast_to(codes, (shape.b, shape.hkv, *codes.shape))
    v = rng.integers(-128, 128, (shape.b, shape.hkv, shape.nk, d)).astype(float)
    q = np.full((shape.b, shape.hq, shape.nq, d), 0.5)
    o = np.zeros(q.shape)
    lse = np.full(q.shape[:3], -np.inf)
    for batch, head, row in np.ndindex(*q.shape[:3]):
        seen = shape.seen(batch, row)
        if seen:
            chosen = rng.integers(seen)
            q[batch, head, row] = FACTOR * codes[chosen]
            o[batch, head, row] = v[batch, head // (shape.hq // shape.hkv), chosen]
            lse[batch, head, row] = FACTOR * BITS * repeats
    return q, k, v, o, lse


def forward(emulator: Emulator, shape: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray):
    """Launches with scale 1. Returns the run, the bits of O, and LSE."""
    arrays = {n: guarded_copy(half_bits(x, shape.dtype)) for n, x in (("q", q), ("k", k), ("v", v))}
    arrays["o"] = guarded((*q.shape[:3], v.shape[3]), np.uint16)
    arrays["lse"] = guarded(q.shape[:3], np.float32)
    if shape.lengths:
        arrays["key_lengths"] = guarded_copy(np.array(shape.lengths, dtype=np.int64))
    args = ForwardArgs(
        **{name: array.ctypes.data for name, array in arrays.items()},
        B=shape.b, Hq=shape.hq, Hkv=shape.hkv, Nq=shape.nq, Nk=shape.nk, scale=1.0, causal=shape.causal,
    )  # fmt: skip
    for name in ("q", "k", "v", "o"):
        strides = [s // 2 for s in arrays[name].strides[:3]]
        setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*strides))
    emulator.clear()
    for name, array in arrays.items():
        emulator.register(name, array, once=name in ("o", "lse"))
    run = emulator.launch("attention_forward_sm80", ctypes.byref(args), DTYPE_CODES[shape.dtype], None)
    return run, arrays["o"], arrays["lse"]


@pytest.fixture(scope="module", params=[64, 128], ids=["d64", "d128"])
def default(request):
    """The plan and the emulator of a default package."""
    folder = packages.emit(d=request.param, archs=("sm80",))
    return packages.plan(folder)["variants"][0]["plan"], Emulator(build.package(folder)), request.param


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_rows_select_their_key_exactly_in_every_schedule(default, shape):
    _, emulator, d = default
    q, k, v, o, lse = selection(shape, d)
    for schedule in SCHEDULES:
        emulator.configure(schedule)
        run, got_o, got_lse = forward(emulator, shape, q, k, v)
        run.check(schedule.name)
        assert np.array_equal(got_o, half_bits(o, shape.dtype)), schedule
        assert np.array_equal(got_lse, lse.astype(np.float32)), schedule


def tiles(n: int, size: int) -> int:
    return -(-n // size)


def test_counts_are_those_of_the_algorithm(default):
    plan, emulator, d = default
    shape = Shape(nq=301, nk=450, b=2, hq=2)
    q, k, v, *_ = selection(shape, d)
    emulator.configure()
    run, *_ = forward(emulator, shape, q, k, v)
    counters = run.check().counters
    heads, row_tiles, key_tiles = shape.b * shape.hq, tiles(shape.nq, plan["br"]), tiles(shape.nk, plan["bc"])
    per_head = {
        "q": (2 * shape.nq * d, 0),
        "k": (2 * shape.nk * d * row_tiles, 0),
        "v": (2 * shape.nk * d * row_tiles, 0),
        "o": (0, 2 * shape.nq * d),
        "lse": (0, 4 * shape.nq),
    }
    assert {n: run.bytes(n) for n in per_head} == {n: (heads * r, heads * w) for n, (r, w) in per_head.items()}
    flops = 2 * 2 * plan["br"] * plan["bc"] * d  # of one pair of tiles
    assert counters["mma"] == heads * row_tiles * key_tiles * flops // (2 * 16 * 8 * 16)
    assert counters["barriers"] == heads * row_tiles * (2 * key_tiles + 2)
    for use in ("ldmatrix", "ld", "st", "cp_async"):  # no bank conflict anywhere
        phases, wavefronts = counters["bank"][use]
        assert phases == wavefronts > 0, use


# ---- The kernel with one thing broken

SMALL = Shape(nq=70, nk=200, hq=2, hkv=2)


@pytest.fixture(scope="module")
def small():
    """A package with small tiles, d = 64."""
    return packages.emit(sanitize.host())


@pytest.fixture(scope="module")
def overlapping():
    """A package whose O takes the place of Q, K and V in shared memory, so that each barrier is needed; d = 16."""
    return packages.emit(sram="163KB", d=16, dv=128, archs=("sm80",), br=64, bc=16)


def broken(folder: Path, old: str, new: str, which: int = 0, *, d: int = 64, dv: int = 64) -> tuple[Run, int]:
    """A launch of the package's kernel with the `which`-th `old` replaced, and the line of it."""
    parts = (folder / "csrc" / "forward_sm80.cu").read_text().split(old)
    assert len(parts) > which + 1, f"{old} is not there {which + 1} times"
    before, after = old.join(parts[: which + 1]), old.join(parts[which + 1 :])
    library = build.library(before + new + after, includes=[folder / "csrc"], name="forward_sm80.cu")
    rng = np.random.default_rng(1)
    shapes = (SMALL.nq, d), (SMALL.nk, d), (SMALL.nk, dv)
    q, k, v = (rng.standard_normal((SMALL.b, SMALL.hq, *shape)) for shape in shapes)
    return forward(Emulator(library), SMALL, q, k, v)[0], before.count("\n") + 1


def test_without_the_swizzle_every_matrix_takes_eight_wavefronts(small):
    run, _ = broken(small, "chunk ^ (row / kRowsPerLine % kChunks)", "chunk")
    bank = run.check().counters["bank"]
    for use, wavefronts in (("ldmatrix", 8), ("st", 8), ("ld", 1), ("cp_async", 1)):  # ld and cp.async go along a row
        assert bank[use][0] > 0 and bank[use][1] == wavefronts * bank[use][0], use


@pytest.mark.parametrize("statement, times", [("  __syncthreads();", 4), ("    cp_async_wait<0>();", 2)])
def test_no_wait_and_no_barrier_can_be_left_out(overlapping, statement, times):
    assert (overlapping / "csrc" / "forward_sm80.cu").read_text().count(statement) == times
    for which in range(times):
        run, _ = broken(overlapping, statement, "", which, d=16, dv=128)
        (finding,) = run.findings  # without the barrier before O is read, some of it was not even written
        assert finding.kind in ("race", "uninitialised-read") and run.code != 0, (which, finding)


def test_a_copy_of_rows_that_do_not_exist_is_out_of_bounds(small):
    run, line = broken(small, "exists ? 16 : 0", "16")
    (finding,) = run.findings
    assert (finding.kind, finding.line) == ("global-out-of-bounds", line)
    assert " bytes behind the end of '" in finding.sentence


def test_a_row_that_is_left_out_is_missed(small):
    run, _ = broken(small, "row = threadIdx.x / kLanes; row < rows;", "row = threadIdx.x / kLanes; row < rows - 1;")
    (finding,) = run.findings
    assert finding.kind == "not-written" and "'o'" in finding.sentence


def test_a_row_of_the_next_head_is_written_twice(small):
    """One row too many of head 0 lies inside of the tensor: no bound is broken."""
    run, _ = broken(small, "rows = min(kBr, p.nq - tile.row0)", "rows = min(kBr, p.nq - tile.row0 + (tile.head == 0))")
    (finding,) = run.findings
    assert finding.kind == "global-race" and finding.other is not None and "[block" in finding.sentence
