"""Query heads that share a key head as rows of one tile: when the wgmma kernels do that, and that results stay right.

Whether it happened is read from the bytes of K that the emulator saw being read: every query tile reads its keys once.
"""

import numpy as np
import pytest

from verify import judge, packages
from verify.cases import Case, representable
from verify.emulator import build
from verify.emulator.device import Call, EmulatorDevice
from verify.emulator.emulator import SCHEDULES, Emulator

D, BR, BC = 64, 64, 64
DTYPE = "bf16"

# Hq, Hkv, Nq, mask, layout, query tiles (of one batch entry) that read K
SHAPES = (
    (8, 2, 1, "none", "contiguous", 2),
    (8, 2, 1, "bottom_right", "contiguous", 2),
    (8, 2, 1, "none", "bnhd", 2),
    (8, 2, 5, "none", "contiguous", 2),
    (12, 4, 43, "none", "contiguous", 4 * 3),  # 129 rows: three tiles, as without packing
    (12, 4, 40, "none", "contiguous", 4 * 2),
    (6, 1, 5, "none", "bnhd", 6),  # one stride leads through the rows of Q, in an order that O and LSE do not have
    (8, 2, 5, "none", "bnhd", 8),  # no stride leads from one head's last row to the next one's first
    (8, 2, 5, "bottom_right", "contiguous", 8),  # rows see different keys
    (8, 2, 1, "top_left", "contiguous", 8),  # the row sees one key
    (8, 2, 64, "none", "contiguous", 8),  # nothing to save
)


@pytest.fixture(scope="module")
def package():
    folder = packages.emit(sram="227KB", d=D, br=BR, bc=BC, dtypes=(DTYPE,), archs=("sm90a",))
    return folder, packages.load(folder)


def case_of(hq, hkv, nq, mask, layout, *, batch=2, nk=BC - 3, lengths=None):
    rng = np.random.default_rng([hq, hkv, nq, nk])
    shapes = ((batch, hq, nq, D), (batch, hkv, nk, D), (batch, hkv, nk, D))
    q, k, v = (representable(rng.standard_normal(shape), DTYPE) for shape in shapes)
    return Case(
        name=f"{hq} on {hkv} heads", family="packing", dtype=DTYPE, q=q, k=k, v=v, scale=0.125, causal=mask,
        key_lengths=lengths, layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s[:5])))
def test_heads_are_packed_where_that_saves_tiles(package, shape):
    *words, tiles = shape
    folder, attn = package
    case = case_of(*words)
    run = Call.of(case, tma=True).launch(Emulator(build.package(folder, "sm90a_0")), "sm90a_0")
    run.check(case.name)
    bytes_of_a_head = 2 * case.k[0, 0].size
    assert run.counters["tensors"]["k"]["read"] == 2 * tiles * bytes_of_a_head
    judge.check(attn, case, on=EmulatorDevice("sm90a", SCHEDULES))


@pytest.mark.parametrize("mask", ["none", "bottom_right"])
def test_packed_rows_keep_the_key_length_of_their_batch_entry(package, mask):
    _, attn = package
    case = case_of(8, 2, 1, mask, "contiguous", batch=4, nk=150, lengths=(0, 1, 65, 150))
    judge.check(attn, case, on=EmulatorDevice("sm90a", SCHEDULES))


@pytest.mark.parametrize("nq", [1, 5])
def test_a_packed_row_has_the_bits_of_an_unpacked_one(package, nq):
    """Unpacked are several rows of (B, N, H, d) strides, and one row that sees one key from the top left."""
    _, attn = package
    device = EmulatorDevice("sm90a", SCHEDULES[:1])
    words = ((8, 2, 5, "none", "contiguous"), (8, 2, 5, "none", "bnhd"))
    if nq == 1:
        words = ((8, 2, 1, "none", "contiguous"), (8, 2, 1, "top_left", "contiguous"))
    cases = [case_of(*one, nk=1 if nq == 1 else 150) for one in words]
    packed, plain = (device.run(attn, case, device.paths(attn, DTYPE, case)[0]) for case in cases)
    for got, want in zip(packed, plain, strict=True):
        np.testing.assert_array_equal(got, want)
