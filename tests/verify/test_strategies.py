"""The public strategies draw inside the domain of the bound, reach tile edges, and shrink to something readable."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings

from verify import arithmetic, bounds, judge, special, strategies
from verify.cases import representable

QUICK = settings(max_examples=150, deadline=None, database=None, derandomize=True)
MODEL = {"float64": "fma_f64", "float32": "fma_f32", "bf16": "fma_f32", "fp16": "fma_f32"}


@QUICK
@given(strategies.descriptions(most=60))
def test_every_problem_is_inside_the_domain_of_the_bound(one):
    case = one.case()
    model = arithmetic.model(MODEL[case.dtype], case.dtype)
    for b, _, q, k, v in case.heads():
        assert bounds.outside_domain(q, k, v, scale=case.scale, visible=case.visible(b), model=model) is None


@QUICK
@given(strategies.descriptions(most=60, masks=strategies.SPEC_MASKS))
def test_arrays_follow_from_the_description_alone(one):
    for x, again in zip(one.arrays(), one.arrays(), strict=True):
        assert np.array_equal(x, again) and np.array_equal(x, representable(x, one.dtype))
    assert np.array_equal(one.spec_visible(one.batch - 1), one.spec_visible(one.batch - 1))
    assert one.spec_visible().shape == (one.nq, one.nk)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(strategies.descriptions(d=24, dv=40, br=32, bc=16, most=50, dtypes=("float32",)))
def test_a_user_fuzzes_a_package_of_their_own(one):
    judge.check(RIGHT, one.case())


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(strategies.poisoned(d=16, dv=8, br=32, bc=16, most=40, dtypes=("float32", "float64")))
def test_one_value_that_is_not_finite_gives_the_pattern_of_the_table(drawn):
    one, (tensor, row, column, value) = drawn
    case = one.case()
    if case.key_lengths is None:
        judge.check(RIGHT, special.poison(case, tensor, row, column, value))


@pytest.fixture(autouse=True)
def _stand_in(right):
    global RIGHT
    RIGHT = right


def drawn(strategy, examples=300):
    """What a strategy gives, without shrinking."""
    found = []

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(strategy)
    def collect(x):
        found.append(x)

    collect()
    return found


def test_lengths_sit_on_and_beside_tile_edges():
    found = drawn(strategies.lengths(32, tiles=3))
    assert {0, 1, 31, 32, 33, 63, 64, 65, 95, 96} <= set(found) and max(found) <= 97
    assert min(drawn(strategies.lengths(32, least=1))) == 1


def test_all_that_matters_is_drawn():
    found = drawn(strategies.descriptions(masks=strategies.SPEC_MASKS, most=100))
    assert {one.mask for one in found} == set(strategies.SPEC_MASKS)
    assert {one.dtype for one in found} == set(strategies.DTYPES)
    assert {one.layout for one in found} == set(strategies.LAYOUTS)
    assert {one.values for one in found} == set(strategies.VALUES)
    for part in (
        lambda o: o.br != o.bc,
        lambda o: o.d != o.dv,
        lambda o: o.nk == 0,
        lambda o: o.lengths is not None and 0 in o.lengths,
        lambda o: o.group > 1 and o.kv_heads > 1,
        lambda o: o.midpoint,
        lambda o: any(value < -1000 for value, _ in o.logits),
        lambda o: o.overrides,
    ):
        assert any(part(one) for one in found)


def test_a_failure_shrinks_to_something_readable():
    small = hypothesis.find(
        strategies.descriptions(br=32, bc=16),
        lambda one: one.nk > 16 and one.mask == "bottom_right",
        settings=settings(max_examples=2000, database=None, derandomize=True),
    )
    assert (small.nq, small.nk, small.batch, small.kv_heads, small.group) == (1, 17, 1, 1, 1)
    assert small.logits == () and small.overrides == () and small.seed == 0 and small.values == "normal"


def test_weights_at_a_midpoint_really_are():
    one = strategies.Description(dtype="bf16", d=16, dv=16, nq=2, nk=33, midpoint=True, values="ones")
    q, k, _ = one.arrays()
    weights = np.exp(one.scale_value * (q[0, 0] @ k[0, 0].T))
    assert weights[0, 0] == 1.0
    midpoint = 0.5 + 2.0**-9  # between the bf16 numbers 0.5 and 0.5 + 2^-8
    assert np.all((weights[:, 1:] < midpoint) & (weights[:, 1:] > midpoint - 2.0**-13))
