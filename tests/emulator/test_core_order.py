"""Two accesses with nothing, or too little, between them are found in every schedule; with enough they are clean."""

from __future__ import annotations

import pytest

from tests.emulator.test_core_findings import launch, marked
from verify.emulator.emulator import SCHEDULES

FILE = "core_order.cu"
FAULTS = {
    "ldmatrix_of_own_rows": "race",
    "wait_of_one_lane": "race",
    "arrival_of_one_lane": "race",
    "proxy_fence_of_the_reader": "missing-proxy-fence",
    "init_fence_behind_the_barrier": "no-fence-mbarrier-init",
    "load_of_another_warps_store": "global-race",
    "load_behind_a_wait_for_the_source": "global-race",
    "store_to_what_another_block_reads": "global-race",
    "load_of_a_sum": "global-race",
    "counter_without_fences": "global-race",
    "counter_without_the_readers_fence": "global-race",
    "counter_without_the_writers_barrier": "global-race",
    "counter_before_the_bytes": "global-race",
    "wait_for_a_later_block": "deadlock",
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_with_its_lines(name, schedule):
    (finding,) = launch(FILE, name, True, "free", schedule=schedule).findings
    assert finding.kind == FAULTS[name], finding.sentence
    assert {finding.line, finding.other} - {None} == marked(FILE, name), finding.sentence


@pytest.mark.parametrize("name", FAULTS)
def test_the_kernel_without_the_fault_is_clean(name):
    for schedule in SCHEDULES:
        launch(FILE, name, False, "free", schedule=schedule).check(name)
    for seed in range(12):
        launch(FILE, name, False, "free", timing="random", order="random", seed=seed).check(name)
