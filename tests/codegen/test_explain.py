"""--explain says what the paper's rule wants, what became of it on each target, and what that costs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from codegen import cli, explain, package, problem
from codegen.planners import TARGETS
from spec import io_bounds, io_counts


@pytest.fixture(scope="module")
def told():
    return explain.explanation(package.decide(problem.make(sram_bytes=196608, d=128)), 4096)


@pytest.fixture
def printed(told, capsys):
    explain.show(told)
    return " ".join(capsys.readouterr().out.split())


def test_the_papers_tile_and_its_bytes_are_always_there(told, printed):
    for dtype in ("bf16", "fp16"):
        tile = told["paper"][dtype]
        assert (tile["br"], tile["bc"], tile["m_elements"]) == (128, 192, 98304)
        assert (tile["five_tiles_bytes"], tile["footprint_bytes"], tile["fits"]) == (212992, 213504, False)
    assert "bf16, fp16: 128 x 192, from M = 98,304 elements; its five tiles need 212,992 bytes, 213,504 with" in printed
    assert "192KB = 196,608 bytes" in printed and "does not fit, 16,896 bytes over" in printed


def test_every_target_says_what_was_made_of_it_and_why(told, printed):
    assert [t["arch"] for t in told["targets"]] == ["cpu", "sm80"]
    for target in told["targets"]:
        keys = {f"{v['isa']}/{v['dtype']}" for v in target["variants"]}
        assert set(target["changes"]) <= keys and set(target["rejected"]) <= keys
        assert target["limit_reason"] in printed and f"{target['limit_bytes']:,}" in printed
        for v in target["variants"]:
            paper = told["paper"][v["dtype"]]
            key = f"{v['isa']}/{v['dtype']}"
            if (v["plan"]["br"], v["plan"]["bc"]) != (paper["br"], paper["bc"]):
                assert target["changes"][key], f"{key} differs from the paper's tile without a reason"
            else:
                assert explain.UNCHANGED in printed
            for step in target["changes"].get(key, []):
                assert step["what"] in printed and " ".join(step["why"].split()) in printed
            assert v["fast_memory_bytes"] <= target["limit_bytes"] <= 196608


def test_the_gradients_have_their_own_tiles_memory_and_reasons(told, printed):
    for target in told["targets"]:
        backward = target["backward"]
        assert f"{target['arch']}, backward: at most {target['limit_bytes']:,} bytes" in printed
        keys = {f"{v['isa']}/{v['dtype']}" for v in backward["variants"]}
        assert keys and set(backward["changes"]) <= keys and set(backward["rejected"]) <= keys
        for v in backward["variants"]:
            key, paper = f"{v['isa']}/{v['dtype']}", told["paper"][v["dtype"]]
            assert (v["plan"]["br"], v["plan"]["bc"]) == (paper["br"], paper["bc"]) or backward["changes"][key]
            for step in backward["changes"].get(key, []):
                assert step["what"] in printed and " ".join(step["why"].split()) in printed
            assert v["fast_memory_bytes"] <= target["limit_bytes"] and f"{v['fast_memory_bytes']:,}" in printed
            assert v["costs"]["flops"] == 10 * 128 * 4096**2 and f"{v['costs']['slow_memory_bytes']:,}" in printed


def test_without_gradients_nothing_is_said_of_them(capsys):
    p = problem.make(sram_bytes=196608, d=128, backward=False)
    told = explain.explanation(package.decide(p), 4096)
    explain.show(told)
    assert "backward:" not in capsys.readouterr().out
    assert all(target["backward"] == {"variants": [], "changes": {}, "rejected": {}} for target in told["targets"])


def test_a_gpu_plan_names_its_registers(told):
    for target in told["targets"]:
        for v in target["variants"]:
            if target["arch"] != "cpu":
                assert 0 < v["plan"]["registers"] <= 255


def test_costs_are_the_specifications(told):
    sizes = io_counts.Sizes(nq=4096, nk=4096, dk=128, dv=128)
    for target in told["targets"]:
        for v in target["variants"]:
            want = io_counts.flash2_forward(sizes, v["plan"]["br"])
            costs = v["costs"]
            assert (costs["slow_memory_reads_elements"], costs["slow_memory_writes_elements"]) == (
                want.reads,
                want.writes,
            )
            assert costs["flops"] == io_bounds.flops_forward(sizes)
            assert costs["lower_bound_elements"] <= want.total


def test_the_ridge_is_the_data_sheets(told, printed):
    a100 = next(t for t in told["targets"] if t["arch"] == "sm80")
    assert round(a100["ridge_flop_per_byte"]) == 153
    assert "the ridge at 153" in printed


def test_the_json_form_has_json_types_only(told):
    assert json.loads(json.dumps(told)) == told


def test_the_text_stays_within_its_width(told, capsys):
    explain.show(told)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= explain.WIDTH + 2


@pytest.mark.parametrize("arch", TARGETS)
def test_every_target_can_be_explained(arch, capsys):
    explain.show(explain.explanation(package.decide(problem.make(sram_bytes=101376, d=64, archs=[arch])), 1024))
    assert f"\n{arch}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys, text",
    [
        (["a/x", "a/y", "b/x", "b/y"], "all"),
        (["a/x", "b/x"], "a, b: x"),
        (["a/x", "a/y", "b/y"], "a: all; b: y"),
        (["b/x"], "b: x"),
    ],
)
def test_kernels_are_named_in_few_words(keys, text):
    assert explain._kernels(keys, ["a/x", "a/y", "b/x", "b/y"]) == text


@pytest.mark.parametrize("flags", [["--explain"], []])
def test_an_overridden_tile_is_not_called_the_papers(flags, tmp_path):
    asked = ["--d", "128", "--arch", "sm80", "--no-backward", "--out", str(tmp_path), *flags]

    def said(*more):
        return " ".join(CliRunner().invoke(cli.command, [*asked, *more]).output.split())

    both = said("--sram", "163KB", "--br", "128", "--bc", "64")
    assert "as --br and --bc set it: all that this kernel keeps in fast memory fits" in both
    assert explain.UNCHANGED not in both
    assert "as --br set it: all that" in said("--sram", "192KB", "--br", "128")
    assert explain.UNCHANGED in said("--sram", "192KB")
