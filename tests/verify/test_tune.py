"""Tuning on a machine without a GPU: real candidates of the planner, packages in plain torch, times from a table."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen import problem, tuned
from codegen.errors import CheckFailed, ToolError
from codegen.plan import Decision
from codegen.plans.sm80 import Sm80Plan
from verify import bench_cuda, packages, tune, tune_report
from verify.__main__ import main
from verify.bench_cuda import Sample

HEADER = {"date": "2026-01-02", "command": "python -m verify tune", "versions": {"torch": "2.11"}}
CARD = {"model": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "driver": "1", "cuda": "13.0"}


@pytest.fixture
def case(monkeypatch):
    """Candidates of d=32 within 99 KB, on lengths that a CPU takes."""
    monkeypatch.setattr(tune, "LENGTHS", {"short": (16, 32), "medium": (48,), "long": (64,)})
    monkeypatch.setattr(tune, "TOKENS", 64)
    monkeypatch.setattr(tune, "COLUMNS", 64)
    (one,) = tune.cases(arch="sm80", sram="99KB", widths=[(32, 32)], masks=["causal"], classes=["short"], dtype="bf16")
    return one


def test_candidates_are_legal_plans_of_the_planner_each_once(case):
    found = tune.candidates(case)
    assert len(found) > 8 and all(isinstance(x, Decision) for x in found)
    fields = [json.dumps(tune.fields_of(x)) for x in found]
    assert len(set(fields)) == len(found)
    for decision in found:
        plan = decision.variants[0].plan
        assert Sm80Plan(d=32, dv=32, **tune.fields_of(decision)) == plan  # what the table keeps makes the plan again
        assert plan.fast_memory_bytes <= 99 * 1024
    assert tune_report.describe(tune.fields_of(found[0])).startswith("64x32")


def test_tiles_may_be_named(case):
    named = tune.candidates(dataclasses.replace(case, tiles=((64, 32), (128, 64))))
    assert [(x.variants[0].plan.br, x.variants[0].plan.bc) for x in named] == [(64, 32), (128, 64)]


def times(speeds, *, wobble=0.3):
    """A sampler: number of the candidate -> seconds, under a clock that changes by `wobble` from round to round."""
    seen = Counter()

    def sample(call):
        o = call()
        seen[o.number, o.shape[2]] += 1
        return Sample(speeds[o.number] * (1 + wobble * (seen[o.number, o.shape[2]] % 3)))

    return sample


class Numbered:
    """A package in plain torch whose output knows which candidate made it."""

    def __init__(self, right, number):
        self.right, self.number = right, number

    def attention(self, q, k, v, *, causal):
        o = self.right.attention(q, k, v, causal=causal)
        o.number = self.number
        return o

    def path(self, q, k, v, *, causal):
        return {"target": "sm90a" if self.number == 3 else "sm80"}


def test_the_fastest_candidate_comes_first_whatever_the_clock_does(case, right):
    found = tune.candidates(case)[:5]
    built = {i: Numbered(right, i) for i in (0, 1, 2, 4)}
    speeds = {0: 1.05, 1: 1.0, 2: 1.3, 4: 1.02}
    measured = tune.measure(case, built, sample=times(speeds), dtype="bf16", rounds=5, device="cpu")
    assert sorted(measured.screened) == [0, 1, 2, 4] and sorted(measured.final) == [0, 1, 4]  # 2 is left behind
    assert all(len(s) == 5 for by in measured.final.values() for s in by.values())
    row = tune_report.row_of(case, found, measured, HEADER, "bf16")
    assert [x["plan"] for x in row["plans"]] == [tune.fields_of(found[i]) for i in (1, 4, 0, 2)]
    assert row["plans"][0]["relative"] == 1.0 and row["plans"][1]["relative"] == pytest.approx(1 / 1.02, abs=1e-3)
    assert [x["rounds"] for x in row["plans"]] == [5, 5, 5, tune.SCREEN_ROUNDS]
    assert row["plans"][3]["relative"] <= row["plans"][2]["relative"] and set(row["plans"][0]["tflops"]) == {"16", "32"}


def test_relative_speed_is_taken_round_by_round():
    seconds = {0: {8: [1.0, 10.0, 1.0]}, 1: {8: [2.0, 20.0, 2.0]}}
    assert tune.relative(seconds) == {0: 1.0, 1: pytest.approx(0.5)}


def test_what_is_wrong_or_does_not_build_is_refused_with_its_reason(case, right, broken):
    found = tune.candidates(case)[:4]
    built = {0: "nvcc failed", 1: Numbered(broken(scores=lambda s: 1.2 * s), 1), 2: Numbered(right, 2)}
    built[3] = Numbered(right, 3)  # another target's kernel takes its calls
    measured = tune.measure(case, built, sample=times({2: 1.0}), dtype="bf16", rounds=2, device="cpu")
    assert list(measured.final) == [2]
    row = tune_report.row_of(case, found, measured, HEADER, "bf16")
    assert row["refused"][0]["why"] == "nvcc failed"
    assert row["refused"][1]["why"].startswith("bf16 d=32 N=16 causal: batch")
    assert row["refused"][2]["why"] == "bf16 d=32 N=16 causal: served by sm90a"
    with pytest.raises(CheckFailed, match="no candidate computes attention"):
        tune.measure(case, {0: built[0], 1: built[1]}, sample=times({}), dtype="bf16", rounds=2, device="cpu")


def test_length_classes_share_their_packages_and_a_failed_build_is_a_reason(monkeypatch):
    both = tune.cases(
        arch="sm80", sram="40KB", widths=[(32, 32)], masks=["full"], classes=["short", "long"], dtype="bf16"
    )
    built = []

    class Build:
        def __init__(self, attn):
            self.attn = attn

        def library(self, kind):
            built.append(self.attn.__name__)
            if len(built) == 1:
                raise RuntimeError("ptxas: spills\nmore")

    monkeypatch.setattr(tune.packages, "part", lambda attn, name: Build(attn))
    wanted = {case: tune.candidates(case)[:2] for case in both}
    short, long = tune.build(wanted).values()
    assert len(built) == 2 and short == long and "ptxas: spills" in short.values()
    plan = packages.plan(Path(next(x for x in short.values() if not isinstance(x, str)).__file__).parent)
    assert plan["name"] == "tuned_candidate" and {v["length_class"] for v in plan["variants"]} == {"any"}


# ---- The table and its reader


def plan_row(br, bc, kb, relative):
    return {"plan": {"br": br, "bc": bc, "stages": 2}, "fast_memory_bytes": 1024 * kb, "relative": relative,
            "tflops": {"512": 1.0}}  # fmt: skip


def case_row(causal="causal", length_class="long", plans=None, **more):
    usual = {"arch": "sm80", "d": 128, "dv": 128, "causal": causal, "length_class": length_class, "date": "2026-01-02"}
    plans = plans or [plan_row(192, 128, 208, 1.0), plan_row(128, 128, 160, 0.97), plan_row(64, 64, 64, 0.5)]
    return {**usual, **more, "plans": plans}


@pytest.fixture
def tables(tmp_path):
    folder = tmp_path / "tuning"
    folder.mkdir()
    text = json.dumps(tune_report.merged(None, CARD, [case_row()]))
    (folder / f"{tune_report.slug(CARD['model'])}.json").write_text(text)
    tuned._tables.cache_clear()
    return folder


def fastest(tables, *, sram=227, causal="causal", length_class="long", d=128, **more):
    asked = problem.make(sram_bytes=1024 * sram, d=d, archs=["sm80"], **more)
    return tuned.fastest(asked, "sm80", causal=causal, length_class=length_class, tables=tables)


def test_the_reader_takes_the_fastest_plan_within_the_budget(tables):
    best = fastest(tables)
    assert best.fields == {"br": 192, "bc": 128, "stages": 2} and best.fast_memory_bytes == 208 * 1024
    assert best.why == "measured on NVIDIA H200, 2026-01-02: the fastest plan"
    smaller = fastest(tables, sram=192)
    assert smaller.fields["br"] == 128 and smaller.why.endswith("97 % of the fastest plan's speed")
    assert fastest(tables, sram=160).fields["br"] == 128 and fastest(tables, sram=159).fields["br"] == 64
    assert fastest(tables, sram=63) is None


def test_the_reader_keeps_overrides_and_gives_nothing_for_what_was_not_measured(tables):
    assert fastest(tables, br=64).fields["bc"] == 64 and fastest(tables, br=64, bc=128) is None
    assert fastest(tables, causal="full") is None
    assert fastest(tables, d=64) is None and fastest(tables, dv=64) is None
    assert fastest(tables / "missing") is None


def test_the_next_longer_class_stands_in_for_one_that_the_table_lacks_and_says_so(tables):
    def told(*classes):
        sizes = {"short": 64, "medium": 128, "long": 192}
        rows = [case_row(length_class=name, plans=[plan_row(sizes[name], 64, 64, 1.0)]) for name in classes]
        rows += [case_row(length_class="short") | {"plans": []}] * ("short" not in classes)
        for cases in (rows, rows[::-1]):
            table = tune_report.merged(None, CARD, rows) | {"cases": cases}
            (tables / "h200.json").write_text(json.dumps(table))
            tuned._tables.cache_clear()
            choices = [fastest(tables, length_class=name) for name in tuned.LENGTH_CLASSES]
            yield [choice and (choice.fields["br"], choice.longer_class) for choice in choices]

    for classes, expected in {
        ("short", "medium", "long"): [(64, ""), (128, ""), (192, "")],
        ("short", "long"): [(64, ""), (192, "long"), (192, "")],
        ("medium", "long"): [(128, "medium"), (128, ""), (192, "")],
        ("short", "medium"): [(64, ""), (128, ""), None],
        ("long",): [(192, "long"), (192, "long"), (192, "")],
    }.items():
        assert list(told(*classes)) == [expected, expected], classes
    (tables / "h200.json").write_text(json.dumps(tune_report.merged(None, CARD, [case_row()])))
    tuned._tables.cache_clear()
    why = "measured on NVIDIA H200, 2026-01-02, in long calls: the fastest plan"
    assert fastest(tables, length_class="medium").why == why


NO_ROWS = [{"plan": {}}, *({**plan_row(64, 64, 64, 1), name: "1"} for name in ("relative", "fast_memory_bytes"))]
NO_ROWS += [{**plan_row(64, 64, 64, 1), "relative": speed} for speed in (float("nan"), -1, 1e999)]
NO_CASES = [{}, *(case_row(plans=[row]) for row in NO_ROWS), case_row(length_class=["short"]), case_row(date=None)]


@pytest.mark.parametrize(
    "rest", [{}, {"cases": 1}, {"cases": [], "card": 1}, *({"cases": [case]} for case in NO_CASES)]
)
@pytest.mark.parametrize("name", ["another", tuned.FORMAT])
def test_a_file_that_is_no_table_is_named(tables, name, rest):
    (tables / "a100.json").write_text(json.dumps({"format": name, "card": "a card", **rest}))
    tuned._tables.cache_clear()
    with pytest.raises(ToolError, match=r"a100\.json: not a tuning table"):
        fastest(tables)
    tuned._tables.cache_clear()


def test_a_file_that_is_too_deep_is_no_table(tables):
    (tables / "a100.json").write_text("[" * 200_000)
    tuned._tables.cache_clear()
    with pytest.raises(ToolError, match=r"a100\.json: not a tuning table"):
        fastest(tables)
    tuned._tables.cache_clear()


def test_every_length_belongs_to_one_class_that_is_measured():
    names = [tuned.length_class_of(n) for n in (1, 1024, 1025, 4096, 4097, 10**9)]
    assert names == ["short", "short", "medium", "medium", "long", "long"]
    assert set(tune.LENGTHS) == set(tuned.LENGTH_CLASSES)
    assert all(tuned.length_class_of(n) == name for name, lengths in tune.LENGTHS.items() for n in lengths)


def test_checked_in_tables_can_be_read_and_name_the_fastest_first():
    for file in tuned.TABLES.glob("*.json"):
        for case in tuned.read(file)["cases"]:
            speeds = [row["relative"] for row in case["plans"]]
            assert speeds and speeds[0] == 1.0 == max(speeds), file


def test_cases_that_are_measured_again_replace_the_old_ones_and_keep_the_others():
    first = tune_report.merged(None, CARD, [case_row(), case_row("full"), case_row(d=64)])
    fresh = case_row(plans=[plan_row(64, 64, 64, 1.0)])
    again = tune_report.merged(first, CARD, [fresh])
    order = [(x["d"], x["causal"]) for x in again["cases"]]
    assert order == [(64, "causal"), (128, "full"), (128, "causal")] and again["cases"][2] == fresh
    assert again["card"] == "NVIDIA H200" and again["format"] == tuned.FORMAT and again["driver"] == "1"


def test_the_run_writes_after_every_case(case, right, monkeypatch, tmp_path):
    found = tune.candidates(case)[:2]
    monkeypatch.setattr(tune_report.devices, "device", lambda name: None)
    monkeypatch.setattr(tune_report.machine, "describe", lambda name: {**HEADER, "gpu": CARD})
    monkeypatch.setattr(tune_report, "candidates", lambda case: found)
    numbered = {i: Numbered(right, i) for i in range(2)}
    monkeypatch.setattr(tune_report, "build", lambda tried, step: dict.fromkeys(tried, numbered))

    class Gpu:
        def __init__(self, nvcc):
            self.sample = times({0: 2.0, 1: 1.0})

    monkeypatch.setattr(bench_cuda, "Gpu", Gpu)
    inputs = bench_cuda.inputs
    monkeypatch.setattr(bench_cuda, "inputs", lambda cell, device: inputs(cell, "cpu"))
    file, said = tmp_path / "new" / "h200.json", []
    figures = tune_report.run([case], dtype="bf16", out=file, rounds=2, say=said.append)
    assert json.loads(file.read_text()) == figures and "causal short: 64x64 " in said[0]
    from rich.console import Console

    console = Console(width=140, record=True)
    console.print(tune_report.table(figures))
    assert "NVIDIA H200" in console.export_text()
    assert tune_report.run([case], dtype="bf16", out=file, seconds=-1.0, say=said.append) == figures
    assert "out of time" in said[1]


@pytest.mark.parametrize(
    "words, part",
    [
        (["--arch", "sm75"], "kernels come later"),
        (["--arch", "cpu"], "names no candidates"),
        (["--arch", "sm80", "--mask", "some"], "known: full, causal"),
        (["--arch", "sm80", "--class", "middle"], "known: short, medium, long"),
        (["--arch", "sm80", "--d", "64", "--tiles", "48x16"], "no plan of 48x16 is legal"),
        (["--arch", "sm80", "--d", "64", "--sram", "1KB"], "no plan is legal within 1024 bytes"),
    ],
)
def test_a_request_that_cannot_be_met_exits_2(words, part):
    done = CliRunner().invoke(main, ["tune", *words])
    assert done.exit_code == 2 and part in done.output, done.output
    assert not Path("codegen/tuning/unknown.json").exists()
