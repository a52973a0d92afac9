"""Infinities and NaN through the wgmma kernels, on the emulator: the special-value table, and every order of key tiles.

A row whose scores are all -inf has seen no key, whether or not a key tile needs a mask; what it sees later counts.
"""

from __future__ import annotations

import numpy as np
import pytest

from verify import judge, packages, special
from verify.cases import Case, representable
from verify.emulator.device import EmulatorDevice
from verify.emulator.emulator import Schedule

# P in registers; P in shared memory; a lazy rescale.
PACKAGES = (
    {"d": 64, "br": 128, "bc": 64, "dtypes": ("fp16",)},
    {"d": 128, "br": 192, "bc": 128, "dtypes": ("bf16",)},
    {"d": 256, "br": 64, "bc": 80, "dtypes": ("fp16",)},
)
# A letter per key tile, in the order of memory (the kernel starts at the last one): "-" every score is -inf, "+" one
# is +inf, "l" all are below 0 and "g" all above, where the maximum of integers would do. No tile needs a mask.
TILES = ("-", "--", "l-", "-l", "g-", "-g", "+-", "-+", "l-g")


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda words: f"d{words['d']}")
def package(request):
    """(words of the request, module) of an emitted package."""
    return request.param, packages.load(packages.emit(sram="227KB", archs=("sm90a",), **request.param))


@pytest.fixture(scope="module")
def device():
    return EmulatorDevice("sm90a", (Schedule("random", "random", seed=5),))


def of_tiles(tiles: str, d: int, bc: int, dtype: str) -> Case:
    """Two heads whose key tiles are as the letters say, but for one row of one head: it sees all signs reversed."""
    rng = np.random.default_rng([*tiles.encode(), d])
    keys = (1, 1, bc * len(tiles), d)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 2, 5, d), keys, keys))
    q, k = np.abs(q) + 1.0, np.abs(k)
    for number, letter in enumerate(tiles):
        here = k[:, :, number * bc : (number + 1) * bc]
        if letter == "l":
            here *= -1.0
        if letter == "-":
            here[...] = 0.0
            here[..., 0] = -np.inf
        if letter == "+":
            here[..., 3, 0] = np.inf
    q[:, 0, 2] *= -1.0
    q, k, v = (representable(x, dtype) for x in (q, k, v))
    return Case(name=f"tiles {tiles}", family="special", dtype=dtype, q=q, k=k, v=v, scale=d**-0.5)


def test_the_special_value_table_holds(package, device):
    words, attn = package
    (dtype,) = words["dtypes"]
    for case in special.table(dtype, d=words["d"], dv=words["d"], bc=words["bc"], seed=1):
        judge.check(attn, case, on=device)


@pytest.mark.parametrize("tiles", TILES)
def test_infinite_scores_hold_in_every_order_of_key_tiles(package, device, tiles):
    words, attn = package
    judge.check(attn, of_tiles(tiles, words["d"], words["bc"], *words["dtypes"]), on=device)
