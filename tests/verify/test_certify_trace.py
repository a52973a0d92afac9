"""The debug form is judged after every key tile, and a state that is wrong is named by its tile."""

from __future__ import annotations

import numpy as np
import pytest

from verify import devices, packages, suite, trace
from verify.inputs import FAMILIES


@pytest.fixture(scope="module")
def form():
    folder = packages.emit(d=16, dv=24, dtypes=("float32",), archs=("cpu",), br=32, bc=16, backward=False)
    return packages.load(trace.debug_form(folder, "cpu"))


def case(family="late_max", **shape):
    words = {"nq": 20, "nk": 41, "causal": "bottom_right", "hq": 2, **shape}
    return suite.case(FAMILIES[family], suite.Shape(**words), family, dtype="float32", d=16, dv=24, seed=1)


def test_states_after_every_tile_are_within_their_bound(form):
    for one in (case(), case("falling_max", b=2, lengths=(0.3, 1.0)), case("gaussian", causal="top_left")):
        found, bad = trace.states(form, one, devices.Cpu())
        assert not bad and {f.path.isa for f in found} == set(form.isas("float32"))
        assert all(f.states > 0 and 0 < f.worst <= 1 and f.path.debug for f in found)


def test_a_wrong_state_is_named_by_its_tile(form):
    one = case()
    path = devices.Cpu().paths(form, "float32", one)[0]
    _, _, states = devices.Cpu().trace(form, one, path)
    assert trace.hear(one, path, states).holds
    for column, shown_by in ((0, ("m",)), (1, ("m + ln l", "O / l")), (2, ("O / l",))):
        wrong = states.copy()
        wrong[0, 1, 19, 1, column] *= 1 + 1e-4
        finding = trace.hear(one, path, wrong)
        assert not finding.holds and finding.where.startswith(shown_by)
        assert "after key tile 1, batch 0, head 1, row 19" in finding.where
    wrong = states.copy()
    wrong[0, 0, 3, 0, 5] = np.nan
    assert "O / l after key tile 0, batch 0, head 0, row 3" in trace.hear(one, path, wrong).where


def test_a_row_that_meets_no_tile_leaves_nothing(form):
    one = case(nq=40, nk=20)  # bottom-right: the first 20 rows see no key
    path = devices.Cpu().paths(form, "float32", one)[0]
    _, lse, states = devices.Cpu().trace(form, one, path)
    assert np.isneginf(lse[0, :, :20]).all() and np.isnan(states[0, :, :20]).all()
