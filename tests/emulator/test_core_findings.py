"""Each kind of fault is found, with its kind and its lines, in every schedule; the same kernel without it is clean."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, guarded

KERNELS = Path(__file__).parent / "kernels"

SHARED = {
    "read_without_syncthreads": "race",
    "overwrite_without_syncthreads": "race",
    "overwrite_of_narrow_reads": "race",
    "two_writers": "race",
    "shuffle_instead_of_syncwarp": "race",
    "syncwarp_instead_of_barrier": "race",
    "reader_only_arrives": "race",
    "copy_not_waited_for": "race",
    "copy_of_the_wrong_group": "race",
    "copy_without_barrier": "race",
    "copy_into_a_buffer_in_use": "race",
    "exit_with_a_copy": "exit-with-cp-async",
    "read_of_nothing": "uninitialised-read",
    "beyond_the_block": "shared-out-of-bounds",
    "before_the_block": "shared-out-of-bounds",
    "misaligned_row": "shared-misaligned",
    "misaligned_store": "shared-misaligned",
    "copy_of_too_many_bytes": "bad-operand",
}
THREADS = {
    "divergent_shuffle": "divergent-collective",
    "shuffle_of_another_mask": "divergent-collective",
    "lane_outside_of_its_mask": "lane-not-in-mask",
    "exited_lane_is_waited_for": "exited-lane-in-mask",
    "lane_exits_from_a_mask": "exited-lane-in-mask",
    "warp_split_over_two_barriers": "divergent-barrier",
    "barrier_that_does_not_exist": "bad-barrier",
    "count_of_half_a_warp": "bad-barrier",
    "two_counts_for_one_barrier": "barrier-count-mismatch",
    "barrier_that_one_warp_skips": "deadlock",
    "two_warps_at_two_barriers": "deadlock",
    "lanes_at_a_barrier_and_a_shuffle": "deadlock",
}
GLOBAL = {
    "read_behind_the_end": "global-out-of-bounds",
    "copy_behind_the_end": "global-out-of-bounds",
    "write_before_the_start": "global-out-of-bounds",
    "write_to_an_input": "write-to-read-only",
    "misaligned_load": "global-misaligned",
    "misaligned_copy": "global-misaligned",
    "two_blocks_write_one_place": "global-race",
    "block_reads_what_another_writes": "global-race",
}
ONCE = {"output_written_twice": "written-twice", "output_not_written": "not-written"}
ROWS = {"write_between_the_rows": "written-outside", "row_not_written": "not-written"}
FAULTS = [
    (file, name, kind, output)
    for file, table, output in (
        ("core_shared.cu", SHARED, "free"),
        ("core_threads.cu", THREADS, "free"),
        ("core_global.cu", GLOBAL, "free"),
        ("core_global.cu", ONCE, "once"),
        ("core_global.cu", ROWS, "rows"),
    )
    for name, kind in table.items()
]


def launch(file, name, fault, output, **configuration):
    """One run of a kernel of `kernels/`. output: "free", "once", or "rows" (100 bytes of every 128, written once)."""
    emulator = Emulator(build.library(KERNELS / file))
    emulator.configure(**configuration)
    source, target = guarded((1024,), np.float32, fill=0), guarded((1024,), np.float32)
    emulator.register("in", source)
    if output == "rows":
        emulator.register("out", target.reshape(32, 32)[:, :25], once=True)
    else:
        emulator.register("out", target, writable=True, once=output == "once")
    return emulator.launch("run", name.encode(), int(fault), source, target)


def marked(file, name):
    """The lines that end in [name]."""
    text = (KERNELS / file).read_text().splitlines()
    return {number for number, line in enumerate(text, 1) if line.endswith(f"// [{name}]")}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("file, name, kind, output", FAULTS, ids=[f[1] for f in FAULTS])
def test_the_fault_is_found_with_its_lines(file, name, kind, output, schedule):
    run = launch(file, name, True, output, schedule=schedule)
    (finding,) = run.findings
    assert (finding.kind, run.code != 0) == (kind, kind != "not-written"), finding.sentence
    assert "\n" not in finding.sentence and len(finding.sentence) < 500
    if kind == "not-written":  # no line did it: that of the bytes beside them is named
        assert "'out'" in finding.sentence and {finding.line} == marked(file, name)
        return
    lines = {finding.line, finding.other} - {None}
    assert lines == marked(file, name), finding.sentence
    assert finding.file == file and re.match(rf"{file}:{finding.line}( \(called at .*?\))?: ", finding.sentence)
    assert finding.other is None or f"{file}:{finding.other}" in finding.sentence
    assert finding.thread is not None and re.search(rf"\bthread {finding.thread}\b", finding.sentence)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("file, name, kind, output", FAULTS, ids=[f[1] for f in FAULTS])
def test_the_kernel_without_the_fault_is_clean(file, name, kind, output, schedule):
    launch(file, name, False, output, schedule=schedule).check(name)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("fewer", [False, True], ids=["half stay", "a quarter stays"])
def test_threads_that_exit_complete_the_barrier_of_the_block(fewer, schedule):
    run = launch("core_threads.cu", "threads_that_leave_early", fewer, "free", schedule=schedule).check()
    assert run.counters["barriers"] == 2


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [name for name, kind in SHARED.items() if kind == "race"])
def test_races_do_not_depend_on_the_luck_of_a_schedule(name, seed):
    (finding,) = launch("core_shared.cu", name, True, "free", timing="random", order="random", seed=seed).findings
    assert (finding.kind, {finding.line, finding.other}) == ("race", marked("core_shared.cu", name))


def test_a_clean_launch_after_a_finding_is_clean():
    for name in (*SHARED, "read_without_syncthreads"):
        assert launch("core_shared.cu", name, True, "free").findings
        launch("core_shared.cu", "copy_without_barrier", False, "free").check()


def test_a_deadlock_says_who_waits_for_what():
    (finding,) = launch("core_threads.cu", "two_warps_at_two_barriers", True, "free").findings
    for part in (
        "32 threads, the first is thread 0, wait in bar.sync",
        "barrier 4, 32 of 64 threads have arrived",
        "32 threads, the first is thread 32, wait in bar.sync",
        "barrier 5, 32 of 64 threads have arrived",
    ):
        assert part in finding.sentence
    (finding,) = launch("core_threads.cu", "lanes_at_a_barrier_and_a_shuffle", True, "free").findings
    assert "warp 0 misses lanes 16-31, of which lane 16 is in __syncthreads" in finding.sentence


def test_collecting_counts_what_it_finds_again():
    run = launch("core_shared.cu", "overwrite_without_syncthreads", True, "free", collect=True)
    first, second = run.findings  # warps 1 and 3 read what warps 0 and 2 wrote too early, and overwrite what these read
    assert first.kind == second.kind == "race" and run.code != 0
    assert (first.line, first.other) == (second.other, second.line)
    assert first.count == second.count == 64


def test_without_checks_a_race_passes_and_bounds_still_hold():
    launch("core_shared.cu", "overwrite_without_syncthreads", True, "free", check=False).check()
    (finding,) = launch("core_shared.cu", "beyond_the_block", True, "free", check=False).findings
    assert finding.kind == "shared-out-of-bounds"
