"""The memory command: a quadratic term is found, a linear one is not mistaken for it, and a point is what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from codegen.errors import RequestError, ToolError
from verify import memory, memory_plot, memory_point, packages, plots
from verify.__main__ import main
from verify.commands.options import finish

LENGTHS = (1024, 2048, 4096)  # at 1024 a tenth of the results is 200 KB: what a resident set is known to
SHAPE = memory.Shape(batch=1, heads=4, d=32)


def line(what, peaks, dtype="float32", lengths=(512, 1024, 2048, 4096)):
    return memory.Line(what, dtype, SHAPE, lengths, tuple((int(x),) for x in peaks))


def test_the_fit_finds_the_three_terms():
    n = np.array([512, 1024, 2048, 4096])
    fixed, row, score = line("ours", 3e6 + 5000 * n + 0.25 * SHAPE.heads * n**2).fit
    assert (fixed, row, score) == pytest.approx((3e6, 5000, 0.25), rel=1e-4)


def test_one_bit_per_score_is_too_much_for_ours():
    n = np.array([512, 1024, 2048, 4096])
    linear = 3e6 + 5000 * n
    noise = np.array([2e5, -2e5, 2e5, -2e5])  # of a resident set
    assert line("ours", linear + noise).holds and line("ours", linear - noise).holds
    assert not line("ours", linear + memory.BIT * 1.1 * SHAPE.heads * n**2).holds
    assert not line("standard", linear).holds  # a measurement that sees no matrix would see no mistake either
    assert line("standard", linear + 4.1 * SHAPE.heads * n**2).holds
    assert line("sdpa", linear).holds is None


@pytest.fixture(scope="module")
def measured(small_package):
    return memory.run(
        small_package, device="cpu", dtypes=("float32",), lengths=LENGTHS, shape=SHAPE, rounds=2,
        algorithms=("ours", "standard"),
    )  # fmt: skip


def test_ours_grows_linearly_and_the_standard_algorithm_does_not(measured):
    ours, standard = measured["lines"]
    assert measured["holds"] and ours["holds"] and standard["holds"]
    assert ours["fit"]["bytes_per_score"] < memory.BIT
    assert standard["fit"]["bytes_per_score"] > 4  # at least one float32 matrix
    assert standard["points"][-1]["peak_bytes"] > 4 * ours["points"][-1]["peak_bytes"]


def test_a_peak_holds_at_least_the_results(measured):
    for one in measured["lines"]:
        assert [p["n"] for p in one["points"]] == list(LENGTHS)
        assert all(p["of_results"] >= 0.9 and len(p["rounds"]) == 2 for p in one["points"])


def test_a_table_has_a_row_per_line_and_a_plot_is_drawn(measured, tmp_path):
    assert memory.table(measured).row_count == 2
    pytest.importorskip("matplotlib")
    assert "plot: " in plots.beside(memory_plot.draw, measured, tmp_path / "memory.json")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plot_without_matplotlib_says_so(measured, monkeypatch, tmp_path):
    def missing(*_):
        raise ImportError("No module named 'matplotlib'")

    assert plots.beside(missing, measured, tmp_path / "memory.json") == "no plot: No module named 'matplotlib'"


def test_a_result_file_is_not_drawn_over(measured, tmp_path):
    def never(*_):
        raise AssertionError("drawn")

    assert plots.beside(never, measured, tmp_path / "memory.png").startswith("no plot: ")


def test_the_figures_are_saved_before_a_plot_that_fails(measured, tmp_path):
    def fails(*_):
        raise ValueError("a figure that cannot be drawn")

    out = tmp_path / "memory.json"
    with pytest.raises(ValueError, match="cannot be drawn"):
        finish(measured, True, out, lambda console: None, True, fails)
    assert json.loads(out.read_text())["lines"]


def test_a_package_without_the_kernels_is_refused(small_package):
    with pytest.raises(RequestError, match="its dtypes: float32"):
        memory.run(small_package, device="cpu", dtypes=("bf16",))
    folder = packages.emit(d=32, dtypes=("float32",), archs=("cpu",), backward=False)
    with pytest.raises(RequestError, match="has no backward kernels for cpu"):
        memory.run(folder, device="cpu", dtypes=("float32",))


def test_lengths_that_no_fit_goes_through_are_refused(small_package):
    for lengths in ((512, 1024), (512, 512, 1024), (memory_point.WARM_ROWS, 512, 1024)):
        with pytest.raises(RequestError, match="growth needs three lengths"):
            memory.run(small_package, device="cpu", dtypes=("float32",), lengths=lengths)


def test_a_point_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(memory, "SECONDS", 60)
    asked = {"folder": "/nowhere", "what": "ours", "device": "cpu", "dtype": "float32", **vars(SHAPE), "n": 256}
    with pytest.raises(ToolError, match="is not a tileproof package"):
        memory.point({**asked, "rounds": 1})


def test_the_command_measures_a_package_and_writes_the_file(small_package, monkeypatch, tmp_path):
    per_score = {"ours": 0, "standard": 12, "sdpa": 0}

    def invented(asked):
        return {"bytes": [100_000 * asked["n"] + per_score[asked["what"]] * asked["heads"] * asked["n"] ** 2]}

    monkeypatch.setattr(memory, "point", invented)
    out = tmp_path / "memory.json"
    command = ["memory", str(small_package), "--dtype", "float32", "--out", str(out)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    stated = json.loads(out.read_text())
    assert stated["kind"] == "memory" and stated["shape"]["d"] == 32 and stated["machine"]["cpu"]["model"]
    assert [one["what"] for one in stated["lines"]] == list(memory.ALGORITHMS)
    per_score["ours"] = 4
    assert CliRunner().invoke(main, command).exit_code == 1
    assert [one["holds"] for one in json.loads(out.read_text())["lines"]] == [False, True, None]


def test_a_package_with_another_width_of_values_is_refused():
    folder = packages.emit(d=32, dv=16, dtypes=("float32",), archs=("cpu",))
    done = CliRunner().invoke(main, ["memory", str(folder)])
    assert done.exit_code == 2 and "dv" in done.output
