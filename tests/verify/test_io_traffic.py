"""Bytes that the emitted kernels move in the emulator equal the closed formula, per tensor and to the byte."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from codegen.errors import RequestError
from spec import io_bounds, io_counts, io_kernels
from spec.io_counts import Sizes
from spec.io_kernels import Bytes
from verify import gpu_packages, io, io_calls, machine, packages, report
from verify.__main__ import main
from verify.guarded_problems import Problem

CUDA = {"dtypes": ("bf16", "fp16"), "archs": ("sm80",)}
# Tile -> request: one warp, 32 rows per warp, more keys than rows, dv of its own, widths that are no multiple of 16.
TILES = {
    "32x32 d=64": {"sram": "163KB", "d": 64, "br": 32, "bc": 32, **CUDA},
    "128x64 d=32": {"sram": "163KB", "d": 32, "br": 128, "bc": 64, **CUDA},
    "16x48 d=72": {"sram": "64KB", "d": 72, "br": 16, "bc": 48, **CUDA},
    "32x16 d=24": {"sram": "163KB", "d": 24, "br": 32, "bc": 16, **CUDA},
    "16x64 d=40 dv=136": {"sram": "64KB", "d": 40, "dv": 136, "br": 16, "bc": 64, **CUDA},
    "16x16 d=16, debug": {"sram": "64KB", "d": 16, "br": 16, "bc": 16, "debug": True, **CUDA},
}


@pytest.fixture(scope="module")
def kernel_of():
    return lambda tile: io.kernel_of(packages.emit(**TILES[tile]))


@pytest.mark.parametrize("tile", TILES)
def test_counted_bytes_equal_the_formula_on_every_shape(kernel_of, tile):
    kernel = kernel_of(tile)
    shapes = io_calls.grid(kernel.br, kernel.bc)
    assert {s.causal for s in shapes} == {"none", "bottom_right", "top_left"} and any(s.nk == 0 for s in shapes)
    assert any(s.lengths for s in shapes) and any(s.hq > s.hkv for s in shapes) and any(s.nq > s.nk for s in shapes)
    for problem in shapes:
        found = io.row(kernel, problem)
        assert found["equal"], (problem, found["differences"])
        assert found["formula"]["total"] >= found["lower_bound"]
        assert found["formula"]["total"] == found["paper_f2f"] + sum(found["own_terms"].values())


@pytest.mark.parametrize("name", ["the default command's", "the paper's tile at d=64"])
def test_the_default_packages_move_what_the_paper_counts(name):
    kernel = io.kernel_of(gpu_packages.request(gpu_packages.PACKAGES[name]))
    call = io_calls.call(io_calls.shown()[0], d=kernel.d, dv=kernel.dv)
    counted = io.measure(kernel, io_calls.shown()[0], "bf16")
    s = Sizes(nq=io_calls.SHOWN, nk=io_calls.SHOWN, dk=kernel.d, dv=kernel.dv)
    assert sum(counted.read.values()) == 2 * io_counts.flash2_forward(s, kernel.br).reads
    assert counted.total == io_kernels.flash2(call, br=kernel.br, bc=kernel.bc, itemsize=2)


def test_a_kernel_that_reads_more_or_less_is_told_by_the_tensor(kernel_of, monkeypatch):
    kernel = kernel_of("32x32 d=64")
    problem = Problem("some", 33, 40, causal="top_left")
    true = io.measure(kernel, problem, "bf16")
    wrong = Bytes(read={**true.read, "k": true.read["k"] + 2}, written={**true.written, "lse": true.written["lse"] - 4})
    monkeypatch.setattr(io, "measure", lambda *args: wrong)
    found = io.row(kernel, problem)
    assert not found["equal"] and len(found["differences"]) == 2 * len(kernel.dtypes)
    assert (
        found["differences"][0].startswith("bf16: ") and "bytes of k read, the formula has" in found["differences"][0]
    )
    assert "bytes of lse written" in found["differences"][1]


def test_a_kernel_that_skips_nothing_computes_the_same_and_is_caught(kernel_of, tmp_path):
    """The planted fault visits every key tile under a causal mask: right values, too many bytes."""
    kernel = kernel_of("32x32 d=64")
    broken = tmp_path / kernel.folder.name
    shutil.copytree(kernel.folder, broken)
    source = broken / "csrc" / "forward_sm80.cu"
    skipping = "redux_max_s32((seen_by_one + kBc - 1) / kBc)"
    assert source.read_text().count(skipping) == 1
    source.write_text(source.read_text().replace(skipping, "redux_max_s32((keys + kBc - 1) / kBc)"))
    problem = Problem("causal", 64, 64, causal="bottom_right")
    assert io.row(kernel, problem)["equal"]
    assert io.row(replace(kernel, folder=broken), problem)["differences"] == [
        f"{dtype}: {4 * 32 * 128} bytes of {name} read, the formula has {3 * 32 * 128}"
        for dtype in kernel.dtypes
        for name in ("k", "v")
    ]


def test_fast_memory_counts_shared_memory_and_registers(kernel_of):
    kernel = kernel_of("32x32 d=64")
    shared = 2 * (32 * 64 + 2 * 32 * 64)
    assert kernel.fast_memory_bytes == shared + 4 * 255 * kernel.threads and kernel.m == kernel.fast_memory_bytes // 2
    call = io_calls.call(Problem("", 4096, 4096), d=64, dv=64)
    figures = io.costs(kernel, call)
    assert figures["lower_bound"] >= 2 * io_bounds.lower_bound_of_call(call, kernel.m)
    assert figures["beside"]["A0"] == 2 * (4 * 4096**2 + 4 * 4096 * 64)
    assert figures["ratio"] > 1 and figures["paper_f2f"] == figures["formula"]["total"] and not figures["own_terms"]


def test_the_command_counts_compares_and_writes(tmp_path):
    file = tmp_path / "io.json"
    tile = ["--sram", "163KB", "--d", "64", "--br", "32", "--bc", "32"]
    words = ["io", *tile, "--n", "40,64", "--causal", "none,top_left"]
    done = CliRunner().invoke(main, [*words, "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert "N=64, causal" in done.stdout and "equal" in done.stdout and "not run" in done.stdout
    figures = json.loads(file.read_text())
    assert figures["holds"] and [r["shape"]["nq"] for r in figures["packages"][0]["rows"]] == [40, 40, 64, 64]
    (block,) = [report.markdown("io emulator", [{"file": "io.json", **figures}])]
    assert "4 of 4 x 2 dtypes" in block and "A1 / ours" in block


def test_the_command_fails_on_a_difference(monkeypatch):
    monkeypatch.setattr(io_kernels, "LSE_BYTES", 8)
    done = CliRunner().invoke(main, ["io", "--d", "16", "--br", "16", "--bc", "16", "--n", "20", "--causal", "none"])
    assert done.exit_code == 1 and "80 bytes of lse written, the formula has 160" in done.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        (["--br", "16"], "--br and --bc need --d"),
        (["--causal", "none"], "--causal needs --n"),
        (["--n", "64,x"], "not a list of whole numbers"),
        (["--n", "0"], "not a list of whole numbers"),
        (["--n", "64", "--causal", "diagonal"], "known: none, bottom_right, top_left"),
        (["--device", "cuda"], "torch sees no CUDA device"),
    ],
)
def test_what_cannot_be_asked_is_refused(words, says):
    if "cuda" in words and machine.gpu():
        pytest.skip("this machine has a GPU")
    done = CliRunner().invoke(main, ["io", *words])
    assert done.exit_code == 2 and says in done.stderr


def test_a_package_without_the_target_is_refused(small_package):
    with pytest.raises(RequestError, match="no kernel for --arch sm80"):
        io.kernel_of(small_package)


@pytest.mark.parametrize("lengths", ["0", "-5", "1e3", "\u00b2", "\u0663", "512,,x", "16385", "9" * 5000])
def test_lengths_that_cannot_be_run_are_refused_before_any_work(lengths):
    with pytest.raises(RequestError, match="try --n 512,1000"):
        io_calls.asked(lengths, None)
