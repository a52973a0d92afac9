"""The emulator's twins against the NumPy statements of the PTX ISA, and against the vectors of an H200.

Every case runs with the checker on; any finding is a failure, so the probes are also a test that correct protocols
raise none. Compared as in test_conformance_vectors.py: bit for bit, except sums of fractions (the bound that holds for
any order and any block length of 8 or more) and ex2 (2^-22). Cases about waiting, copying and exchanging run in three
schedules, those about layouts in the late one: no other thread is involved. What the machine refuses must be reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from verify import record
from verify.conformance import emulated, suite
from verify.conformance.case import Array, Case, Near
from verify.emulator.emulator import ACCUMULATIONS, SCHEDULES

DATA = Path(__file__).parents[1] / "data"
LATE, *OTHERS = SCHEDULES
ANY_MACHINE = None  # the error of a sum that holds for every device
DEFAULTS = {"mma": 0, "mma_block": 8, "mma_fraction_bits": 24}  # of the emulator's options


@lru_cache(maxsize=8)
def outputs(topic: str) -> tuple[dict[str, dict[str, Array]], list[str]]:
    """The outputs of a topic's cases in the late schedule, and what was found."""
    made, found = {}, []
    for case in suite.TOPICS[topic]():
        if not case.faults:
            run, made[case.name] = emulated.run(case, LATE)
            found += [f"{case.name}: {finding}" for finding in run.findings]
            found += [f"{case.name}: CUDA error {run.code}"] if run.code else []
    return made, found


@contextmanager
def options(case: Case, **values: float) -> Iterator[None]:
    """Options of the arithmetic, which outlive a configuration."""
    machine = emulated.emulator(case.source)
    for name, value in values.items():
        machine.option(name, value)
    try:
        yield
    finally:
        for name in values:
            machine.option(name, DEFAULTS[name])


@pytest.mark.parametrize("topic", suite.TOPICS)
def test_the_emulator_does_what_the_statements_say(topic):
    made, found = outputs(topic)
    relative = record.relative_error(ANY_MACHINE)
    for case in suite.TOPICS[topic]():
        found = found + (case.misses(made[case.name], relative) if not case.faults else [])
    assert not found


@pytest.mark.parametrize("topic", suite.TOPICS)
def test_the_emulator_does_what_the_machine_does(topic):
    made, _ = outputs(topic)
    vectors = suite.vectors(DATA, topic)
    relative = record.relative_error(ANY_MACHINE)
    differ = [
        f"{case.name}.{name}"
        for case in suite.TOPICS[topic]()
        if not case.faults
        for name, expected in case.expected(relative).items()
        if not np.all(expected.same(made[case.name][name], vectors[suite.key(case, name)]))
    ]
    assert not differ


@pytest.mark.parametrize("schedule", OTHERS, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("topic", ["warp", "copies", "barriers"])
def test_no_schedule_changes_a_result(topic, schedule):
    relative = record.relative_error(ANY_MACHINE)
    for case in suite.TOPICS[topic]():
        run, got = emulated.run(case, schedule)
        run.check(case.name)
        assert not case.misses(got, relative)


@pytest.mark.parametrize("case", [c for c in suite.TOPICS["tensors"]() if c.faults], ids=lambda case: case.name)
def test_what_the_machine_refuses_is_reported(case):
    run, _ = emulated.run(case, LATE)
    assert run.findings
    assert run.code


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_every_model_of_accumulation_stays_within_the_bound(accumulation):
    """And each gives other bits than the exact sum: the cases do round."""
    relative = record.relative_error(ANY_MACHINE)
    compared = 0
    for topic in ("warp", "wgmma"):
        for case in suite.TOPICS[topic]():
            expected = case.expected(relative).get("d")
            if isinstance(expected, Near):
                with options(case, mma=ACCUMULATIONS.index(accumulation)):
                    run, got = emulated.run(case, LATE)
                run.check(case.name)
                assert not case.misses(got, relative)
                assert not np.array_equal(got["d"], expected.exact)
                compared += got["d"].size
    assert compared >= 1024


def test_truncating_sums_in_blocks_of_16_with_25_bits_equal_those_of_an_h200():
    """Bit for bit, so that a whole kernel under this model errs as on the machine. See verify/emulator/measured.py."""
    compared = 0
    for topic in ("warp", "wgmma"):
        vectors = suite.vectors(DATA, topic)
        for case in suite.TOPICS[topic]():
            if case.faults or not isinstance(case.expected(0.0).get("d"), Near):
                continue
            with options(case, mma=ACCUMULATIONS.index("truncating"), mma_block=16, mma_fraction_bits=25):
                run, got = emulated.run(case, LATE)
            run.check(case.name)
            recorded = vectors[suite.key(case, "d")]
            assert np.array_equal(got["d"].view(np.uint32), recorded.view(np.uint32)), case.name
            compared += recorded.size
    assert compared >= 1024
