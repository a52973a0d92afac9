"""Dropout factors: the published generator, purity in (seed, offset, b, h, i, j), and the edges of p."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spec import flash2, standard
from spec.dropout import Dropout, philox4x32
from spec.errors import DropoutError


@pytest.mark.parametrize(
    "counter, key, want",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, want):
    """The three vectors that Random123 publishes for philox4x32-10."""
    words = philox4x32(tuple(np.asarray(c, dtype=np.uint64) for c in counter), key)
    assert tuple(int(w) for w in words) == want


def test_a_factor_depends_on_its_position_only():
    """Any tile of Z equals that tile of the whole, rows and columns in any order."""
    dropout = Dropout(p=0.4, seed=2**63 + 5, offset=77, b=3, h=9)
    i, j = np.arange(40)[:, None], np.arange(50)[None, :]
    whole = dropout.z(i, j)
    assert (dropout.z(i[7:19], j[:, 13:30]) == whole[7:19, 13:30]).all()
    assert (dropout.z(i[::-3], j[:, ::-2]) == whole[::-3, ::-2]).all()
    assert dropout.z(np.array([[11]]), np.array([[12]])) == whole[11, 12]


@pytest.mark.field("R119")
@pytest.mark.parametrize("change", [{"seed": 1}, {"offset": 1}, {"b": 1}, {"h": 1}, {"seed": 2**32}, {"offset": 2**32}])
def test_every_part_of_the_counter_matters(change):
    i, j = np.arange(64)[:, None], np.arange(64)[None, :]
    base = Dropout(p=0.5, seed=0)
    differ = (base.words(i, j) != Dropout(**({"p": 0.5, "seed": 0} | change)).words(i, j)).mean()
    assert differ > 0.999  # equal words are a 2^-32 event each
    assert (base.words(i, j) == Dropout(p=0.5, seed=0).words(i, j)).all()


def test_the_kept_fraction_is_binomial():
    """Within 6 standard deviations of keep, which a right generator leaves about twice in 10^9 runs."""
    i, j = np.arange(512)[:, None], np.arange(512)[None, :]
    for p in (0.1, 0.5, 0.9):
        dropout = Dropout(p=p, seed=3)
        kept = int((dropout.z(i, j) > 0).sum())
        sigma = math.sqrt(i.size * j.size * dropout.keep * (1 - dropout.keep))
        assert abs(kept - i.size * j.size * dropout.keep) <= 6 * sigma


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.999999])
def test_the_scale_is_that_of_the_probability_used(p):
    dropout = Dropout(p=p, seed=0)
    assert dropout.keep == dropout.threshold / 2**32
    assert abs(dropout.keep - (1 - p)) <= 2.0**-33
    assert dropout.scale == 2**32 / dropout.threshold


@pytest.mark.field("R118")
@pytest.mark.parametrize("p", [0.0, 1e-16, 2.0**-34])
def test_p_below_the_resolution_is_no_dropout(p):
    i, j = np.arange(9)[:, None], np.arange(9)[None, :]
    assert (Dropout(p=p, seed=1).z(i, j) == 1.0).all()


@pytest.mark.field("R118")
def test_a_small_p_above_the_resolution_is_honoured():
    dropout = Dropout(p=1e-7, seed=1)
    assert dropout.threshold == 2**32 - 429
    assert dropout.scale == 2**32 / dropout.threshold > 1.0


def test_p_one_drops_everything_and_keeps_the_lse():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(5, 4)), rng.normal(size=(7, 4)), rng.normal(size=(7, 3))
    out = flash2.forward(q, k, v, br=2, bc=3, dropout=Dropout(p=1.0, seed=1))
    assert (out.o == 0).all()
    assert (out.lse == flash2.forward(q, k, v, br=2, bc=3).lse).all()
    gradients = standard.backward(q, k, v, rng.normal(size=(5, 3)), dropout=Dropout(p=1.0, seed=1))
    assert all((g == 0).all() for g in gradients[:3])


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
def test_a_probability_outside_0_1_is_refused(p):
    with pytest.raises(DropoutError, match="probability"):
        Dropout(p=p, seed=0)


def test_a_counter_out_of_range_is_refused():
    with pytest.raises(DropoutError, match="seed"):
        Dropout(p=0.5, seed=-1)
    with pytest.raises(DropoutError, match="2\\^32"):
        Dropout(p=0.5, seed=0, h=2**32)


def test_dropout_is_after_the_row_sum():
    """m, l and LSE are those of the undropped problem, bit for bit."""
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(9, 4)), rng.normal(size=(20, 4)), rng.normal(size=(20, 3))
    plain, dropped = (flash2.forward(q, k, v, br=4, bc=8, dropout=d) for d in (None, Dropout(p=0.5, seed=2)))
    assert (plain.lse == dropped.lse).all()
    assert (plain.o != dropped.o).any()
