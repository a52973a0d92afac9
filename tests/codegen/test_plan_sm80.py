"""The mma.sync planner: the paper's tile made legal step by step, overrides refused, nothing accepted that spills."""

import itertools
import json
import re
from pathlib import Path

import pytest

from codegen import problem
from codegen.devices import DEVICES, KB
from codegen.errors import PlanError
from codegen.plans import registers_sm80, sm80
from spec import tile_rule

ARCHS = ("sm80", "sm86", "sm89", "sm120")
TABLE = Path(registers_sm80.__file__).with_suffix(".json")


def decide(kb, d, arch="sm80", **more):
    return sm80.decide(problem.make(sram_bytes=kb * KB, d=d, archs=[arch], **more), arch)


def plan(kb, d, arch="sm80", **more):
    return decide(kb, d, arch, **more).variants[0].plan


def changes(decision):
    return [(c.what, c.why) for c in decision.changes.get(f"{decision.arch}/bf16", ())]


def test_the_papers_tile_for_192_kb_and_d_128_is_legal_as_it_is():
    decision = decide(192, 128)
    tile = decision.variants[0].plan
    assert (tile.br, tile.bc, tile.warps) == (128, 192, 8) and changes(decision) == []
    assert [(m.name, m.bytes) for m in tile.memory] == [("Q tile", 32768), ("K tile", 49152), ("V tile", 49152)]
    assert decision.limit_bytes == 163 * KB and "sm_80" in decision.limit_reason


def test_a_paper_tile_that_spills_is_shrunk_and_says_so():
    decision = decide(192, 64)
    (what, why), *more = changes(decision)
    assert what == "Bc 384 -> 256" and more == []
    assert "64 x 384 spills: of a thread's 255 registers, S and O take 448 with 32 rows per warp (limit 144)" in why
    (rejected,) = decision.rejected["sm80/bf16"]
    assert (rejected.br, rejected.bc, rejected.why) == (64, 384, why)


def test_a_tile_too_large_for_the_device_loses_keys_then_rows():
    decision = decide(192, 256, "sm86")
    assert decision.limit_bytes == 99 * KB
    tile = decision.variants[0].plan
    assert tile.fast_memory_bytes <= 99 * KB and tile.bc >= sm80.FEW_KEYS
    assert plan(128, 256, "sm86").fast_memory_bytes <= 99 * KB
    squeezed = decide(192, 256, "sm86", br=96)
    assert ("Bc 64 -> 48", "96 x 64 needs 114,688 bytes of 101,376") in changes(squeezed)


def test_both_types_share_one_plan_and_each_target_prints_its_own_symbol():
    for arch in ARCHS:
        decision = decide(96, 64, arch)
        assert [v.dtype for v in decision.variants] == ["bf16", "fp16"]
        assert decision.variants[0].plan is decision.variants[1].plan
        assert {(v.arithmetic, v.isa) for v in decision.variants} == {("mma_sm80", arch)}
        asked = problem.make(sram_bytes=96 * KB, d=64, archs=[arch])
        forward = {f"csrc/forward_{arch}.cu", "csrc/ptx_sm80.cuh"}
        assert set(sm80.files(asked, decision)) > forward | {f"csrc/backward_{arch}.cu"}
        assert set(sm80.files(asked, decide(96, 64, arch, backward=False))) == forward


def test_gradients_have_a_plan_of_their_own_that_fits_beside_any_forward_tile():
    for arch in ARCHS:
        decision = decide(96, 64, arch, br=16, bc=16)
        assert [(v.dtype, v.isa, v.arithmetic) for v in decision.backward] == [
            (dtype, arch, "mma_sm80") for dtype in ("bf16", "fp16")
        ]
        assert decision.backward == decide(96, 64, arch).backward
        assert decide(96, 64, arch, backward=False).backward == ()
        assert {v.plan.fast_memory_bytes <= decision.limit_bytes for v in decision.backward} == {True}


def test_a_budget_for_the_forward_tile_alone_is_refused_with_what_the_gradients_need():
    assert plan(32, 64, dv=256, backward=False).fast_memory_bytes <= 32 * KB
    with pytest.raises(PlanError, match="no backward tile fits 32,768 bytes of shared memory"):
        decide(32, 64, dv=256)


@pytest.mark.field("R094", "R097")
@pytest.mark.parametrize("arch", ARCHS)
def test_every_width_has_a_plan_that_fits_every_resource(arch):
    widths = (8, 16, 24, 40, 64, 72, 96, 128, 136, 160, 192, 208, 240, 256)
    for d, dv, kb in itertools.product(widths, widths, (32, 99, 192, 1024)):
        tile = plan(kb, d, arch, dv=dv, backward=False)
        assert tile.fast_memory_bytes <= min(kb * KB, DEVICES[arch].smem_per_block_bytes)
        assert sum(part.bytes for part in tile.memory) == tile.fast_memory_bytes
        assert tile.br % 16 == tile.bc % 16 == 0 and tile.warps <= 8
        assert tile.threads * tile.as_dict()["registers"] <= DEVICES[arch].registers_per_block
        fit = registers_sm80.fit(tile.row_tiles, tile.warps, tile.d_padded, tile.dv_padded, tile.bc)
        assert fit == registers_sm80.Fit(refill_before_softmax=tile.refill_before_softmax)
        paper = tile_rule.rule(tile_rule.elements(kb * KB, 2), d, dv)
        assert tile.br <= max(16, paper.br) and tile.bc <= max(16, paper.bc)


def test_a_larger_budget_never_loses_a_plan():
    for d, dv in ((128, 128), (40, 256), (256, 8)):
        legal = []
        for sram in range(2048, 64 * KB, 512):
            try:
                sm80.decide(problem.make(sram_bytes=sram, d=d, dv=dv, archs=["sm80"]), "sm80")
                legal.append(True)
            except PlanError:
                legal.append(False)
        assert legal == sorted(legal) and legal[-1]


@pytest.mark.parametrize("br, bc", [(128, 64), (64, 64), (256, 64), (32, 16), (16, 16), (48, 32), (16, 144)])
def test_a_legal_override_is_taken_as_it_is(br, bc):
    decision = decide(192, 128, br=br, bc=bc)
    assert (decision.variants[0].plan.br, decision.variants[0].plan.bc) == (br, bc) and changes(decision) == []


def test_the_fastest_tiles_use_32_rows_per_warp():
    for d, bc in ((64, 128), (128, 64)):
        tile = plan(163, d, br=128, bc=bc)
        assert tile.row_tiles == 2 and tile.warps == 4


@pytest.mark.field("R098")
@pytest.mark.parametrize(
    "override, message",
    [
        ({"br": 8}, "Br=8: mma.m16n8k16 needs a multiple of 16\n  try --br 16"),
        ({"br": 17}, "Br=17: mma.m16n8k16 needs a multiple of 16\n  try --br 16"),
        ({"bc": 8}, "Bc=8: mma.m16n8k16 needs a multiple of 16"),
        ({"bc": 100}, "Bc=100: mma.m16n8k16 needs a multiple of 16\n  try --bc 96"),
        ({"br": 144}, "Br=144: a block has at most 8 warps of 16 or 32 rows\n"
                      "  multiples of 16 up to 128, of 32 up to 256\n  try --br 128"),
        ({"br": 512}, "Br=512: a block has at most 8 warps"),
        ({"br": 128, "bc": 256}, "128 x 256 spills: of a thread's 255 registers, S and O take 384 with 32 rows"),
        ({"br": 256, "bc": 128}, "256 x 128 spills: of a thread's 255 registers, S and O take 256 with 32 rows"),
        ({"br": 256, "bc": 192}, "try --br 256 --bc 64 or --br 128 --bc 192"),
        ({"br": 16, "bc": 208}, "16 x 208 spills"),
    ],
)  # fmt: skip
def test_an_illegal_override_is_refused_with_the_reason(override, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        decide(163, 128, **override)


@pytest.mark.field("R095")
def test_an_override_beyond_shared_memory_names_parts_and_limit():
    with pytest.raises(PlanError) as e:
        decide(99, 128, br=128, bc=160)
    text = str(e.value)
    assert "no tile with Br=128 Bc=160 fits 101,376 bytes of shared memory at d=128, bf16, fp16" in text
    assert "needs 114,688 bytes (Q tile 32,768, K tile 40,960, V tile 40,960)" in text and "try --sram 112KB" in text


@pytest.mark.field("R096")
def test_nothing_fits_says_what_the_smallest_tile_needs():
    with pytest.raises(PlanError) as e:
        decide(1, 256)
    assert "smallest: Br=16 Bc=16 needs 24,576 bytes (Q tile 8,192, K tile 8,192, V tile 8,192)" in str(e.value)


def test_o_wider_than_q_k_and_v_is_counted():
    tile = plan(163, 8, dv=256, br=128, bc=16)
    assert tile.fast_memory_bytes == 2 * 128 * 256 > sum(region.bytes for region in tile.layout)


def test_no_tile_that_the_rule_accepts_spills_in_the_table():
    table = json.loads(TABLE.read_text())
    rows = [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]
    accepted = 0
    for row in rows:
        warps = row["br"] // (16 * row["row_tiles"])
        fit = registers_sm80.fit(row["row_tiles"], warps, sm80.padded(row["d"]), sm80.padded(row["dv"]), row["bc"])
        if fit is not None and fit.refill_before_softmax == row["refill_before_softmax"]:
            accepted += 1
            assert row["spilled_sm_80"] == row["spilled_sm_90"] == 0, row
            assert max(row["registers_sm_80"], row["registers_sm_90"]) <= registers_sm80.PER_THREAD
    assert accepted >= 500


def test_the_table_covers_the_border_of_the_rule_and_every_listed_tile():
    table = json.loads(TABLE.read_text())
    index = {name: table["fields"].index(name) for name in ("row_tiles", "d", "dv", "bc")}
    seen = {tuple(row[index[name]] for name in ("row_tiles", "d", "dv", "bc")) for row in table["rows"]}
    listed = {(2, d, d, bc) for d, lists in registers_sm80.COMPILED.items() for bc in itertools.chain(*lists)}
    assert listed <= seen
    widths = range(16, 257, 16)
    for row_tiles, most in registers_sm80.MOST_ACCUMULATORS.items():
        for d, dv in itertools.product(widths, widths):
            bc = 2 * most // row_tiles - dv
            assert bc <= 0 or (row_tiles, d, dv, bc) in seen
