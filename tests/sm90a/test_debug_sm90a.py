"""The debug form of the wgmma kernels, on the emulator: the state (m, l, O) after every key tile is within its bound.

Key tiles come last first, so the state after tile j is attention over the keys of tile j and later.
"""

import pytest

from verify import mutants, packages, suite, trace
from verify.emulator.device import EmulatorDevice
from verify.emulator.emulator import Schedule
from verify.mutate.mutant import Mutant

# Three consumers that skip key tiles; unequal widths; a lazy rescale.
PACKAGES = (
    {"d": 64, "br": 192, "bc": 64, "dtypes": ("bf16",)},
    {"d": 72, "dv": 40, "br": 128, "bc": 64, "dtypes": ("fp16",)},
    {"d": 256, "br": 128, "bc": 80, "dtypes": ("bf16",)},
)


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


def test_an_output_that_is_not_taken_over_is_noticed_at_its_tile(device):
    """O keeps the maximum of before: wrong from the second tile that a row meets on."""
    mutant = Mutant("o_not_rescaled", "", "      rescale<kLazy>(o, alpha);\n", "", "csrc/forward_sm90a")
    attn = packages.load(mutants.package(mutant, request(**PACKAGES[0], debug=True)))
    shape = suite.Shape(nq=20, nk=150)
    case = suite.case(suite.FAMILIES["gaussian"], shape, "gaussian", dtype="bf16", d=64, dv=64, seed=1)
    (finding,), violations = trace.states(attn, case, device)
    last = -(-case.k.shape[2] // 64) - 1
    assert violations and not finding.holds
    tile = int(finding.where.split("key tile ")[1].split(",")[0])
    assert tile < last, finding
