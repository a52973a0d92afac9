"""The planner of the wgmma kernel: legal tiles within the budget, the register rule's record, the files it names."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from codegen import lint, package, problem, render, tuned
from codegen.errors import PlanError, ToolError
from codegen.plan import label_of
from codegen.plans import registers_sm90a, sm90a
from codegen.plans.sm90a import Sm90aPlan

RECORD = json.loads(Path(registers_sm90a.__file__).with_suffix(".json").read_text())
LIMIT = 227 * 1024


def asked(**more):
    return problem.make(**{"archs": ["sm80"], "sram_bytes": 192 * 1024, "d": 128, **more})


def decide(**more):
    return sm90a.decide(asked(**more), "sm90a")


def consumers_of(row):
    return row["br"] // sm90a.WARPGROUP_ROWS


def named(row):
    rings = f"{row['stages_k']}-{row['stages_v']}"
    return f"{row['br']}x{row['bc']}-{row['d']}-{row['dv']}-{row['blocks_per_sm']}-{rings}"


def way_of(row):
    """What the register rule is asked."""
    one_buffer = 1 in (row["stages_k"], row["stages_v"])
    return consumers_of(row), row["blocks_per_sm"], row["bc"], sm90a.padded(row["dv"]), row["p_in_shared"], one_buffer


@pytest.mark.parametrize("row", RECORD, ids=named)
def test_the_register_rule_accepts_what_compiled_cleanly_and_nothing_else(row):
    clean = row["spilled_bytes"] == 0 and not row["warnings"]
    assert registers_sm90a.holds(*way_of(row)) is clean


def test_the_record_has_both_ways_of_p_and_every_split():
    assert {(consumers_of(r), r["blocks_per_sm"]) for r in RECORD} == set(registers_sm90a.REGISTERS)
    assert {r["p_in_shared"] for r in RECORD} == {False, True}
    assert {(r["stages_k"], r["stages_v"]) for r in RECORD} == {(2, 2), (1, 1)}


def test_no_split_wants_more_registers_than_its_launch_gives():
    for (consumers, blocks), (producer, consumer) in registers_sm90a.REGISTERS.items():
        launched = 65536 // (128 * (1 + consumers) * blocks) // 8 * 8
        assert producer + consumers * consumer <= (1 + consumers) * min(launched, 256), (consumers, blocks)
        assert producer % 8 == consumer % 8 == 0


@pytest.mark.parametrize("kb", [64, 100, 192, 227, 300])
@pytest.mark.parametrize("d, dv", [(d, d) for d in range(8, 257, 8)] + [(192, 128), (72, 40), (8, 256), (256, 8)])
def test_every_width_has_a_plan_within_the_budget(kb, d, dv):
    decision = decide(sram_bytes=kb * 1024, d=d, dv=dv)
    plan = decision.variants[0].plan
    assert plan.fast_memory_bytes <= decision.limit_bytes == min(kb * 1024, LIMIT)
    assert sum(part.bytes for part in plan.memory) <= plan.fast_memory_bytes
    one_buffer = 1 in (plan.stages_k, plan.stages_v)
    way = (plan.consumers, plan.blocks_per_sm, plan.bc, plan.dv_padded, plan.p_in_shared, one_buffer)
    assert registers_sm90a.holds(*way)


@pytest.mark.parametrize("d, dv", [(8, 8), (24, 40), (64, 64), (128, 128), (192, 128), (256, 256)])
def test_regions_follow_each_other_on_whole_periods_of_the_swizzle(d, dv):
    for decision in sm90a.candidates(asked(d=d, dv=dv, sram_bytes=LIMIT), "sm90a", causal="full", length_class="short"):
        plan = decision.variants[0].plan
        for before, after in pairwise(plan.layout):
            assert before.offset + before.bytes <= after.offset
        tiles = [r for r in plan.layout if r.name.split()[-1] in ("tile", "tiles") and r.constant != "kTilesAt"]
        assert all(r.offset % sm90a.ALIGNMENT == 0 for r in tiles)
        barriers = 2 * plan.consumers + 2 * plan.stages_k + 2 * plan.stages_v + 2 * 2 + 2
        assert 8 * barriers <= sm90a.BARRIER_BYTES


def test_the_paper_tile_is_changed_step_by_step_and_each_step_says_why():
    decision = decide()
    plan, changes = decision.variants[0].plan, decision.changes["sm90a/bf16"]
    assert (plan.br, plan.bc, plan.stages_k, plan.stages_v) == (128, 144, 2, 2)
    assert [c.what for c in changes] == ["Bc 192 -> 144"] and "196,608 bytes" in changes[0].why
    wide = decide(d=256, sram_bytes=400 * 1024).changes["sm90a/bf16"]
    steps = ["Br 200 -> 192", "Bc 200 -> 192", "Br 192 -> 128", "Bc 192 -> 128", "Bc 128 -> 80"]
    assert [c.what for c in wide] == steps
    assert "64 rows" in wide[0].why and "160 registers" in wide[2].why and "232,448 bytes" in wide[4].why


@pytest.mark.parametrize(
    "more, words",
    [
        ({"br": 96}, "multiple of 64"),
        ({"br": 320}, "at most 256"),
        ({"bc": 24}, "multiple of 16"),
        ({"br": 192, "bc": 160}, "216 with P in registers"),
        ({"br": 192, "bc": 160}, "and P in shared memory wants a multiple of 64 keys"),
        ({"br": 192, "bc": 192}, "240 with P in registers, 192 with P in shared memory"),
        ({"br": 192, "bc": 128, "sram_bytes": 100 * 1024}, "no tile fits"),
        ({"sram_bytes": 8 * 1024}, "try --sram"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(more, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        decide(**more)


@pytest.mark.parametrize("tiling", problem.TILINGS)
@pytest.mark.parametrize("archs", [["sm90a"], ["cpu", "sm80", "sm90a"]], ids=",".join)
def test_a_debug_form_has_the_same_plans_as_the_package(archs, tiling):
    words = {"sram_bytes": LIMIT, "d": 64, "dtypes": ["fp16"], "archs": archs, "tiling": tiling}
    plain, debug = (package.decide(problem.make(**words, debug=form)) for form in (False, True))
    assert [d.variants for d in debug.decisions] == [d.variants for d in plain.decisions]


@pytest.mark.parametrize("tiling", problem.TILINGS)
def test_a_tile_of_one_consumer_says_that_it_is_slow(tiling, tables):
    for d, slow in ((32, True), (64, True), (96, True), (128, False)):
        steps = decide(d=d, tiling=tiling, archs=["sm90a"]).changes["sm90a/fp16"]
        assert any("--tiling tuned" in step.why for step in steps if step.what == "one consumer") is slow
    assert "one consumer" not in [c.what for c in decide(d=64, br=64).changes["sm90a/fp16"]]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder of tuning tables in place of the checked-in one."""
    monkeypatch.setattr(tuned, "fastest", partial(tuned.fastest, tables=tmp_path))
    monkeypatch.setattr(tuned, "why_none", partial(tuned.why_none, tables=tmp_path))
    return tmp_path


def test_tuned_tiling_without_a_table_is_paper_tiling_and_says_so(tables):
    plain, found = decide(d=64), decide(d=64, tiling="tuned", archs=["sm90a"])
    assert found.variants == plain.variants
    before, after = (one.changes["sm90a/bf16"] for one in (plain, found))
    assert after[:-1] == before and after[-1].what == "64 x 256 as with --tiling paper"
    assert after[-1].why.startswith("there is no tuning table: python -m verify tune --arch sm90a --d 64 ")


def test_a_budget_below_every_measured_plan_is_what_is_said_to_be_missing():
    steps = decide(tiling="tuned", archs=["sm90a"], sram_bytes=64 * 1024).changes["sm90a/bf16"]
    assert steps[-1].why == "of the plans that the tuning tables (h200) have for it none fits --sram, --br and --bc"


def test_a_case_that_no_table_has_takes_the_papers_tile_and_says_so(tables):
    plan = sm90a.make_plan(asked(d=64, sram_bytes=LIMIT), 192, 128, (2, 2), causal="full")
    row = {
        "plan": {k: v for k, v in vars(plan).items() if k not in ("d", "dv")},
        "fast_memory_bytes": plan.fast_memory_bytes,
        "relative": 1,
    }
    case = {
        "arch": "sm90a",
        "d": 64,
        "dv": 64,
        "causal": "full",
        "length_class": "long",
        "date": "today",
        "plans": [row],
    }
    table = {"format": tuned.FORMAT, "card": "a card", "cases": [case]}
    (tables / "card.json").write_text(json.dumps(table))
    found = decide(d=64, tiling="tuned", archs=["sm90a"])
    plans = {(v.causal, v.length_class): v.plan for v in found.variants if v.dtype == "bf16"}
    assert len(plans) == 6
    for (mask, length), made in plans.items():
        story = found.changes[f"{label_of('sm90a', mask, length)}/bf16"]
        if mask == "full":
            assert made == plan and [step.what for step in story] == ["64 x 256 -> 192 x 128"]
            calls = "" if length == "any" else ", in long calls"
            assert story[0].why == f"measured on a card, today{calls}: the fastest plan"
        else:
            assert made.br == 64 and story[-1].why.startswith("none of the tuning tables (card) has a plan for it")


@pytest.mark.parametrize("rows", [1, 1024, 1025, 4096, 4097, 10**6])
@pytest.mark.parametrize("causal", tuned.CAUSAL_FORMS)
def test_every_length_runs_the_plan_of_its_class(causal, rows):
    request = asked(tiling="tuned", archs=["sm90a"], sram_bytes=LIMIT)
    found = [v for v in sm90a.decide(request, "sm90a").variants if v.dtype == "bf16" and v.causal == causal]
    first = next(v for v in found if v.most_rows is None or rows <= v.most_rows)
    choice = tuned.fastest(request, "sm90a", causal=causal, length_class=tuned.length_class_of(rows))
    assert first.plan == Sm90aPlan(d=128, dv=128, **choice.fields) and len({v.plan for v in found}) > 1


@pytest.mark.parametrize(
    "other, what",
    [
        ({}, "64 x 64 as with --tiling paper"),
        ({"blocks_per_sm": 2}, "blocks per SM 1 -> 2"),
        ({"stages_v": 1, "p_in_shared": True}, "V tiles 2 -> 1, P in registers -> shared memory"),
        ({"lazy_rescale": True}, "O rescaled always -> when a maximum grew much"),
        ({"bc": 48}, "64 x 64 -> 64 x 48"),
        ({"bc": 48, "blocks_per_sm": 2}, "64 x 64 -> 64 x 48, blocks per SM 1 -> 2"),
    ],
)
def test_a_measured_plan_says_what_differs_from_the_papers_and_nothing_else(tables, other, what):
    paper = decide(d=64, sram_bytes=48 * 1024).variants[0].plan
    plan = replace(paper, causal="full", **other)
    fields = {k: v for k, v in vars(plan).items() if k not in ("d", "dv")}
    case = {"arch": "sm90a", "d": 64, "dv": 64, "causal": "full", "length_class": "long", "date": "today"}
    case["plans"] = [{"plan": fields, "fast_memory_bytes": plan.fast_memory_bytes, "relative": 1}]
    (tables / "card.json").write_text(json.dumps({"format": tuned.FORMAT, "card": "a card", "cases": [case]}))
    *steps, told = decide(d=64, sram_bytes=48 * 1024, tiling="tuned", archs=["sm90a"]).changes["sm90a_full/bf16"]
    assert told.what == what and told.why == "measured on a card, today: the fastest plan"
    # The way to the paper's tile is told where it is taken, but not that a measured plan would be faster.
    assert [step.what for step in steps] == (["Bc 96 -> 64"] if other == {} else [])


@pytest.mark.parametrize("kb", [64, 99, 163, 192, 227])
def test_no_change_of_the_tuned_plans_leads_to_the_same_tile(kb):
    for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256)):
        found = decide(d=d, dv=dv, sram_bytes=kb * 1024, tiling="tuned", archs=["sm90a"])
        for step in (step for steps in found.changes.values() for step in steps if " -> " in step.what):
            for part in step.what.split(", "):
                before, after = part.split(" -> ")
                assert not before.endswith(after), step


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, "takes 90,400 bytes, not 10"),
        ({"bc": 100}, "granules"),
        ({"speed": 1}, "speed: 1 is no field of a plan"),
        ({"causal": "causal"}, "192 x 128 for full calls has a kernel of causal ones"),
        ({"stages_k": "2"}, "stages_k: '2' is no int"),
        ({"br": 192.0}, "br: 192.0 is no int"),
        ({"ping_pong": None}, "ping_pong: None is no bool"),
        ({"stages_v": 0}, "rings of 2 K and 0 V tiles"),
    ],
)
def test_a_table_never_leads_beyond_the_budget_nor_to_another_planners_plan(tables, change, why):
    plan = sm90a.make_plan(asked(d=64, sram_bytes=LIMIT), 192, 128, (2, 2), causal="full")
    fields = {k: v for k, v in vars(plan).items() if k not in ("d", "dv")} | change
    case = {"arch": "sm90a", "d": 64, "dv": 64, "causal": "full", "length_class": "long", "date": "today"}
    case["plans"] = [{"plan": fields, "fast_memory_bytes": 10, "relative": 1}]
    (tables / "card.json").write_text(json.dumps({"format": tuned.FORMAT, "card": "a card", "cases": [case]}))
    with pytest.raises(ToolError, match=why):
        decide(d=64, sram_bytes=64 * 1024, tiling="tuned", archs=["sm90a"])


@pytest.mark.parametrize("causal, size", [("any", 4), ("full", 0), ("causal", 4)])
def test_only_a_kernel_that_may_count_tiles_asks_for_scratch(causal, size):
    plan = sm90a.make_plan(asked(), 128, 128, (2, 2), causal=causal)
    assert plan.scratch_bytes == plan.as_dict()["scratch_bytes"] == size


def test_an_override_that_is_legal_is_taken():
    plan = decide(br=192, bc=128, sram_bytes=LIMIT).variants[0].plan
    assert (plan.br, plan.bc, plan.p_in_shared, plan.skips_masked) == (192, 128, True, True)


def test_consumers_may_not_skip_what_they_would_wait_for():
    """256 x 64 hung on a GPU: the first consumer waited for a third K that the last one could not let in."""
    plan = sm90a.make_plan(asked(d=64), 256, 64, (2, 2))
    assert plan is not None and not plan.skips_masked
    with pytest.raises(PlanError):
        replace(plan, skips_masked=True)


@pytest.mark.parametrize("causal", tuned.CAUSAL_FORMS)
@pytest.mark.parametrize("length_class", tuned.LENGTH_CLASSES)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_candidates_are_distinct_legal_and_include_the_fastest_known(d, causal, length_class):
    fastest = {64: (192, 128), 128: (192, 128), 256: (128, 80)}[d]
    found = sm90a.candidates(asked(d=d, sram_bytes=LIMIT), "sm90a", causal=causal, length_class=length_class)
    plans = [decision.variants[0].plan for decision in found]
    assert len(set(plans)) == len(plans) and fastest in {(p.br, p.bc) for p in plans}
    assert all(p.causal == causal and p.fast_memory_bytes * p.blocks_per_sm <= LIMIT for p in plans)
    assert d != 64 or {(192, bc) for bc in (64, 80, 96, 112, 128)} <= {(p.br, p.bc) for p in plans}


@pytest.mark.parametrize("d, dv", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_what_a_budget_leads_to_with_two_consumers_is_a_candidate(d, dv):
    """Or --tiling tuned would take a plan that nobody compared with the one it replaces."""
    words = {"causal": "causal", "length_class": "long"}
    measured = sm90a.candidates(asked(d=d, dv=dv, sram_bytes=LIMIT), "sm90a", **words)
    tiles = {(one.variants[0].plan.br, one.variants[0].plan.bc) for one in measured}
    for kb in range(64, 228):
        plan = decide(d=d, dv=dv, sram_bytes=kb * 1024).variants[0].plan
        assert plan.consumers == 1 or (plan.br, plan.bc) in tiles, kb


def rendered(asked_for, decision):
    header = ["A test."]
    return {
        path: render.render(template, {**context, "problem": asked_for, "header": header}).decode()
        for path, (template, context) in sm90a.files(asked_for, decision).items()
    }


def tuned_decision(asked_for):
    """As `decide` makes it of a table: 128 x 128 twice, two other tiles."""
    plans = {
        ("full", "short"): sm90a.make_plan(asked_for, 128, 128, (2, 2), causal="full"),
        ("full", "long"): sm90a.make_plan(asked_for, 192, 128, (2, 2), causal="full"),
        ("causal", "short"): sm90a.make_plan(asked_for, 128, 128, (2, 2), causal="causal"),
        ("causal", "long"): sm90a.make_plan(asked_for, 128, 128, (2, 2), causal="causal"),
    }
    return sm90a._decision(asked_for, "sm90a", plans, LIMIT, "--sram")


def kernels_in(files):
    return [path for path in files if re.fullmatch(r"csrc/forward_sm90a_\d+\.cu", path)]


def test_a_package_of_one_plan_has_one_kernel_and_all_that_it_includes():
    files = rendered(asked(), decide())
    assert kernels_in(files) == ["csrc/forward_sm90a_0.cu"]
    lint.require_clean({path: text for path, text in files.items() if lint.covers(path)})
    included = {f"csrc/{name}" for text in files.values() for name in re.findall(r'#include "([^"]+)"', text)}
    assert included - {"csrc/forward.h"} == set(files) - {"csrc/forward_sm90a_0.cu"}


def test_equal_plans_share_a_kernel_and_each_has_its_own_entry():
    request = asked(sram_bytes=LIMIT)
    files = rendered(request, tuned_decision(request))
    assert len(kernels_in(files)) == 3
    for number, path in enumerate(kernels_in(files)):
        assert f'extern "C" int attention_forward_sm90a_{number}(' in files[path]
        assert f"if ((asked->causal != kFull) != {'true' if number == 2 else 'false'}) return" in files[path]
    header = files["csrc/ptx_sm90a.cuh"]
    assert {"wgmma_m64n128k16_bf16_ss", "wgmma_m64n128k16_f16_rs"} <= set(re.findall(r"wgmma_m64n\w+", header))


def test_a_kernel_file_stays_readable_in_one_go():
    for d, br, bc in ((64, 192, 128), (128, 192, 128), (128, 128, 128), (256, 128, 80)):
        request = asked(d=d, br=br, bc=bc, sram_bytes=LIMIT)
        text = rendered(request, sm90a.decide(request, "sm90a"))["csrc/forward_sm90a_0.cu"]
        assert len(text.splitlines()) <= 440


def test_the_plan_class_is_made_of_its_own_fields():
    """What a tuning table keeps of a plan, `fields`, leads back to it."""
    plan = decide().variants[0].plan
    fields = {k: v for k, v in vars(plan).items() if k not in ("d", "dv")}
    assert Sm90aPlan(d=plan.d, dv=plan.dv, **json.loads(json.dumps(fields))) == plan
