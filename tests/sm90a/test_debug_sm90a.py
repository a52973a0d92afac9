"""The debug form of the wgmma kernels, on the emulator: the state (m, l, O) after every key tile is within its bound.

Key tiles come last first, so the state after tile j is attention over the keys of tile j and later.
"""

import pytest

from verify import mutants, packages, suite, trace
from verify.emulator.device import EmulatorDevice
from verify.emulator.emulator import Schedule
from verify.mutate.mutant import Mutant

# Three consumers that skip key tiles; unequal widths; a lazy rescale; P in shared memory.
PACKAGES = (
    {"d": 64, "br": 192, "bc": 64, "dtypes": ("bf16",)},
    {"d": 72, "dv": 40, "br": 128, "bc": 64, "dtypes": ("fp16",)},
    {"d": 256, "br": 128, "bc": 80, "dtypes": ("bf16",)},
    {"d": 56, "br": 64, "bc": 256, "dtypes": ("bf16",)},
)
RESCALE = "rescale<kLazy>(o, alpha);"
# Where O is taken over to a new maximum if P is in shared memory, and the text there.
BESIDE = {
    "in the loop": f"      issue_qk();\n      {RESCALE}",
    "between two query tiles": f"    issue_qk();\n    {RESCALE}",
    "after the last one": f"    if (tile.row0 < 0) {{\n      {RESCALE}",
}


@pytest.fixture(scope="module")
def device():
    return EmulatorDevice("sm90a", (Schedule("random", "random", seed=3),))


def request(**words):
    return packages.request(sram="227KB", archs=("sm90a",), backward=False, **words)


@pytest.mark.parametrize("words", PACKAGES, ids=lambda w: f"d{w['d']}")
def test_every_state_is_within_its_bound(words, device):
    found = trace.stated(packages.emit(request(**words)), device, seed=1, most=24)
    assert found["violations"] == [] and found["states"] > 300
    assert {path["path"] for path in found["paths"]} == {f"sm90a_0/{words['dtypes'][0]}"}


def wrong_tile(mutant, words, shape, device):
    """The key tile after which the state of a mutant is furthest beyond its bound."""
    attn = packages.load(mutants.package(mutant, request(**words, debug=True)))
    d = words["d"]
    case = suite.case(suite.FAMILIES["gaussian"], shape, "gaussian", dtype="bf16", d=d, dv=d, seed=1)
    (finding,), violations = trace.states(attn, case, device)
    assert violations and not finding.holds
    return int(finding.where.split("key tile ")[1].split(",")[0])


def test_an_output_that_is_not_taken_over_is_noticed_at_its_tile(device):
    """O keeps the maximum of before: wrong from the second tile that a row meets on."""
    mutant = Mutant("o_not_rescaled", "", f"      {RESCALE}\n", "", "csrc/forward_sm90a")
    assert wrong_tile(mutant, PACKAGES[0], suite.Shape(nq=20, nk=150), device) < 2


@pytest.mark.parametrize("place", BESIDE)
def test_an_output_that_is_not_taken_over_beside_a_product_is_noticed(device, place):
    """Two blocks take two query tiles of three key tiles each; the last two places come before the state of tile 0."""
    mutant = Mutant("o_not_rescaled", "", BESIDE[place], BESIDE[place].removesuffix(RESCALE), "csrc/forward_sm90a")
    tile = wrong_tile(mutant, PACKAGES[3], suite.Shape(nq=256, nk=700), device)
    assert (tile > 0) == (place == "in the loop")
