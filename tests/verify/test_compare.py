"""A comparison has no tolerance of its own, and lets no NaN or infinity through."""

import numpy as np
import pytest

from verify.compare import assert_within, ratio, worst

nan, inf = np.nan, np.inf


def test_the_ratio_is_error_over_bound():
    r = ratio(np.array([1.0, 2.0]), np.array([1.5, 2.0]), np.array([1.0, 0.0]))
    assert list(r) == [0.5, 0.0]
    assert ratio(np.array([1.0]), np.array([1.5]), 1.0, want_error=1.0)[0] == 0.25


@pytest.mark.field("R032")
@pytest.mark.parametrize(
    "got, want, bound, expected",
    [
        (nan, nan, 1.0, 0.0),
        (inf, inf, 1.0, 0.0),
        (-inf, -inf, 0.0, 0.0),
        (nan, 1.0, inf, inf),
        (1.0, nan, inf, inf),
        (inf, 1.0, inf, inf),
        (1.0, inf, inf, inf),
        (inf, -inf, inf, inf),
        (inf, nan, inf, inf),
        (1.0, 1.0, nan, inf),
        (1.0, 1.0, -1.0, inf),
        (1.0, 1.0 + 2**-52, 0.0, inf),
        (0.0, -0.0, 0.0, 0.0),
        (1e308, -1e308, 1.0, inf),
    ],
)
def test_what_is_not_a_number_passes_only_when_both_sides_agree(got, want, bound, expected):
    assert ratio(np.array([got]), np.array([want]), np.array([bound]))[0] == expected


@pytest.mark.field("R032")
def test_nan_in_one_of_many_fails():
    got = np.zeros((4, 8))
    got[2, 5] = nan
    with pytest.raises(AssertionError, match=r"1 of 32 elements outside the bound; worst at \[2, 5\]"):
        assert_within(got, np.zeros((4, 8)), 1.0)


@pytest.mark.field("R031", "R040")
def test_the_message_names_element_values_bound_and_tile():
    got = np.zeros((40, 8))
    got[37, 3], got[1, 1] = 3.0, 2.0
    with pytest.raises(AssertionError) as failure:
        assert_within(got, np.zeros((40, 8)), 0.5, name="O of amx", tile=(16, 64))
    text = str(failure.value)
    assert text.startswith("O of amx: 2 of 320 elements outside the bound; worst at [37, 3]")
    assert "query tile 2, row 5 of it" in text
    assert "got 3.0, want 0.0, |difference| 3.000e+00, bound 5.000e-01, error/bound 6" in text


def test_the_largest_ratio_is_returned():
    assert assert_within(np.array([1.0, 2.0]), np.array([1.25, 2.0]), 1.0) == 0.25
    assert assert_within(np.zeros((0, 3)), np.zeros((0, 3)), 0.0) == 0.0
    assert worst(np.zeros(0), np.zeros(0), 1.0) is None
    found = worst(np.zeros((2, 2)), np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[1.0, 1.0], [4.0, 1.0]]))
    assert found is not None and found.index == (0, 1) and found.ratio == 1.0


def test_narrow_inputs_are_compared_in_float64():
    got = np.array([1.0], dtype=np.float32)
    assert ratio(got, np.array([1.0 + 1e-12]), 1e-12)[0] == pytest.approx(1.0, rel=1e-3)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="shape"):
        ratio(np.zeros(3), np.zeros((3, 1)), 1.0)
    with pytest.raises(ValueError):
        ratio(np.zeros(3), np.zeros(3), np.zeros(4))
