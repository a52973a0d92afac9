"""A launch passes sizes and arguments on, runs every thread once, and is refused where the driver refuses it."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest

from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, guarded

SOURCE = Path(__file__).parent / "kernels" / "core_launch.cu"
OK, INVALID, FAILED, UNSUPPORTED = 0, 1, 719, 801  # cudaError_t


@pytest.fixture
def emulator():
    made = Emulator(build.library(SOURCE))
    yield made
    made.configure()
    made.option("shared_bytes_max", 227 * 1024)


def ranks(emulator, sizes, *, function="run_ranks", first=0.0):
    out = guarded((math.prod(sizes),), np.float32)
    emulator.clear()
    emulator.register("out", out, once=True)
    return emulator.launch(function, out, np.array(sizes, dtype=np.int32), ctypes.c_float(first)), out


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 1, 1), (3, 2, 2, 8, 5, 3), (5, 1, 1, 1024, 1, 1), (1, 7, 1, 33, 1, 1), (2, 1, 3, 4, 4, 64)],
    ids=str,
)
def test_every_thread_runs_once_with_its_index(emulator, schedule, sizes):
    emulator.configure(schedule)
    run, out = ranks(emulator, sizes, first=7.0)
    assert np.array_equal(out, 7 + np.arange(out.size, dtype=np.float32))
    assert run.check().counters["barriers"] == math.prod(sizes[:3])


@pytest.mark.parametrize(
    "sizes",
    [(0, 1, 1, 32, 1, 1), (1, 1, 1, 0, 1, 1), (1, 1, 1, 1025, 1, 1), (1, 1, 1, 32, 33, 1), (1, 65536, 1, 1, 1, 1)],
)
def test_a_grid_or_block_of_impossible_size_is_refused(emulator, sizes):
    run, _ = ranks(emulator, sizes)
    assert run.code == INVALID and not run.findings


# shared bytes, what the attribute allows (-1: not set), code. The attribute of a kernel stays: the order matters.
LIMITS = [
    (48 * 1024, -1, OK),
    (48 * 1024 + 16, -1, INVALID),
    (64 * 1024, 48 * 1024, INVALID),
    (64 * 1024, 64 * 1024, OK),
    (227 * 1024, 227 * 1024, OK),
    (227 * 1024, 227 * 1024 + 1, INVALID),
]


def test_shared_memory_beyond_48_kib_must_be_asked_for(emulator):
    for shared, allowed, code in LIMITS:
        assert emulator.launch("run_touch_last", shared, allowed, 0).code == code, (shared, allowed)


def test_a_smaller_machine_can_be_asked_for(emulator):
    assert emulator.launch("run_touch_last", 200 * 1024, 227 * 1024, 0).check().code == OK
    emulator.option("shared_bytes_max", 163 * 1024)
    assert emulator.launch("run_touch_last", 200 * 1024, 227 * 1024, 0).code == INVALID
    assert emulator.launch("run_touch_last", 163 * 1024, 227 * 1024, 0).check().code == OK


def test_no_block_finds_what_the_last_one_left_in_shared_memory(emulator):
    emulator.launch("run_touch_last", 4096, -1, 0).check()
    (finding,) = emulator.launch("run_touch_last", 4096, -1, 1).findings
    assert finding.kind == "uninitialised-read"


def test_a_launch_after_a_finding_fails_until_the_record_is_forgotten(emulator):
    run, out = ranks(emulator, (1, 1, 1, 32, 1, 1), function="run_after_a_finding")
    assert run.code == FAILED and [f.kind for f in run.findings] == ["uninitialised-read"]
    assert np.isnan(out).all()
    run, out = ranks(emulator, (1, 1, 1, 32, 1, 1))
    assert run.check().code == OK and not np.isnan(out).any()


def test_clusters_are_not_emulated_and_say_so(emulator):
    assert emulator.launch("run_cluster").code == UNSUPPORTED
