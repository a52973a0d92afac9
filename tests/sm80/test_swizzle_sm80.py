"""Shared memory of the mma.sync kernel: every byte has one place, every access is in bounds, no access has conflicts.

Two views that must agree: the formula (`codegen.plans.sm80.swizzled` and the template's, compiled by g++), and the
addresses that the emitted kernel really forms, recorded thread by thread. Conflict-free: the lanes that share one
128-byte phase of an access fall into different banks. Source: CUDA Programming Guide, "Shared Memory"; PTX ISA,
"ldmatrix": each of its four matrices is one phase of 8 rows of 16 bytes.
"""

import numpy as np
import pytest

from codegen.plans import sm80
from tests.sm80 import recorder
from tests.sm80.recorder import BOTTOM_RIGHT, arguments

LDMATRIX, CP_ASYNC, ST_B32, LD_B128 = range(4)
BASE = 0x400  # recorded.h
WIDTHS = range(16, 257, 16)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorder")
    return lambda **asked: recorder.recorder(folder, **asked)


@pytest.mark.parametrize("panel", [16, 32, 64])
def test_swizzle_is_a_permutation_and_the_kernel_computes_the_same(kernel, panel):
    run = kernel(d=16, br=16, bc=16)
    places = [sm80.swizzled(row, chunk, panel) for row in range(64) for chunk in range(panel // 8)]
    assert sorted(places) == list(range(0, 64 * 2 * panel, 16))
    assert places == [run.swizzled(panel, row, chunk) for row in range(64) for chunk in range(panel // 8)]


@pytest.mark.parametrize("width", WIDTHS)
def test_panels_cover_the_padded_width(width):
    panel = sm80.panel(width)
    assert width % panel == 0 and panel in (16, 32, 64)
    steps = sm80.steps_at_once(width)
    assert (width // 16) % steps == 0 and steps % (panel // 16) == 0


@pytest.mark.parametrize("panel", [16, 32, 64])
def test_rows_of_a_matrix_and_lanes_of_a_copy_lie_in_different_banks(panel):
    for row in range(0, 64, 8):
        for chunk in range(panel // 8):
            assert len({sm80.swizzled(row + i, chunk, panel) // 16 % 8 for i in range(8)}) == 8
    lanes = [(t // (panel // 8), t % (panel // 8)) for t in range(256)]
    for first in range(0, 256, 8):
        assert len({sm80.swizzled(*at, panel) // 16 % 8 for at in lanes[first : first + 8]}) == 8


# Every padded width once as d and once as dv, with 1 to 8 warps of 16 and 32 rows.
CASES = [
    (width - 8 * (n % 2), 272 - width - 8 * (n % 3 == 0), *((16, 32, 48, 64, 96, 128, 256)[n % 7], 16 * (1 + n % 3)))
    for n, width in enumerate(WIDTHS)
]


@pytest.mark.parametrize("d, dv, br, bc", [*CASES, (64, 64, 128, 128), (128, 128, 128, 64), (128, 128, 128, 192)])
def test_every_shared_access_is_in_bounds_written_before_and_free_of_conflicts(kernel, d, dv, br, bc):
    if br == 256 and sm80.accumulators(2, sm80.padded(dv), bc) > 160:
        br = 128
    run = kernel(d=d, dv=dv, br=br, bc=bc, sram_kb=163)
    nk = 2 * bc + 5  # whole and partial tiles
    record = run.run(arguments(nq=br, nk=nk, d=d, dv=dv, causal=BOTTOM_RIGHT))
    shared = record.shared
    width = np.array([16, 16, 4, 16])[shared[:, 0]]
    assert shared[:, 2].min() >= BASE
    assert (shared[:, 2] + width).max() <= BASE + run.plan.fast_memory_bytes
    assert (shared[:, 2] % width == 0).all()

    copied = set(shared[shared[:, 0] == CP_ASYNC][:, 2].tolist())
    assert set(shared[shared[:, 0] == LDMATRIX][:, 2].tolist()) == copied, "exactly what was copied is multiplied"
    stored = {a // 16 for a in shared[shared[:, 0] == ST_B32][:, 2].tolist()}
    assert {a // 16 for a in shared[shared[:, 0] == LD_B128][:, 2].tolist()} <= stored

    for kind, lanes, bank_bytes in ((LDMATRIX, 8, 16), (CP_ASYNC, 8, 16), (ST_B32, 32, 4), (LD_B128, 8, 16)):
        mine = shared[shared[:, 0] == kind]
        logs = [mine[mine[:, 1] == thread][:, 2] for thread in range(run.plan.threads)]
        for first in range(0, run.plan.threads, lanes):
            group = logs[first : first + lanes]
            if kind == LD_B128 and dv % 16:  # lanes that would read the padding of O sit out
                group = [log for log in group if len(log) == max(map(len, group))]
            assert len({len(log) for log in group}) == 1, "lanes of one phase take the same path"
            banks = np.sort(np.stack(group) % 128 // bank_bytes, axis=0)
            assert (np.diff(banks, axis=0) > 0).all(), f"kind {kind}: two lanes of a phase in one bank"
