"""Each statement of the Hopper protocol, left out or wrong, is found: by its kind, at its line, in a clear sentence.

One kernel (kernels/hopper_protocol.cu) is right with fault 0 and has one fault otherwise. Inputs are integers, so that
the right result is exact.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.emulator import hopper
from verify.emulator.emulator import SCHEDULES, Schedule, guarded, guarded_copy

NAME = "hopper_protocol"
SOURCE = (hopper.KERNELS / f"{NAME}.cu").read_text()
LINES = SOURCE.splitlines()
ENUM = SOURCE[SOURCE.index("enum Fault") : SOURCE.index("};")]
FAULTS = re.findall(r"^  (k\w+),", ENUM, re.MULTILINE)
SLICES = 5
REGISTERS = 168  # a thread at launch: enough for 56 and 256, not for 104 and 256
NO_SWIZZLE, SWIZZLE_128B = 0, 3

# What is found with the default schedule: kind, text of the line, part of the sentence. Other schedules may meet
# another consequence of the same fault first.
FOUND = {
    "kNoFullWait": ("race", "wgmma_m64n64k16_bf16_ss<0, 0>", r"wgmma\) reads .*a bulk load on the mbarrier .* wrote"),
    "kWrongParity": ("race", "wgmma_m64n64k16_bf16_ss<0, 0>", r"wgmma\) reads .*a bulk load on the mbarrier .* wrote"),
    "kFewBytes": ("later-phase", "tma_load_3d", r"completes into its later phase 1: .* too few"),
    "kManyBytes": ("deadlock", "mbarrier_try_wait_parity", r"and 16384 bytes: 16384 landed, but 32768 were expected"),
    "kNoEmptyWait": ("over-arrived", "mbarrier_arrive_expect_tx", r"thread 0 arrives at .* has all its 1 arrivals"),
    "kEarlyRelease": ("race", "tma_load_3d", r"TMA load\) writes .* which wgmma of warp \d read at"),
    "kLateArrivals": ("deadlock", "mbarrier_try_wait_parity", r"still wants 124 of 128 arrivals"),
    "kOverArrival": ("over-arrived", "kOverArrival", r"thread 0 arrives at .* waits for 16384 bytes"),
    "kNoInitFence": ("no-fence-mbarrier-init", "tma_load_3d", r"executed no fence.mbarrier_init"),
    "kNoInitBarrier": ("race", "mbarrier_try_wait_parity", r"thread 0 initialised at .* with no barrier between"),
    "kInitTwice": ("mbarrier-initialised", "kInitTwice", r"which is an mbarrier already"),
    "kBarrierOverwritten": ("mbarrier-overwritten", "mbarrier_arrive_expect_tx", r"whose bytes were overwritten"),
    "kNoWgmmaFence": ("no-wgmma-fence", "wgmma_m64n64k16_bf16_ss<0, 0>", r"wgmma by warp \d with no wgmma.fence"),
    "kNoWgmmaCommit": ("race", "tma_load_3d", r"TMA load\) writes .* which wgmma of warp \d read at"),
    "kNoWgmmaWait": ("exit-in-flight", "wgmma_m64n64k16_bf16_ss<0, 1>", r"no wgmma.wait_group completed it"),
    "kTouched": ("accumulator-touched", "wgmma_wait<0>", r"accumulator touched in flight: thread 150 wrote register 7"),
    "kNoFenceBeforeWgmma": ("missing-proxy-fence", "wgmma_m64n64k16_bf16_ss<0, 1>", r"no fence.proxy.async"),
    "kOneLaneWithoutFence": ("missing-proxy-fence", "wgmma_m64n64k16_bf16_ss<0, 1>", r"which thread 150 wrote"),
    "kFenceBeforeStore": ("missing-proxy-fence", "wgmma_m64n64k16_bf16_ss<0, 1>", r"no fence.proxy.async"),
    "kNoSyncwarp": ("race", "wgmma_m64n64k16_bf16_ss<0, 1>", r"which thread \d+ wrote .* nothing orders the two"),
    "kNoFenceBeforeTma": ("missing-proxy-fence", "tma_store_3d", r"TMA store\) reads .*no fence.proxy.async"),
    "kNoBarrierBeforeTma": ("race", "tma_store_3d", r"TMA store\) reads .* which thread \d+ wrote"),
    "kNoReadWait": ("race", "stmatrix_x4", r"stmatrix\) writes .* which a bulk store of thread \d+ read"),
    "kOtherNoReadWait": ("race", "stmatrix_x4", r"stmatrix\) writes .* which a bulk store of thread 192 read"),
    "kNoBulkCommit": ("race", "stmatrix_x4", r"stmatrix\) writes .* which a bulk store of thread \d+ read"),
    "kNoBulkWait": ("exit-in-flight", "tma_store_3d", r"exits with its TMA store not waited for"),
    "kUnusedLoad": ("exit-in-flight", "tma_load_3d", r"no thread has waited for phase 2 of the mbarrier"),
    "kOtherStage": ("divergent-warpgroup", "wgmma_m64n64k16_bf16_ss<0, 0>", r"warp 6 has another descriptor"),
    "kPoolTooSmall": ("deadlock", "setmaxnreg_inc", r"wants 256, 2816 more in all; the pool has 2560"),
    "kOneWarpKeeps": ("deadlock", "setmaxnreg_inc", r"wants 256, 2816 more in all; the pool has 2304"),
    "kMisaligned": ("shared-misaligned", "tma_load_3d", r"is not a multiple of 1024"),
}
WRONG_RESULT = {"kWrongStride"}  # legal accesses of the wrong bytes


def inputs():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, (64, 64 * SLICES)).astype(np.float32) for _ in range(2))
    v = rng.integers(-2, 3, (64, 64)).astype(np.float32)
    product = hopper.from_bf16(hopper.to_bf16(a @ b.T)) @ v
    return [hopper.to_bf16(x) for x in (a, b, v)], np.stack([hopper.to_bf16(product), hopper.to_bf16(2 * product)])


ARRAYS, EXPECTED = inputs()


def run(fault, schedule=SCHEDULES[0], *, swizzle=SWIZZLE_128B, collect=False, registers=REGISTERS):
    emulator = hopper.emulator(NAME)
    arrays = [guarded_copy(x) for x in ARRAYS]
    d = guarded((2, 64, 64), np.uint16)
    emulator.clear()
    emulator.configure(schedule, collect=collect)
    emulator.option("registers_per_thread", registers)
    for label, array in zip("abv", arrays, strict=True):
        emulator.register(label, array)
    emulator.register("d", d, writable=True)
    return emulator.launch(NAME, *arrays, d, SLICES, FAULTS.index(fault), swizzle, None), d


def text_at(finding):
    source = SOURCE if finding.file == f"{NAME}.cu" else (hopper.KERNELS / finding.file).read_text()
    return source.splitlines()[finding.line - 1]


def test_every_fault_of_the_kernel_is_tested():
    assert FAULTS[0] == "kNone" and set(FAULTS[1:]) == set(FOUND) | WRONG_RESULT


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found_at_its_line(fault):
    kind, text, sentence = FOUND[fault]
    done, _ = run(fault)
    assert done.code == 719 and [one.kind for one in done.findings] == [kind]
    found = done.findings[0]
    assert text in text_at(found)
    assert re.search(sentence, found.sentence), found.sentence
    assert re.match(rf"{found.file}:{found.line}( \(called at .*?\))?: ", found.sentence) and "\n" not in found.sentence


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found_in_every_schedule(fault):
    for schedule in [*SCHEDULES[1:], *(Schedule("random", "random", seed=seed) for seed in range(8))]:
        assert run(fault, schedule)[0].findings, schedule


def test_the_right_kernel_is_exact_and_clean_in_every_schedule():
    for schedule in [*SCHEDULES, *(Schedule("random", "random", seed=seed) for seed in range(30))]:
        done, d = run("kNone", schedule)
        done.check(str(schedule))
        np.testing.assert_array_equal(d, EXPECTED)


@pytest.mark.parametrize("fault", sorted(WRONG_RESULT))
def test_a_wrong_stride_shows_in_the_result(fault):
    done, d = run(fault)
    assert not done.findings and (d != EXPECTED).any()


def test_a_map_without_swizzle_shows_in_the_result():
    # The inner box of 128 bytes needs no swizzle to be legal; the descriptor then reads permuted chunks.
    done, d = run("kNone", swizzle=NO_SWIZZLE)
    assert not done.findings and (d != EXPECTED).any()


def test_collecting_goes_on_after_a_finding():
    done, d = run("kNoFenceBeforeTma", collect=True)
    assert [(one.kind, one.count) for one in done.findings] == [("missing-proxy-fence", 4)]  # two threads, two rounds
    np.testing.assert_array_equal(d, EXPECTED)  # here the bytes had arrived all the same


def test_the_pool_of_registers_is_what_the_block_was_launched_with():
    """Consumers want 256 and producers keep 56: a launch with 156 a thread is just enough."""
    for registers, enough in ((156, True), (152, False)):
        done, _ = run("kNone", registers=registers)
        assert [one.kind for one in done.findings] == ([] if enough else ["deadlock"])


def test_registers_are_not_decreased_to_more_than_a_warp_has():
    done, _ = run("kPoolTooSmall", registers=96)  # dec to 104 from 96
    assert [one.kind for one in done.findings] == ["setmaxnreg"]
    assert "setmaxnreg.dec to 104 by warp 0, which has 96" in done.findings[0].sentence


def test_the_warps_of_a_warpgroup_ask_for_the_same():
    done, _ = run("kOneWarpKeeps", registers=200)  # three warps give enough: nothing waits
    assert [one.kind for one in done.findings] == ["setmaxnreg"]
    assert "warps 0 and 3 of one warpgroup executed different setmaxnreg" in done.findings[0].sentence
