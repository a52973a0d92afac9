"""A request for sm90a: its companion, its name, what is planned, explained and emitted for it.

The planner here is the tests' own, with one kernel per mask and one for short calls; what the real one decides is
test_plan_sm90a's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import pytest

from codegen import cli, emit, explain, names, package, planners, problem, render
from codegen.devices import DEVICES
from codegen.errors import PlanError, RequestError
from codegen.plan import Change, Decision, MemoryPart, Rejection, Variant, label_of, require_dispatch, with_units

KB = 1024


@dataclass(frozen=True)
class Plan:
    br: int = 128
    bc: int = 128
    scratch_bytes: int = 4

    @property
    def memory(self):
        return (MemoryPart(name="Q tile", bytes=32768), MemoryPart(name="2 K tiles", bytes=65536))

    @property
    def fast_memory_bytes(self):
        return 98304

    def as_dict(self):
        return {"br": self.br, "bc": self.bc, "producer_registers": 24, "consumer_registers": 240, "stages_k": 2}


def variant(**more):
    return Variant(**{"target": "sm90a", "isa": "sm90a", "dtype": "bf16", "arithmetic": "wgmma_sm90a", "plan": Plan(),
                      **more})  # fmt: skip


SEEN = []


def decide(asked, arch):
    SEEN.append((arch, asked.br, asked.bc))
    if asked.sram_bytes < 96 * KB:
        raise PlanError(f"no tile fits {asked.sram_bytes:,} bytes", "smallest: Br=64 Bc=16 needs 98,304 bytes")
    rows = tuple(
        variant(dtype=t, causal=c, length_class=n, plan=Plan(br=asked.br or br))
        for t in asked.dtypes
        for c, n, br in (("full", "short", 64), ("full", "any", 128), ("causal", "any", 192))
    )
    return Decision(
        arch=arch, limit_bytes=asked.sram_bytes, limit_reason="--sram", variants=rows,
        changes={v.key: (Change(what="Bc 192 -> 128", why="two V tiles do not fit"),) for v in rows[:1]},
        rejected={v.key: (Rejection(br=192, bc=192, why="S and O spill"),) for v in rows},
    )  # fmt: skip


def files(asked, decision):
    return {
        **{f"csrc/forward_{v.unit}.cu": ("sm90a_test/kernel.cu.j2", {}) for v in decision.variants},
        "csrc/ptx_sm90a.cuh": ("sm90a_test/ptx_sm90a.cuh", {}),
    }


@pytest.fixture(autouse=True)
def own_planner(monkeypatch, tmp_path):
    """This module plans sm90a; its templates are beside the real ones."""
    monkeypatch.setitem(sys.modules, "tests_planner_sm90a", sys.modules[__name__])
    monkeypatch.setitem(planners.TARGETS, "sm90a", replace(planners.TARGETS["sm90a"], module="tests_planner_sm90a"))
    templates = tmp_path / "templates"
    (templates / "sm90a_test").mkdir(parents=True)
    for folder in render.TEMPLATES.iterdir():
        (templates / folder.name).symlink_to(folder)
    (templates / "sm90a_test" / "kernel.cu.j2").write_text("//% for line in header\n// ${ line }\n//% endfor\n")
    (templates / "sm90a_test" / "ptx_sm90a.cuh").write_text(
        "#ifndef TILEPROOF_PTX_SM90A_CUH\n#define TILEPROOF_PTX_SM90A_CUH\n#endif\n"
    )
    SEEN.clear()
    return templates


def ask(**more):
    return problem.make(**{"sram_bytes": 227 * KB, "d": 128, "archs": ["sm90a"], **more})


# ---- The request


def test_sm90a_brings_the_sm80_kernel():
    assert ask().archs == ("sm80", "sm90a") and ask().dtypes == ("bf16", "fp16")
    assert ask() == ask(archs=["sm90a", "sm80"]) == problem.from_dict(ask().as_dict())
    assert ask(archs=["sm90a", "cpu"]).archs == ("cpu", "sm80", "sm90a")
    direct = problem.Problem(sram_bytes=KB, d=8, dv=8, dtypes=("bf16",), archs=("sm90a",))
    assert direct.archs == ("sm80", "sm90a")


def test_it_is_not_in_the_default_set():
    made = problem.make(sram_bytes=227 * KB, d=128)
    assert made.archs == ("cpu", "sm80") and problem.DEFAULT_SET == 1


def test_a_dtype_that_it_lacks_is_refused_in_its_name():
    with pytest.raises(RequestError, match=r"--arch sm90a has no kernel for float32\n  sm90a takes bf16, fp16"):
        ask(dtypes=["float32"])


def test_the_name_and_the_command_leave_out_what_it_brings():
    assert names.package_name(ask()) == "attn_d128_sram227k_sm90a"
    assert names.canonical_command(ask()) == "codegen --sram 227KB --d 128 --arch sm90a"
    assert names.package_name(ask(archs=["cpu", "sm90a"])) == "attn_d128_sram227k_cpu_sm90a"
    assert names.package_name(ask(archs=["sm86", "sm90a"], dtypes=["fp16"])) == "attn_d128_sram227k_fp16_sm86_sm90a"
    for asked in (ask(), ask(archs=["cpu", "sm90a"]), ask(dv=64, dtypes=["bf16"], br=128, bc=64)):
        assert names.parse(names.package_name(asked)) == asked
    assert names.package_name(ask()) != names.package_name(ask(archs=["sm80"]))


def test_tuned_tiling_is_part_of_the_request_where_a_target_reads_tables():
    tuned = ask(tiling="tuned")
    assert tuned != ask() and problem.from_dict(tuned.as_dict()) == tuned
    assert names.package_name(tuned) == "attn_d128_sram227k_sm90a_tuned"
    assert names.canonical_command(tuned) == "codegen --sram 227KB --d 128 --arch sm90a --tiling tuned"
    wider = ask(tiling="tuned", dtypes=["bf16"], archs=["cpu", "sm90a"], debug=True)
    for asked in (tuned, ask(tiling="tuned", br=128), wider):
        assert names.parse(names.package_name(asked)) == asked
    assert package.asked_of(tuned, "sm80").tiling == "tuned" and package.decide(tuned).problem == tuned
    with pytest.raises(RequestError, match=r"--tiling tuned has no effect on sm80, sm86\n  sm90a has measured plans"):
        problem.make(sram_bytes=KB, d=8, archs=["sm80", "sm86"], tiling="tuned")


# ---- Variants


def test_a_kernel_is_labelled_by_what_makes_it_differ_and_compiled_once_per_plan():
    assert label_of("sm80", "any", "any") == "sm80" == variant(isa="sm80").unit
    assert label_of("sm90a", "causal", "short") == "sm90a_causal_short"
    full, short, causal = (
        variant(causal=c, length_class=n, plan=Plan(br=br))
        for c, n, br in (("full", "any", 64), ("full", "short", 128), ("causal", "any", 64))
    )
    both = [replace(v, dtype=t) for t in ("bf16", "fp16") for v in (short, full, causal)]
    none = {"limit_bytes": 1, "limit_reason": "", "changes": {}, "rejected": {}}
    made = with_units(Decision(arch="sm90a", variants=tuple(both), **none))
    assert [v.unit for v in made.variants] == ["sm90a_0", "sm90a_1", "sm90a_1"] * 2
    assert variant(causal="full").key == "sm90a_full/bf16"
    assert variant(length_class="short").most_rows == 1024
    assert variant().most_rows is None and variant(length_class="long").most_rows is None


def test_every_call_has_a_kernel_and_every_kernel_a_call():
    full, causal, short = variant(causal="full"), variant(causal="causal"), variant(causal="full", length_class="short")
    long = replace(full, length_class="long")
    for complete in ((short, full, causal), (variant(),), (short, variant()), (short, long, causal)):
        require_dispatch(complete)
    other, always_short = replace(causal, dtype="fp16"), variant(length_class="short")
    for incomplete in ((full,), (short, causal), (always_short,), (full, other)):
        with pytest.raises(ValueError, match=r"no kernel takes every length of (full|causal) calls"):
            require_dispatch(incomplete)
    for shadowed in ((full, short, causal), (variant(), causal), (variant(length_class="short"), short, variant())):
        with pytest.raises(ValueError, match="takes every call of"):
            require_dispatch(shadowed)
    for unknown in (variant(causal="top_left"), variant(length_class="nq<=7")):
        with pytest.raises(ValueError, match=r"causal is .*, length_class"):
            require_dispatch((unknown,))


# ---- Planning and emitting


def test_overrides_are_for_sm90a_and_the_companion_keeps_its_own_tile():
    free, tiled = package.decide(ask()), package.decide(ask(br=64, bc=32))
    assert free.decisions[0].variants == tiled.decisions[0].variants
    assert {v.plan.br for v in tiled.decisions[1].variants} == {64}
    assert SEEN[-1] == ("sm90a", 64, 32)
    alone = package.decide(ask(archs=["sm80"], br=64, bc=32))
    assert alone.variants[0].plan.br == 64 != free.variants[0].plan.br


def test_a_budget_that_only_the_companion_meets_is_refused_with_one_that_serves_both():
    with pytest.raises(PlanError, match="try --sram 96KB, where every kernel for sm80, sm90a fits"):
        package.decide(ask(sram_bytes=64 * KB))


def test_plan_json_has_a_row_per_kernel_and_the_files_say_which_they_hold(own_planner):
    rendered = package.render_package(ask(), templates=own_planner)
    plan = json.loads(rendered["plan.json"])
    rows = [(v["target"], v["dtype"], v["causal"], v["length_class"], v["plan"]["br"]) for v in plan["variants"]]
    assert rows[2:5] == [("sm90a", "bf16", "full", "short", 64), ("sm90a", "bf16", "full", "any", 128),
                         ("sm90a", "bf16", "causal", "any", 192)]  # fmt: skip
    assert len(rows) == len(set(rows)) == 8
    assert [v.get("unit") for v in plan["variants"]] == [None] * 2 + ["sm90a_0", "sm90a_1", "sm90a_2"] * 2
    text = rendered["csrc/forward_sm90a_0.cu"].decode()
    assert "// Emitted by tileproof 0.1.0: codegen --sram 227KB --d 128 --arch sm90a\n" in text
    parts = "Q tile 32768, 2 K tiles 65536"
    assert f"// sm90a_full_short bf16: Br=64 Bc=128, 98304 bytes of fast memory ({parts})\n" in text
    assert "sm90a_causal" not in text and "sm90a_full fp16" not in text
    assert package.content_digest(rendered) == plan["digest"]


def test_a_package_without_it_does_not_mention_it():
    rendered = package.render_package(problem.make(sram_bytes=192 * KB, d=64))
    for path, data in rendered.items():
        assert b"sm90a" not in data.lower() and b"TILEPROOF_CUDA_ARCH" not in data, path
        assert b"EXACT" not in data and b"exact_" not in data.lower(), path


def test_the_command_emits_and_checks_it(own_planner, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(render, "TEMPLATES", own_planner)
    monkeypatch.setattr(package.render_package, "__defaults__", (None, own_planner))
    monkeypatch.setattr(package.render_plans, "__defaults__", (own_planner,))
    out = tmp_path / "out"
    for words in (["--arch", "sm90a"], ["--arch", "sm90a", "--check"], ["--arch", "sm80,sm90a", "--check"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["--sram", "227KB", "--d", "128", "--out", str(out), *words])
        assert end.value.code == 0, capsys.readouterr()
    assert emit.is_package(out / "attn_d128_sram227k_sm90a")
    said = capsys.readouterr().out
    assert "comes with sm90a, whatever --arch says" in said


@pytest.mark.parametrize(
    "arch, gpus",
    [("sm90a", ["sm_90"]), ("sm80,sm90a", ["sm_90"]), ("cpu,sm86,sm90a", ["sm_86", "sm_90"]), ("sm80", ["sm_80"])],
)
def test_a_build_by_name_is_for_the_gpus_of_the_targets_and_not_of_a_companion(arch, gpus, monkeypatch, tmp_path):
    built = []
    monkeypatch.setattr(emit, "write_files", lambda files, out: tmp_path)
    monkeypatch.setattr(explain, "show_summary", lambda *_: None)
    monkeypatch.setattr(package, "render_plans", lambda plans: {})
    monkeypatch.setattr("codegen.tools.build", lambda target, named, quiet: built.extend(named))
    with pytest.raises(SystemExit) as end:
        cli.main(["--sram", "227KB", "--d", "64", "--arch", arch, "--build"])
    assert end.value.code == 0 and built == gpus


# ---- --explain


def test_explain_tells_of_the_companion_the_registers_of_each_role_and_each_kernel(capsys):
    explain.show(explain.explanation(package.decide(ask()), 4096))
    said = " ".join(capsys.readouterr().out.split())
    companion = "comes with sm90a, whatever --arch says: for the calls that sm90a cannot take (a stride that no"
    assert said.count(companion) == 1 and said.index("sm80 (A100)") < said.index(companion) < said.index("sm90a (H100")
    assert "24 producer, 240 consumer" in said and "Q tile 32,768, 2 K tiles 65,536" in said
    assert "128 x 128" in said and "sm90a_full: all" in said and "sm90a_causal: all" in said
    assert said.count("short: at most 1,024 query rows; a call runs the first kernel that takes it") == 1
    assert "192 x 192: S and O spill [all]" in said
    assert "Bc 192 -> 128: two V tiles do not fit [sm90a_full_short: bf16]" in said


def test_explain_in_json_names_who_brings_a_target():
    told = explain.explanation(package.decide(ask(archs=["cpu", "sm90a"])), 4096)
    assert {t["arch"]: t["brought_by"] for t in told["targets"]} == {"cpu": None, "sm80": "sm90a", "sm90a": None}
    assert told["targets"][2]["ridge_flop_per_byte"] == explain.ridge("sm90")
    assert DEVICES["sm90a"].smem_per_block_bytes == 227 * KB and DEVICES["sm90a"].registers_per_block == 65536
