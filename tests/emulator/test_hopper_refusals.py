"""What an instruction does not allow is refused, with one sentence that says who, what and why."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.emulator import hopper
from verify.emulator.emulator import SCHEDULES, guarded_copy

NAME = "hopper_refusals"
SOURCE = (hopper.KERNELS / f"{NAME}.cu").read_text()
MISUSES = re.findall(r"^  (k\w+),", SOURCE[SOURCE.index("enum Misuse") : SOURCE.index("};")], re.MULTILINE)

REFUSED = {
    "kCountOfZero": ("mbarrier-count", r"mbarrier.init of .* with count 0, which is not in 1..2\^20-1"),
    "kParityOfTwo": ("mbarrier-parity", r"by thread 0 for parity 2, which is neither 0 nor 1"),
    "kNoBarrierThere": (
        "no-mbarrier",
        r"by thread 0 on .*, which no mbarrier.init has made an mbarrier",
    ),
    "kMisalignedBarrier": ("shared-misaligned", r"mbarrier.init.* is not a multiple of 8"),
    "kTooManyBarriers": ("mbarrier-limit", r"room for 64 mbarriers"),
    "kTooManyBytes": ("mbarrier-bytes", r"the byte count 1048576 .* leaves the range of 20 bits"),
    "kSizeOfEight": ("bulk-size", r"bulk load of 8 bytes by thread 0: the size is not a positive multiple of 16"),
    "kMisalignedSource": ("shared-misaligned", r"bulk store.* is not a multiple of 16"),
    "kMisalignedGlobal": ("global-misaligned", r"bulk load.* is not a multiple of 16"),
    "kBeyondShared": ("shared-out-of-bounds", r"bulk load.* touches 16 bytes at"),
    "kWrongRank": ("tensor-map", r"TMA load with 2 coordinates by thread 0 on a tensor map of rank 3"),
    "kNoMap": ("tensor-map", r"operand of TMA load by thread 0 is no tensor map"),
    "kPrefetchNoMap": ("tensor-map", r"operand of prefetch.tensormap by thread 0 is no tensor map"),
    "kNeverCommitted": ("exit-in-flight", r"thread 0 exits with its bulk store never committed to a bulk group"),
    "kOverlap": ("accumulator", r"overlaps registers of another accumulator that is in flight"),
    "kDivergentScale": ("divergent-collective", r"thread 70 gives wgmma another descriptor or scale-d than thread 64"),
    "kThreeWarps": ("divergent-warpgroup", r"warp 2 executed 0 wgmma instructions and another warp .* 1"),
    "kUncommittedProduct": ("exit-in-flight", r"thread \d+ exits with this wgmma in flight"),
    "kMisalignedRow": ("shared-misaligned", r"stmatrix.* is not a multiple of 16"),
}


def run(misuse, schedule):
    emulator = hopper.emulator(NAME)
    array = guarded_copy(np.zeros((64, 64), np.float32))
    emulator.clear()
    emulator.configure(schedule)
    emulator.register("global", array, writable=True)
    return emulator.launch(NAME, array, MISUSES.index(misuse), None)


def test_every_misuse_is_tested_and_without_one_nothing_is_found():
    assert MISUSES[0] == "kNothing" and set(MISUSES[1:]) == set(REFUSED)
    for schedule in SCHEDULES:
        run("kNothing", schedule).check()


@pytest.mark.parametrize("misuse", REFUSED)
def test_a_misuse_is_refused_in_every_schedule(misuse):
    kind, sentence = REFUSED[misuse]
    for schedule in SCHEDULES:
        done = run(misuse, schedule)
        assert [one.kind for one in done.findings] == [kind]
        assert re.search(sentence, done.findings[0].sentence), done.findings[0].sentence
