"""Bytes that the emitted backward kernels move in the emulator equal the closed formula, per tensor and to the byte."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import replace

import pytest

from codegen import formulas
from spec.io_backward import GRADIENTS, Form
from spec.io_kernels import Bytes
from verify import io, io_backward, io_calls, packages, report
from verify.guarded_problems import Problem

CUDA = {"sram": "163KB", "archs": ("sm80",)}
# Both dtypes; columns that fill no step of the matrix unit; values wider than keys; gradients in float32.
REQUESTS = {
    "d=32": {"d": 32, "dtypes": ("bf16", "fp16"), **CUDA},
    "d=40 dv=136": {"d": 40, "dv": 136, "dtypes": ("bf16",), **CUDA},
    "d=24, debug": {"d": 24, "dtypes": ("fp16",), "debug": True, **CUDA},
}


@pytest.fixture(scope="module")
def kernel_of():
    return lambda name: io_backward.kernel_of(packages.emit(**REQUESTS[name]))


@pytest.mark.parametrize("name", REQUESTS)
def test_counted_bytes_equal_the_formula_on_every_shape_and_in_both_forms(kernel_of, name):
    kernel = kernel_of(name)
    figures = io_backward.package(kernel, io_calls.grid(kernel.traffic.br, kernel.traffic.bc))
    assert {row["form"] for row in figures["rows"]} == set(io_backward.FORMS) and len(figures["rows"]) >= 2 * 19
    for row in figures["rows"]:
        assert row["equal"], row["differences"]
        assert row["formula"]["total"] >= row["compulsory"]
    sums = [row["formula"]["written"].get("sums", 0) for row in figures["rows"]]
    assert all(sums[::2]) and not any(sums[1::2])  # the default form sums dQ in memory, the deterministic one does not


def test_counted_bytes_equal_the_formula_for_every_subset_of_gradients(kernel_of):
    kernel = kernel_of("d=32")
    problem = Problem("some", 65, 70, b=2, hq=4, hkv=2, causal="bottom_right", lengths=(70, 33))
    for n, deterministic in itertools.product((1, 2), (False, True)):
        for wanted in itertools.combinations(GRADIENTS, n):
            form = Form(wanted=wanted, deterministic=deterministic)
            found = io_backward.row(kernel, problem, str(wanted), form)
            assert found["equal"], (wanted, deterministic, found["differences"])
            assert {t for t in GRADIENTS if t in found["formula"]["written"]} == set(wanted)


def test_a_kernel_that_moves_more_or_less_is_told_by_the_tensor(kernel_of, monkeypatch):
    kernel, form = kernel_of("d=32"), Form()
    problem = Problem("some", 33, 40, causal="top_left")
    true = io_backward.measure(kernel, problem, "bf16", form)
    wrong = Bytes(read={**true.read, "sums": true.read["sums"] + 4}, written={**true.written, "dv": 0})
    monkeypatch.setattr(io_backward, "measure", lambda *_: wrong)
    found = io_backward.row(kernel, problem, "default", form)
    assert not found["equal"] and len(found["differences"]) == 2 * len(kernel.dtypes)
    assert found["differences"][0].startswith("default, bf16: ") and "bytes of sums read" in found["differences"][0]
    assert "0 bytes of dv written" in found["differences"][1]


def test_a_kernel_that_skips_no_tile_of_rows_is_caught(kernel_of, tmp_path):
    """The planted fault visits every row tile under a causal mask: right gradients, too many bytes."""
    kernel = kernel_of("d=32")
    broken = tmp_path / kernel.folder.name
    shutil.copytree(kernel.folder, broken)
    source = broken / "csrc" / "backward_sm80.cu"
    skipping = "min(first_row / kBr, p.row_tiles)"
    assert source.read_text().count(skipping) == 1
    source.write_text(source.read_text().replace(skipping, "0"))
    n = 2 * max(kernel.traffic.br, kernel.traffic.bc)
    problem = Problem("causal", n, n, causal="bottom_right")
    found = io_backward.row(replace(kernel, folder=broken), problem, "default", Form())
    told = [text.split(" bytes of ")[1].split(",")[0] for text in found["differences"]]
    assert told == ["rows read", "sums read", "sums written"] * len(kernel.dtypes)


def test_the_formula_in_plan_json_is_the_papers_and_the_kernels_own_terms_are_what_is_missing(kernel_of):
    kernel = kernel_of("d=32")
    tile = kernel.traffic
    (row, *_) = packages.plan(kernel.folder)["backward"]
    n = 4 * math.lcm(tile.br, tile.bc)  # whole tiles
    stated = formulas.evaluate(row["formulas"]["slow_memory_bytes"], {"Nq": n, "Nk": n})
    whole = kernel.formula(io_calls.call(Problem("", n, n), d=32, dv=32), Form())
    # `prepare` reads LSE and writes it beside D; `finish_dq` reads a statistic per thread that holds a part of a row.
    assert whole.total - stated == n * (4 + 4) + n * 4 * 4 * tile.dq_column_warps


def test_packages_without_backward_kernels_have_no_backward_rows(small_package):
    assert io_backward.kernel_of(small_package) is None
    assert io_backward.kernel_of(packages.emit(d=32, dtypes=("bf16",), backward=False, **CUDA)) is None


def test_the_command_and_the_report_show_the_backward_rows(kernel_of):
    kernel = kernel_of("d=32")
    figures = io.run([kernel.folder], shapes=[Problem("N=40", 40, 40), Problem("N=70", 70, 70, causal="top_left")])
    assert figures["holds"] and len(figures["packages"][0]["backward"]["rows"]) == 4
    titles = [table.title for table in io.tables(figures)]
    assert len(titles) == 2 and ", backward, " in titles[1]
    figures["machine"] |= {"command": "python -m verify io"}
    block = report.markdown("io emulator", [{"file": "io.json", **figures}])
    assert "Backward:" in block and block.count("2 of 2 x 2 dtypes") == 3  # forward, and two forms


def test_a_difference_of_the_backward_kernels_fails_the_run(kernel_of, monkeypatch):
    kernel = kernel_of("d=32")
    monkeypatch.setattr(io_backward, "measure", lambda *_: Bytes(
        read=dict.fromkeys(io_backward.TENSORS, 0), written=dict.fromkeys(io_backward.TENSORS, 0)
    ))  # fmt: skip
    figures = io.run([kernel.folder], shapes=[Problem("N=40", 40, 40)])
    assert not figures["holds"]
    assert all(", backward, N=40: " in text for text in figures["differences"])
