"""What the mma.sync kernel reads and writes, block by block: the emitted text run under g++ with recording stand-ins.

Nothing is computed (tests/sm80/recorded.h), so tensors may have any size and lie at any address: offsets beyond 2^31
elements and grids beyond 65535 blocks are checked exactly, without a GPU and without the memory.
"""

import numpy as np
import pytest

from tests.sm80 import recorder
from tests.sm80.recorder import BF16, BOTTOM_RIGHT, FP16, FULL, TOP_LEFT, arguments

Q, K, V, O, LSE = (n << 50 for n in (1, 2, 3, 4, 5))  # where `arguments` puts the tensors
CAUSALS = pytest.mark.parametrize("causal", [FULL, BOTTOM_RIGHT, TOP_LEFT])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorder")
    return lambda **asked: recorder.recorder(folder, **asked)


def touched(accesses, base):
    """Every byte of one tensor that is accessed, as offsets from its base, in order of access."""
    mine = accesses[(accesses[:, 0] >= base) & (accesses[:, 0] < base + (1 << 50))]
    if len(mine) == 0:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([at - base + np.arange(size) for at, size in mine])


def visible(nq, nk, causal, length):
    """(nq, nk) bool, from the definition."""
    i, j = np.arange(nq)[:, None], np.arange(nk)[None, :]
    last = {FULL: nk, BOTTOM_RIGHT: i + nk - nq, TOP_LEFT: i}[causal]
    return (j <= last) & (j < length)


@pytest.mark.field("R063", "R105", "R106")
@CAUSALS
@pytest.mark.parametrize("d, dv", [(64, 64), (72, 24), (8, 136), (24, 40)])
def test_every_output_element_is_written_once(kernel, d, dv, causal):
    run = kernel(d=d, dv=dv, br=32, bc=16).run
    for nq, nk in ((1, 1), (31, 17), (32, 16), (33, 0), (96, 40), (70, 5), (5, 70)):  # one, two and three row tiles
        record = run(arguments(b=2, hq=4, hkv=2, nq=nq, nk=nk, d=d, dv=dv, causal=causal))
        assert record.error == 0
        assert np.array_equal(np.sort(touched(record.writes, O)), np.arange(2 * 2 * 4 * nq * dv))
        assert np.array_equal(np.sort(touched(record.writes, LSE)), np.arange(4 * 2 * 4 * nq))
        assert len(record.writes) == 2 * 4 * nq * (dv // 8 + 1), "writes go to O and LSE only"


@pytest.mark.field("R006", "R007")
@CAUSALS
def test_keys_that_no_row_sees_are_never_read_and_the_others_are(kernel, causal):
    d, dv, nq, nk, lengths = 40, 72, 50, 77, np.array([0, 1, 33, 77])
    record = kernel(d=d, dv=dv, br=32, bc=16).run(
        arguments(b=4, hq=2, hkv=1, nq=nq, nk=nk, d=d, dv=dv, causal=causal, lengths=lengths)
    )
    for base, width in ((K, d), (V, dv)):
        read_bytes = np.unique(touched(record.reads, base))
        rows = np.unique(read_bytes // (2 * width))
        assert np.array_equal(read_bytes, (rows[:, None] * 2 * width + np.arange(2 * width)).ravel()), "whole rows"
        for b, length in enumerate(lengths):
            seen = np.flatnonzero(visible(nq, nk, causal, length).any(axis=0))
            read = rows[(rows >= b * nk) & (rows < (b + 1) * nk)] - b * nk
            assert set(seen) <= set(read), "a visible key is missing"
            assert len(read) == 0 or read.max() < length, "a key beyond the length is read"


@pytest.mark.parametrize("length", [-1, 21, 2**40])
def test_a_length_out_of_range_reads_no_key_and_still_writes(kernel, length):
    lengths = np.array([20, length])
    record = kernel(d=16, br=16, bc=16).run(arguments(b=2, nq=20, nk=20, d=16, dv=16, lengths=lengths))
    assert touched(record.reads, K).max() < 2 * 20 * 16 and touched(record.reads, V).max() < 2 * 20 * 16
    assert len(np.unique(touched(record.writes, O))) == 2 * 2 * 20 * 16


def test_each_query_head_reads_its_group_of_keys(kernel):
    nq, nk, d = 16, 16, 16
    run = kernel(d=d, br=16, bc=16)
    for hq, hkv in ((6, 2), (4, 4), (3, 1)):
        args = arguments(b=2, hq=hq, hkv=hkv, nq=nq, nk=nk, d=d, dv=d)
        for block in range(2 * hq):
            record = run.run(args, blocks=[block])
            bh = touched(record.reads, Q)[0] // (2 * nq * d)
            for base in (K, V):
                want = bh // hq * hkv + bh % hq // (hq // hkv)
                assert set(touched(record.reads, base) // (2 * nk * d)) == {want}


@pytest.mark.field("R043", "R045")
def test_any_strides_reach_the_right_rows(kernel):
    b, h, nq, nk, d = 2, 3, 20, 18, 24
    strides = {
        "q": (nq * h * d, d, h * d),  # (B, N, H, d) transposed
        "k": (nk * (d + 8), 0, d + 8),  # one head for all, a slice of wider rows
        "v": (8, 8 * b, 8 * b * h),  # (N, H, B, 8 of d)
        "o": (d, b * d, h * b * d),
    }
    record = kernel(d=d, dv=8, br=16, bc=16).run(arguments(b=b, hq=h, hkv=h, nq=nq, nk=nk, d=d, dv=8, strides=strides))
    for name, base, rows, width, accesses in (
        ("q", Q, nq, d, record.reads), ("k", K, nk, d, record.reads),
        ("v", V, nk, 8, record.reads), ("o", O, nq, 8, record.writes),
    ):  # fmt: skip
        sb, sh, sr = strides[name]
        at = (np.arange(b) * sb)[:, None, None, None] + (np.arange(h) * sh)[:, None, None]
        at = at + (np.arange(rows) * sr)[:, None] + np.arange(width)
        assert np.array_equal(np.unique(touched(accesses, base) // 2), np.unique(at)), name


@pytest.mark.field("R073", "R077")
@pytest.mark.parametrize(
    "b, h, n, d",
    [(1600, 16, 729, 72), (511, 32, 512, 256), (512, 32, 512, 256), (513, 32, 512, 256), (4, 2, 2**25, 128)],
)
def test_offsets_are_exact_on_both_sides_of_2_to_the_31(kernel, b, h, n, d):
    run = kernel(d=d, br=32, bc=16)
    strides = dict.fromkeys("qkvo", (n * h * d, d, h * d))  # (B, N, H, d) transposed
    args = arguments(b=b, hq=h, hkv=h, nq=n, nk=n, d=d, dv=d, strides=strides, lengths=np.full(b, 20))
    tiles = -(-n // 32)
    for bh in (0, b * h // 2, b * h - 1):
        for tile in (0, tiles - 1):
            record = run.run(args, blocks=[bh * tiles + tiles - 1 - tile])
            rows = np.arange(32 * tile, min(32 * tile + 32, n))
            start = bh // h * n * h * d + bh % h * d
            for base, seen, accesses in ((Q, rows, record.reads), (K, np.arange(20), record.reads),
                                         (V, np.arange(20), record.reads), (O, rows, record.writes)):  # fmt: skip
                want = 2 * (start + seen[:, None] * h * d) + np.arange(2 * d)
                assert np.array_equal(np.sort(touched(accesses, base)), want.ravel())
            want = 4 * (bh * n + rows[:, None]) + np.arange(4)
            assert np.array_equal(np.sort(touched(record.writes, LSE)), want.ravel())


@pytest.mark.field("R075")
@pytest.mark.parametrize("b, h, n, d", [(65536, 1, 16, 80), (1, 65536, 10, 16), (80000, 1, 16, 16), (1, 1, 2**23, 16)])
def test_more_than_65535_batches_heads_or_tiles_are_one_grid(kernel, b, h, n, d):
    run = kernel(d=d, br=16, bc=16)
    blocks = b * h * -(-n // 16)
    record = run.run(arguments(b=b, hq=h, hkv=h, nq=n, nk=1, d=d, dv=d), blocks=[0, blocks - 1])
    assert record.error == 0 and record.launches.tolist() == [[blocks, run.plan.threads, run.plan.fast_memory_bytes]]
    assert {0, b * h - 1} == set(touched(record.writes, LSE) // 4 // n)


@pytest.mark.field("R075")
def test_what_a_grid_cannot_hold_takes_more_launches(kernel):
    heads, run = 2**30, kernel(d=16, br=16, bc=16)
    args = arguments(b=3, hq=heads, hkv=1, nq=1, nk=1, d=16, dv=16, causal=BOTTOM_RIGHT, lengths=np.array([1, 1, 1]))
    record = run.run(args, blocks=[0, heads - 1])
    assert record.error == 0 and record.launches[:, 0].tolist() == [heads] * 3
    assert sorted(touched(record.writes, LSE)[::4] // 4) == [b * heads + x for b in range(3) for x in (0, heads - 1)]
    assert sorted(set(touched(record.reads, K) // 32)) == [0, 1, 2]


@pytest.mark.field("R076")
def test_every_error_of_the_runtime_is_returned(kernel):
    run = kernel(d=16, br=16, bc=16).run
    small = arguments(nq=4, nk=4, d=16, dv=16)
    assert run(small, attribute_error=98).error == 98
    assert run(small, launch_error=9).error == 9
    assert run(small, dtype=BF16).error == run(small, dtype=FP16).error == 0


@pytest.mark.field("R075")
@pytest.mark.parametrize(
    "sizes",
    [{"nq": 2**31, "nk": 1}, {"nq": 1, "nk": 2**31}, {"nq": 64, "nk": 1, "hq": 2**30}, {"nq": 1, "nk": 1, "hq": 2**32}],
)
def test_what_no_launch_can_hold_is_an_error_and_no_launch(kernel, sizes):
    record = kernel(d=16, br=16, bc=16).run(arguments(d=16, dv=16, **sizes))
    assert record.error != 0 and len(record.launches) == 0


@pytest.mark.parametrize("dtype", [0, 1, 4])
def test_a_type_without_a_kernel_is_an_error(kernel, dtype):
    record = kernel(d=16, br=16, bc=16).run(arguments(nq=1, nk=1, d=16, dv=16), dtype=dtype)
    assert record.error != 0 and len(record.launches) == 0


@CAUSALS
@pytest.mark.parametrize("heads, nk", [(5, 64), (3, 2**19)])  # heads that share L2, and heads too large for it
def test_blocks_cover_every_tile_once_with_the_longest_causal_tiles_first(kernel, causal, heads, nk):
    nq, d = 100, 16
    run = kernel(d=d, br=16, bc=16)
    args = arguments(hq=heads, hkv=heads, nq=nq, nk=nk, d=d, dv=d, causal=causal, lengths=np.array([1]))
    order = []
    for block in range(heads * 7):
        at = touched(run.run(args, blocks=[block]).writes, LSE).min() // 4
        order.append((at // nq, at % nq // 16))  # head, tile
    assert sorted(order) == [(h, t) for h in range(heads) for t in range(7)]
    tiles_of = {h: [t for head, t in order if head == h] for h in range(heads)}
    assert all(tiles == list(range(6, -1, -1)) for tiles in tiles_of.values())
    side_by_side = causal != FULL and nk == 64
    assert [h for h, _ in order[:heads]] == (list(range(heads)) if side_by_side else [0] * heads)
