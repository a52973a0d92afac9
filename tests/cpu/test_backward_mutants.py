"""Backward kernels broken on purpose: each bug is noticed by one of the judged problems, and the kernel itself passes.

Each bug is a replacement of text that occurs once in the emitted files. The unit is compiled for float32 without
optimisation beyond -O1, so that the file stays quick.
"""

import numpy as np
import pytest

from tests.cpu import backward_judged, backward_units, units

ISA, DTYPE = "baseline", "float32"
SIZES = (40, 24, 32, 8)

# name -> file, what stands there, what stands there instead
MUTANTS = {
    "D is not subtracted": ("backward_simd_block.h", "acc[g][n] - *(const Vector*)&panel.d[n * kLanes]", "acc[g][n]"),
    "dLSE has the wrong sign": ("backward_simd.h", "if (a.dlse) d -=", "if (a.dlse) d +="),
    "dLSE is left out": ("backward_simd.h", "if (a.dlse) d -=", "if (false) d -="),
    "scale is left out of dQ": ("backward_simd.h", "&dq[at + i][r] * scale;", "&dq[at + i][r];"),
    "scale is left out of dK": ("backward_simd.h", "finish<kD>(dk, dk_pitch, a.scale,", "finish<kD>(dk, dk_pitch, 1,"),
    "natural log taken for base 2": ("backward_simd.h", "__builtin_fma((double)lse, kLog2e, lse * kLog2eTail)", "lse"),
    "dV is summed from dS": ("backward_simd.h", "DV{w.p,", "DV{w.ds,"),
    "dK is summed from P": ("backward_simd.h", "DK{w.ds,", "DK{w.p,"),
    "mask one key late": (
        "backward_simd_block.h", "&panel.limit[n * kLanes] > (Integer)key", "&panel.limit[n * kLanes] >= (Integer)key"
    ),
    "a query head of the group is lost": ("backward_tasks.h", "tiles = group * row_tiles;", "tiles = row_tiles;"),
    "a row is not summed over": ("backward_simd_sums.h", "r < end; r++", "r + 1 < end; r++"),
    "rows start one late": ("backward_simd_sums.h", "? first + key : 0", "? first + key + 1 : 0"),
    "the first tile does not clear": ("backward_simd.h", "if (turn.is_first) {", "if (false) {"),
    "unseen keys are not written": ("backward_tasks.h", "clear_unseen(c, pair);", ""),
    "keys of later panels keep old weights": ("backward_simd.h", "if (keys.count < count) {", "if (false) {"),
    "nobody waits for a turn": ("backward_simd.h", "Tasks::wait(turn);", ""),
    "an empty row adds": ("backward_simd.h", "if (spare || lse == -(Scalar)__builtin_inf()) {", "if (spare) {"),
    "an infinite key is multiplied by 0": ("backward_simd_block.h", "if (keys.k_is_finite) {", "if (true) {"),
    "weights wrap around": ("backward_simd_block.h", "n = n > most ? most : n;", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def files():
    return backward_units.sources(units.make_problem(*SIZES[:2], br=SIZES[2], bc=SIZES[3], dtypes=(DTYPE,)), ISA)


def compiled(files):
    flags = [f for f in units.ISAS[ISA].flags if f not in ("-O3", "-fvisibility=hidden")]
    quick = [*flags, "-O1", "-Wno-error=unused-parameter", "-Wno-error=unused-variable"]
    return backward_units.entry(units.build(files, f"backward_cpu_{ISA}.cpp", quick), ISA, DTYPE)


def judge(kernel):
    """Raises AssertionError if the kernel is wrong on one of a few problems that ask for every part of it."""
    problem = units.make_problem(*SIZES[:2], br=SIZES[2], bc=SIZES[3], dtypes=(DTYPE,))
    for shape, causal, lengths in (
        ((1, 4, 2, 70, 50), "bottom_right", None),  # rows without a key, two heads per K/V head
        ((2, 2, 1, 33, 45), "top_left", None),  # keys without a row
        ((2, 1, 1, 40, 30), False, (0, 17)),
    ):
        q, k, v, dout, dlse = backward_judged.draw(shape, *SIZES[:2], DTYPE, dlse=True)
        words = {"causal": causal, "key_lengths": lengths}
        for spoilt in (False, True):
            if spoilt:
                q, k = np.abs(q) + 0.5, k.copy()
                k[:, :, 3] = 0
                k[:, :, 3, 1] = -np.inf  # a score of -inf
                empty = max(0, shape[3] - shape[4]) if causal == "bottom_right" else 0
                dout[:, :, :empty], dlse[:, :, :empty] = np.nan, np.nan
            given = backward_judged.forward(problem, ISA, DTYPE, q, k, v, **words)
            got = backward_units.gradients(
                problem, ISA, DTYPE, q, k, v, *given, dout, dlse, by=kernel, workers=1, **words
            )
            backward_judged.assert_right(
                problem, ISA, DTYPE, q, k, v, given, dout, dlse, got, end_to_end=False, **words
            )
    o, lse = backward_judged.forward(problem, ISA, DTYPE, q, k, v)
    dq, _, _ = backward_units.gradients(problem, ISA, DTYPE, q, k, v, o, np.full_like(lse, -1e5), dout, by=kernel)
    assert not np.isfinite(dq).any()
    assert not backward_units.finishes_without_the_first_tile(problem, ISA, DTYPE, q, k, v, o, lse, dout, by=kernel)
    q[:], k[:] = 1, 0
    k[..., 0] = -np.inf  # rows that see keys, all of them with a score of -inf
    o, lse = backward_judged.forward(problem, ISA, DTYPE, q, k, v)
    got = backward_units.gradients(problem, ISA, DTYPE, q, k, v, o, lse, np.full_like(dout, np.nan), by=kernel)
    assert all((x == 0).all() for x in got)


def test_the_kernel_itself_passes(files):
    judge(compiled(files))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_noticed(files, name):
    file, old, new = MUTANTS[name]
    text = files[file].decode()
    assert text.count(old) == 1, f"{text.count(old)} places in {file}"
    with pytest.raises(AssertionError, match=r"outside the bound|a number where|isfinite|finishes|all\("):
        judge(compiled({**files, file: text.replace(old, new).encode()}))
