"""The mma.sync backward kernels at every width and budget, in the debug form, without bank conflicts, twice alike."""

import itertools

import numpy as np
import pytest

from tests.sm80 import backward_units as units
from verify.emulator.emulator import SCHEDULES, Schedule

LATE = SCHEDULES[:1]
WIDE = [(d, d, 163) for d in (8, 16, 40, 96, 112, 160, 192, 256)] + [(8, 256, 163), (256, 8, 163), (72, 64, 163)]
SMALL = [(128, 128, 99), (256, 256, 99), (192, 128, 64), (256, 256, 64), (48, 96, 34)]


@pytest.mark.parametrize("d, dv, sram_kb", WIDE + SMALL)
def test_every_width_and_budget_is_within_the_bound_without_bank_conflicts(d, dv, sram_kb):
    problem = units.make_problem(d, dv, sram_kb=sram_kb, dtypes=("bf16",))
    plan = units.plan_of(problem)
    machine = units.emulator(problem, plan)
    machine.configure(LATE[0])
    for deterministic in (False, True):
        x = units.draw((1, 2, 1, 75, 141), d, dv, "bf16", causal="bottom_right", dlse=True, deterministic=deterministic)
        run, got = units.launch(machine, x)
        bank = run.check().counters["bank"]
        units.assert_right(problem, x, got, plan=plan)
        for use in ("ldmatrix", "ld", "st", "cp_async"):
            phases, wavefronts = bank[use]
            assert phases == wavefronts > 0, use


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("d, dv", [(64, 64), (40, 72)])
def test_the_debug_form_stores_float32_within_the_bound_of_float32(d, dv, dtype):
    problem = units.make_problem(d, dv, sram_kb=48, debug=True)
    for deterministic in (False, True):
        x = units.draw((1, 2, 1, 70, 90), d, dv, dtype, causal="top_left", deterministic=deterministic)
        got = units.gradients(problem, x)
        assert all(g.dtype == np.float32 for g in got)
        units.assert_right(problem, x, got)
        rounded = units.gradients(units.make_problem(d, dv, sram_kb=48), x)
        for exact, narrow in zip(got[1:], rounded[1:], strict=True):  # the same sums, rounded once
            assert np.array_equal(units.bits(exact.astype(narrow.dtype)), units.bits(narrow))


def test_the_deterministic_form_gives_the_same_bits_whatever_comes_first():
    problem = units.make_problem(64, sram_kb=64)
    machine = units.emulator(problem, units.plan_of(problem))
    x = units.draw((1, 4, 2, 150, 200), 64, 64, "bf16", causal="bottom_right", deterministic=True)
    want = None
    for seed in range(10):
        machine.configure(Schedule("random", "random", seed=seed))
        run, got = units.launch(machine, x)
        run.check()
        want = want or got
        assert all(np.array_equal(units.bits(a), units.bits(b)) for a, b in zip(want, got, strict=True)), seed


def test_two_orders_of_the_reductions_differ_and_are_both_right():
    """Otherwise the test above would pass for the default form, and prove nothing. In float32, where each bit shows."""
    problem = units.make_problem(64, sram_kb=64, debug=True, dtypes=("bf16",))
    machine = units.emulator(problem, units.plan_of(problem))
    x = units.draw((1, 1, 1, 70, 600), 64, 64, "bf16")
    found = []
    for seed in range(4):
        machine.configure(Schedule("random", "random", seed=seed))
        run, got = units.launch(machine, x, debug=True)
        run.check()
        units.assert_right(problem, x, got)
        found.append(got)
    assert any(not np.array_equal(units.bits(a[0]), units.bits(b[0])) for a, b in itertools.combinations(found, 2))
    for a, b in itertools.combinations(found, 2):
        assert all(np.array_equal(units.bits(one), units.bits(two)) for one, two in zip(a[1:], b[1:], strict=True))


@pytest.mark.parametrize("heads", [(6, 1), (6, 2), (6, 6)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
def test_no_query_head_of_a_group_is_lost(heads, deterministic):
    problem = units.make_problem(64, sram_kb=64)
    x = units.draw((2, *heads, 40, 70), 64, 64, "fp16", causal="top_left", deterministic=deterministic)
    units.assert_right(problem, x, units.gradients(problem, x, schedules=LATE))


def test_random_problems_are_within_the_bound_in_every_schedule():
    """60 of them, over the package of one width: shapes around tile edges, masks, groups, lengths, gradients wanted."""
    problem = units.make_problem(48, 64, sram_kb=64)
    plan = units.plan_of(problem)
    rng = np.random.default_rng(5)
    sides = [1, 2, plan.br - 1, plan.br, plan.br + 1, plan.bc - 1, plan.bc, plan.bc + 1, 2 * plan.bc + 1]
    for _ in range(60):
        hkv = int(rng.integers(1, 3))
        b, hq = int(rng.integers(1, 3)), hkv * int(rng.integers(1, 4))
        nq, nk = int(rng.choice(sides)), int(rng.choice(sides))
        lengths = tuple(int(n) for n in rng.integers(0, nk + 1, b)) if rng.random() < 0.4 else None
        x = units.draw(
            (b, hq, hkv, nq, nk), 48, 64, str(rng.choice(["bf16", "fp16"])), seed=int(rng.integers(1000)),
            dlse=bool(rng.random() < 0.5), causal=[False, "bottom_right", "top_left"][rng.integers(3)],
            key_lengths=lengths, wanted=str(rng.choice(["qkv", "q", "kv", "qk"])),
            deterministic=bool(rng.random() < 0.5), scale=float(rng.choice([0.05, 48**-0.5, 0.5])),
        )  # fmt: skip
        units.assert_right(problem, x, units.gradients(problem, x))
