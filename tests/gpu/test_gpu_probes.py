"""The cheapest inputs that show known kernel bugs, on the real kernel: each within its bound, heard by every judge.

Each probe is named for the bug that it shows. Packages: tiles with Br != Bc, a width that is no multiple of the
granule, dv != d, and the tile that is fastest at d = 64.
"""

from __future__ import annotations

import numpy as np
import pytest

from verify import gpu_packages, judge
from verify.inputs import FAMILIES
from verify.suite import Shape, case

pytestmark = pytest.mark.gpu

PACKAGES = (
    "smallest rows of d=16, Br=32, Bc=16",
    "d no multiple of 16, Br=32, Bc=16",
    "dv larger than d, neither a multiple of 16",
    "fast tile at d=64",
)
PROBES = {
    "causal 20x20": ("gaussian", Shape(nq=20, nk=20, causal="bottom_right")),
    "causal 20x20 from the top left": ("gaussian", Shape(nq=20, nk=20, causal="top_left")),
    "causal 24x5: rows without a key": ("gaussian", Shape(nq=24, nk=5, causal="bottom_right")),
    "causal 24x5 from the top left": ("gaussian", Shape(nq=24, nk=5, causal="top_left")),
    "causal 5x24": ("gaussian", Shape(nq=5, nk=24, causal="bottom_right")),
    "causal 5x24 from the top left": ("gaussian", Shape(nq=5, nk=24, causal="top_left")),
    "two keys at -256": ("far_below_zero", Shape(nq=2, nk=2)),
    "two keys at -256 and padding": ("far_below_zero", Shape(nq=2, nk=8, lengths=(0.25,))),
    "one key": ("gaussian", Shape(nq=1, nk=1)),
    "one key more than a tile": ("gaussian", Shape(nq=17, nk=17)),
    "48 x 48": ("gaussian", Shape(nq=48, nk=48)),
    "rising maximum": ("late_max", Shape(nq=33, nk=400)),
    "falling maximum": ("falling_max", Shape(nq=33, nk=400)),
    "one dominant key": ("one_dominant_key", Shape(nq=40, nk=300)),
    "drift over 1024 keys": ("drift", Shape(nq=9, nk=1024)),
    "equal P at a midpoint": ("equal_weights_at_a_midpoint", Shape(nq=5, nk=600)),
    "4200 equal logits": ("identical_logits", Shape(nq=4, nk=4200)),
    "key padding": ("poisoned_padding", Shape(b=3, hq=2, hkv=1, nq=9, nk=150)),
    "key lengths 0, part, all": ("gaussian", Shape(b=3, nq=9, nk=150, lengths=(0.0, 0.51, 1.0))),
    "two heads share K and V": ("gaussian", Shape(hq=4, hkv=2, nq=19, nk=70)),
}


@pytest.mark.parametrize("dtype", gpu_packages.DTYPES)
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_is_within_its_bound(attn_of, cuda, record_property, probe, package, dtype):
    family, shape = PROBES[probe]
    words = gpu_packages.PACKAGES[package]
    d = words["d"]
    made = case(FAMILIES[family], shape, probe, dtype=dtype, d=d, dv=words.get("dv", d), seed=7)
    (verdict,) = judge.check(attn_of(package), made, on=cuda, spec=True)
    assert {f.judge for f in verdict.figures} >= {"spec", "mpmath", "float64"}
    record_property("err_over_bound", f"{verdict.worst.ratio:.4f}")


@pytest.mark.parametrize("dtype", gpu_packages.DTYPES)
def test_random_problems_are_within_their_bounds(attn_of, cuda, dtype):
    """A few problems of every family, on shapes drawn at random."""
    draw = np.random.default_rng(11)
    attn = attn_of("fast tile at d=64")
    for i, family in enumerate(FAMILIES.values()):
        if family.name in ("random_mask", "all_masked_row", "first_tile_masked"):
            continue  # masks that no kernel of today takes
        shape = Shape(
            b=int(draw.integers(1, 3)), hq=4, hkv=int(draw.choice([1, 2, 4])), nq=int(draw.integers(1, 200)),
            nk=int(draw.integers(1, 300)), causal=str(draw.choice(["none", "bottom_right", "top_left"])),
            layout=str(draw.choice(["contiguous", "bnhd", "padded", "offset"])),
        )  # fmt: skip
        made = case(family, shape, f"{family.name}/{i}", dtype=dtype, d=64, dv=64, seed=i)
        judge.check(attn, made, on=cuda, spec=False)
