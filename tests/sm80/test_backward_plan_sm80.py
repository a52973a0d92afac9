"""Plans of the mma.sync backward kernels: legal at every width and budget, told with reasons, inside ptxas's sweep."""

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from codegen import lint, problem
from codegen.devices import DEVICES
from codegen.errors import PlanError
from codegen.plans import registers_sm80_backward as registers
from codegen.plans import sm80_backward
from codegen.plans.sm80_backward import QueryTiles
from tests.sm80 import backward_tiles_alone as alone
from tests.sm80 import backward_units as units
from tests.sm80 import sweep_backward_registers as sweep
from verify import ptxas
from verify.ptxas_backward import shared_memory, text_of

BUDGETS = [("sm80", 192), ("sm80", 64), ("sm86", 192), ("sm90", 227), ("sm120", 99)]
TABLE = Path(registers.__file__).with_suffix(".json")
TILES = TABLE.with_name("registers_sm80_backward_tiles.json")
MEASURED = Path(__file__).with_name("query_tiles_h200.json")


def planned(d, dv=None, *, arch="sm80", kb=192):
    return sm80_backward.plan_backward(problem.make(sram_bytes=kb * 1024, d=d, dv=dv, archs=(arch,)), "bf16", arch)


@pytest.mark.parametrize("arch, kb", BUDGETS)
def test_every_width_has_a_legal_plan(arch, kb):
    limit = min(kb * 1024, DEVICES[arch].smem_per_block_bytes)
    for d in problem.HEAD_DIMS:
        for dv in {d, 8, 64, 256}:
            plan, changes, rejected = planned(d, dv, arch=arch, kb=kb)
            keys, query = plan.keys, plan.query
            assert plan.fast_memory_bytes == sum(part.bytes for part in plan.memory) <= limit
            assert registers.holds_keys(keys) and registers.holds_query(query)
            assert keys.warps * keys.key_tiles * 16 == keys.bc * keys.row_warps and keys.rows % 16 == 0
            tiles, across = keys.dq_grid
            assert keys.br * across == 16 * tiles * keys.warps
            assert keys.dq_passes * keys.dq_columns * across * 16 >= keys.d_padded
            assert len(changes) <= 1 and all(r.why for r in rejected) and len(rejected) <= sm80_backward.MOST_REJECTIONS
            assert (plan.br, plan.bc) not in {(r.br, r.bc) for r in rejected}
            for layout in (keys.layout, query.layout):
                assert [r.offset for r in layout] == [sum(r.bytes for r in layout[:i]) for i in range(len(layout))]
                assert all(r.offset % 512 == 0 for r in layout if r.constant != "kRowsAt")  # periods of the swizzle
            assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()


def test_the_tiles_for_an_a100_are_the_ones_that_were_weighed():
    """A reminder: a change here wants a new look at the machine code and, where there is one, at the clock."""
    found = {d: planned(d)[0] for d in (64, 128, 256)}
    assert {d: (p.br, p.bc, p.keys.warps, p.keys.row_warps, p.keys.stages) for d, p in found.items()} == {
        64: (128, 128, 8, 2, 2), 128: (64, 128, 8, 2, 2), 256: (64, 64, 8, 4, 1),
    }  # fmt: skip
    assert {d: (p.query.br, p.query.bc, p.query.warps, p.query.stages) for d, p in found.items()} == {
        64: (128, 64, 4, 2), 128: (256, 32, 8, 2), 256: (128, 32, 8, 1),
    }  # fmt: skip


def measured(d):
    """Tiles of query_tiles timed on an H200 and the deterministic speed with each over the default, four shapes."""
    table = json.loads(MEASURED.read_text())
    rows = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
    return {
        QueryTiles(d=d, dv=d, br=16 * r["row_tiles"] * r["warps"], **{n: r[n] for n in ("bc", "row_tiles", "stages")}):
        r["ratios"] for r in rows if r["d"] == d
    }  # fmt: skip


@pytest.mark.parametrize("d", [64, 128])
def test_the_clocks_of_query_tiles_order_what_was_timed(d):
    """Every pair whose speed differs by 2% or more; the last 2% are not told apart."""
    smem, compared = DEVICES["sm90"].smem_per_sm_bytes, 0
    for (one, fast), (two, slow) in itertools.permutations(measured(d).items(), 2):
        for a, b in zip(fast, slow, strict=True):
            if a > 1.02 * b:
                compared += 1
                assert one.clocks(smem) < two.clocks(smem), (one, two, a, b)
    assert compared >= 70


@pytest.mark.parametrize("d, error", [(64, 0.065), (128, 0.039)])
def test_the_clocks_of_query_tiles_meet_what_was_timed_as_well_as_they_are_said_to(d, error):
    """A line per shape: time over that of the default form against clocks; errors of the part that grows with them."""
    clocks = np.array([tile.clocks(DEVICES["sm90"].smem_per_sm_bytes) for tile in measured(d)])
    times = 1 / np.array(list(measured(d).values()))  # a column per shape
    (fixed, per_clock), *_ = np.linalg.lstsq(np.stack([np.ones_like(clocks), clocks], 1), times, rcond=None)
    grows = np.outer(clocks, per_clock)
    assert (per_clock > 0).all()
    assert np.sqrt(np.mean(((times - fixed - grows) / grows) ** 2)) == pytest.approx(error, abs=5e-4)


@pytest.mark.parametrize("d", [64, 128])
def test_no_tile_that_was_timed_on_an_h200_is_faster_than_the_plan_by_more_than_two_thousandths(d):
    ratios = measured(d)
    chosen = ratios[planned(d, arch="sm90", kb=227)[0].query]
    for others in ratios.values():
        assert all(mine > 0.998 * other for mine, other in zip(chosen, others, strict=True))


def test_two_blocks_count_only_where_both_fit():
    """In shared memory, with the system's 1 KB each, and at 255 registers of each of their threads."""
    tile = QueryTiles(d=128, dv=128, br=128, bc=32, row_tiles=2, stages=2)
    both = 2 * (tile.bytes + 1024)
    assert tile.warps == 4 and tile.clocks(both - 1) > 2 * tile.clocks(both)
    assert DEVICES["sm80"].smem_per_sm_bytes < both <= DEVICES["sm90"].smem_per_sm_bytes
    assert planned(128)[0].query.warps == 8 and planned(128, arch="sm90")[0].query == tile
    for arch, kb in BUDGETS:
        assert DEVICES[arch].registers_per_sm == 32 * sm80_backward.BUSY_WARPS * (registers.PER_THREAD + 1)
        for d in range(16, 129, 16):  # wider, and a single block of 4 warps may be all that fits
            query = planned(d, arch=arch, kb=kb)[0].query
            needed = sm80_backward.BUSY_WARPS // query.warps * (query.bytes + 1024)
            assert needed <= DEVICES[arch].smem_per_sm_bytes


def test_a_budget_that_nothing_fits_says_what_would():
    with pytest.raises(PlanError) as refusal:
        planned(256, kb=32)
    text = str(refusal.value)
    assert "no backward tile fits 32,768 bytes" in text and "--no-backward" in text
    kb = int(re.search(r"--sram (\d+)KB", text)[1])
    assert planned(256, kb=kb)[0].fast_memory_bytes <= kb * 1024


def test_fewer_warps_come_only_where_nothing_else_fits():
    assert planned(64, kb=48)[0].keys.warps >= sm80_backward.FEW_WARPS
    assert planned(256, kb=64)[0].keys.warps < sm80_backward.FEW_WARPS


def test_no_plan_of_the_sweep_spills_and_its_rows_are_todays_plans():
    table = json.loads(TABLE.read_text())
    rows = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
    assert len(rows) >= 40
    for row in rows:
        assert row["spilled_sm_80"] == row["spilled_sm_90"] == 0, row
        assert row["accumulators"] <= registers.MOST_KEYS and row["query_accumulators"] <= registers.MOST_QUERY
    swept = {tuple(row[name] for name in sweep.FIELDS[:6]) for row in rows}
    assert {sweep.described(plan) for plan in sweep.plans()} == swept


def test_no_tile_of_the_sweep_spills_and_the_tight_tiles_of_today_are_in_it():
    """Of every budget; a few pairs of widths, all of which the sweep took."""
    table = json.loads(TILES.read_text())
    rows = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
    assert sum(row["compiled"] for row in rows) >= 3000
    most = {(row["kernel"], row["tile"]): row["accumulators"] for row in rows}
    for row in rows:
        assert row["spilled_sm_80"] == row["spilled_sm_90"] == 0, row
    for d, dv in random.Random(1).sample(list(alone.widths()), 16):
        for tile in filter(sweep.is_tight, alone.of_every_budget(d, dv)):
            assert tile.accumulators <= most[sweep.kernel(tile), sweep.shape(tile)], tile


def test_the_emitted_text_keeps_the_emulators_contract_and_120_columns():
    for d, dv, debug in ((128, 128, False), (40, 72, False), (64, 64, True)):
        asked = units.make_problem(d, dv, debug=debug)
        texts = units.sources(asked, units.plan_of(asked))
        assert {"backward_sm80.cu", "backward_params_sm80.cuh", "backward_query_sm80.cuh"} <= set(texts)
        lint.require_clean({name: text for name, text in texts.items() if lint.covers(name)})
        for name, text in texts.items():
            if not name.startswith("ptx_"):
                assert not [line for line in text.splitlines() if len(line) > 120 and "  // " not in line], name
                assert text.count("\n") <= 450, name


def test_the_gate_sees_other_bytes_than_the_plans(tmp_path):
    plan = planned(64)[0]
    unit = ptxas.write_backward_plan(tmp_path, plan)
    text = text_of(unit.source)
    assert shared_memory(text, unit.limits, ("sm_80",)) == []
    bytes_ = f"kSharedBytes = {plan.keys.bytes};"
    assert text.count(bytes_) == 1
    assert shared_memory(text.replace(bytes_, f"kSharedBytes = {plan.keys.bytes + 16};"), unit.limits, ()) != []
    swapped = text.replace("kQueryThreads, kQuerySharedBytes", "kQueryThreads, kSharedBytes")
    assert swapped != text and shared_memory(swapped, unit.limits, ()) != []
    assert shared_memory(text, unit.limits, ("sm_86",)) != []  # 163 KB on a card of 99
