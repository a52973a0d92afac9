"""How packages and peers are timed on a GPU, told on a machine without one: what is measured is a table of numbers."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import itertools
import json
import random
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from codegen.errors import CheckFailed, RequestError
from verify import (
    bench,
    bench_cuda,
    bench_grid,
    bench_plot,
    bench_table,
    overhead,
    packages,
    peers,
    plots,
    report,
    sm_clock,
)
from verify.bench_check import Expected, rows_of
from verify.bench_cuda import Sample
from verify.bench_grid import Grid

CELL = bench.Cell(dtype="bf16", d=32, n=64, causal=True, batch=2, heads=4, gqa=2)


# ---- The check before timing


def sdpa(q, k, v, causal, **more):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, **more)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_right_attention_passes_the_check_and_wrong_calls_do_not(dtype, causal):
    cell = bench.Cell(dtype=dtype, d=64, n=512, causal=causal, batch=2, heads=4, gqa=2)
    q, k, v = bench_cuda.inputs(cell, "cpu")
    expected = Expected(q, k, v, causal=causal, dtype=dtype)
    o = sdpa(q, k, v, causal)
    assert expected.difference(o) is None
    wrong = {
        "mask": sdpa(q, k, v, not causal),
        "scale": sdpa(q, k, v, causal, scale=0.9 * cell.d**-0.5),
        "heads": sdpa(q, k.flip(1), v.flip(1), causal),
        "unwritten": torch.full_like(o, torch.nan),
        "zeros": torch.zeros_like(o),
        "shape": o.transpose(1, 2),
        "a bit in the middle of the mantissa": o * 1.03125,
    }
    for name, output in wrong.items():
        assert expected.difference(output) is not None, name


def test_the_sampled_rows_hold_the_first_and_the_last_ones():
    assert rows_of(2, random.Random(0)) == [0, 1]
    rows = rows_of(512, random.Random(0))
    assert rows[:3] == [0, 1, 2] and rows[-3:] == [509, 510, 511] and len(rows) > 6 and rows == sorted(set(rows))


@pytest.mark.parametrize("layout", bench_grid.LAYOUTS)
def test_inputs_are_normal_numbers_in_the_layout_asked_for(layout):
    q, k, v = bench_cuda.inputs(
        bench.Cell(dtype="bf16", d=32, n=64, causal=False, heads=4, gqa=2, layout=layout), "cpu"
    )
    assert tuple(q.shape) == (1, 4, 64, 32) and tuple(k.shape) == tuple(v.shape) == (1, 2, 64, 32)
    assert q.transpose(1, 2).is_contiguous() == (layout == "bnhd") and q.is_contiguous() == (layout == "bhnd")
    assert 0.8 < q.float().std() < 1.2 and not torch.equal(k, v)


# ---- Rounds


class FakeGpu:
    """Answers a sample from a table of seconds; the clock falls from round to round."""

    multiprocessors, capability = 132, (9, 0)

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def sample(self, call):
        name = call()
        self.asked.append(name)
        return Sample(self.seconds.get(name, 1.0) * (1 + 0.01 * len(self.asked)), 1.5e9)

    def product(self):
        return "product"


def test_every_round_samples_each_call_once_in_an_order_of_its_own():
    order = []
    calls = {name: (lambda name=name: order.append(name) or name) for name in "abcd"}
    found = bench_cuda.interleave(calls, rounds=8, sample=FakeGpu({}).sample, choose=random.Random(0))
    rounds = [tuple(order[i : i + 4]) for i in range(0, 32, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds) and len(set(rounds)) > 4
    assert {name: len(taken) for name, taken in found.items()} == dict.fromkeys("abcd", 8)


def peer(name, function):
    return peers.Peer(name, name, "torch", lambda q, k, v, causal: peers.Call(lambda: function(q, k, v, causal)))


def group(attn, found, cells=(CELL,)):
    gpu = FakeGpu({})
    gpu.sample = lambda call: Sample({"Tensor": 1.0, "str": 2.0}[type(call()).__name__], 1.5e9)
    return bench_cuda.time_group(cells, {"ours": attn}, found, gpu=gpu, rounds=3, device="cpu")


def test_a_peer_that_fails_or_computes_something_else_is_named_and_not_timed(right):
    def failing(*_):
        raise RuntimeError("no kernel for this head size\nlong text")

    found = {
        "good": peer("good", sdpa),
        "mask": peer("mask", lambda q, k, v, causal: sdpa(q, k, v, not causal)),
        "none": peer("none", failing),
    }
    (timing,) = group(right, found)
    assert list(timing.peers) == ["good"] and len(timing.ours) == 3
    assert timing.matmul_flops == 2.0 * bench_cuda.MATMUL**3 / 2.0  # sampled in the same rounds
    assert timing.absent["none"] == "RuntimeError: no kernel for this head size"
    assert timing.absent["mask"].startswith("not attention: batch ")


def test_our_own_package_must_compute_attention(broken):
    with pytest.raises(CheckFailed, match="ours on bf16 d=32 N=64 causal gqa=2: batch "):
        group(broken(scores=lambda s: 1.1 * s), {})


def test_forms_of_a_shape_share_rounds_and_compare_with_the_first(right):
    plain = bench.Cell(dtype="bf16", d=32, n=64, causal=True, heads=4)
    other = bench.Cell(dtype="bf16", d=32, n=64, causal=True, heads=4, layout="bnhd")
    first, second = group(right, {"good": peer("good", sdpa)}, [plain, other])
    assert first.plain is None and second.plain == first.ours
    assert second.describe()["vs_plain"]["median"] == 1.0
    assert bench_table.summary([first, second])["ours"]["bf16 bnhd gqa=1"]["plain"]["cells"] == 1


class StandIn:
    """torch.cuda on a CPU: events that read the host's clock, one multiprocessor at 1 GHz."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)


@pytest.fixture
def stand_in_gpu(monkeypatch):
    facts = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    for name, value in {
        "Event": StandIn.Event, "synchronize": lambda: None, "current_device": lambda: 0,
        "get_device_properties": lambda index: facts, "get_device_capability": lambda: (9, 0),
        "current_stream": lambda: SimpleNamespace(cuda_stream=7),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    def moved(function):
        return lambda *sizes, **words: function(*sizes, **{k: v for k, v in words.items() if k != "device"})

    for name in ("empty", "randn", "zeros", "Generator"):
        monkeypatch.setattr(torch, name, moved(getattr(torch, name)))

    def probe(readings, blocks, stream):
        assert blocks > 132 and stream == 7
        values = (ctypes.c_int64 * 2).from_address(readings)
        values[0] = values[1] = time.perf_counter_ns()
        return 0

    compiled = SimpleNamespace(sm_clocks=SimpleNamespace())
    commands = []
    monkeypatch.setattr(sm_clock, "compile_probe", lambda command, *_: commands.append(command) or compiled)
    monkeypatch.setattr(sm_clock.SmClock, "__init__", entry(sm_clock.SmClock.__init__, probe))
    monkeypatch.setattr(bench_cuda, "MATMUL", 32)
    monkeypatch.setattr(bench_cuda, "L2_BYTES", 4096)
    return commands


def entry(made, probe):
    """SmClock's own constructor; the probe that it loaded is then a Python function."""

    def constructor(self, nvcc):
        made(self, nvcc)
        self._entry = probe

    return constructor


def test_the_sampler_overwrites_the_cache_before_every_call_and_reads_the_clock(stand_in_gpu):
    gpu = bench_cuda.Gpu(["nvcc"])
    assert "-arch=sm_90" in stand_in_gpu[0] and gpu.no_clock == ""
    gpu._l2.fill_(1)
    seen = []

    def call():
        seen.append(int(gpu._l2.sum()))
        gpu._l2.fill_(1)

    taken = gpu.sample(call, warmup=0.001, measure=0.002)
    assert len(seen) >= 6 and set(seen) == {0}
    assert 0 < taken.seconds < 0.1 and taken.hertz == pytest.approx(1e9)
    assert gpu.product().shape == (32, 32) and gpu.product().std() > 1


def test_a_gpu_without_nvcc_times_without_a_clock(stand_in_gpu):
    gpu = bench_cuda.Gpu(None)
    assert gpu.no_clock and gpu.sample(lambda: None, warmup=0.0, measure=0.0).hertz is None


def test_a_whole_run_keeps_what_it_has_and_names_what_failed(stand_in_gpu, right, broken, monkeypatch, tmp_path):
    wrong = broken(scores=lambda s: 1.2 * s)
    modules = {(32, 32): {"sm80": right}, (64, 64): {"sm80": wrong}}
    monkeypatch.setattr(bench_grid, "load", lambda grid: modules)
    monkeypatch.setattr(bench_grid, "build", lambda modules: {})
    monkeypatch.setattr(bench_grid.devices, "device", lambda name: None)
    monkeypatch.setattr(bench_grid.machine, "describe", lambda name: {"gpu": {"model": "a card"}, "versions": {}})
    monkeypatch.setattr(bench_grid, "_digest", lambda attn: "0" * 64)
    monkeypatch.setattr(bench_grid.packages, "part", lambda attn, name: SimpleNamespace(NAME="attn"))
    monkeypatch.setattr(bench_cuda, "nvcc_of", lambda attn: ["nvcc"])
    monkeypatch.setattr(bench_cuda, "WARMUP_S", 0.0)
    monkeypatch.setattr(bench_cuda, "MEASURE_S", 0.0)
    monkeypatch.setitem(peers.PEERS, "fa2", peer("fa2", sdpa))
    monkeypatch.delenv(peers.FOLDERS_VARIABLE, raising=False)
    asked = Grid(
        lengths=(16, 32), masks=("causal",), tokens=32, columns=64, peers=("fa2", "fa3"), rounds=2, overhead=True
    )

    def fails(**_):
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(overhead, "empty_package", fails)
    file, said = tmp_path / "speed.json", []
    figures = bench_grid.run(asked, out=file, say=said.append)
    assert [(c["d"], c["n"]) for c in figures["cells"]] == [(32, 16), (32, 32)] and not figures["holds"]
    assert len(figures["failures"]) == 2 and figures["failures"][0].startswith("sm80 on bf16 d=64 N=16 causal: batch")
    kept = json.loads(file.read_text())
    assert kept["cells"] == figures["cells"] and list(kept["absent"]) == ["fa3"]
    assert all(c["vs_fa2"]["median"] > 0 and c["tensor_use"] > 0 for c in kept["cells"])
    assert any(line.startswith("no fa3: ") for line in said)
    assert "no host overhead at d=32: RuntimeError: no compiler" in said
    late = bench_grid.run(dataclasses.replace(asked, seconds=-1.0))
    assert late["cells"] == [] and len(late["left_out"]) == 4


def test_a_dtype_without_a_kernel_is_refused_before_anything_is_loaded(monkeypatch):
    folder = packages.emit(d=32, dtypes=("bf16",), archs=("sm80",))
    loaded = []
    monkeypatch.setattr(packages, "load", loaded.append)
    for dtypes in (("fp16",), ("bf16", "fp16")):
        with pytest.raises(RequestError, match=r"--dtype fp16: .* has no such kernel for --device cuda") as caught:
            bench_grid.load(Grid(packages=(str(folder),), dtypes=dtypes))
        assert "its dtypes: bf16" in str(caught.value) and loaded == []
    bench_grid.load(Grid(packages=(str(folder),)))
    assert loaded == [folder]


def timing(**changes):
    usual = {
        "cell": CELL, "package": "ours", "ours": [2.0, 2.0, 4.0],
        "peers": {"cudnn": [3.0, 3.0, 3.0], "fa2": [2.2, 2.0, 4.0]},
        "hertz": [1e9, 2e9, None], "peer_hertz": {"cudnn": [1e9] * 3, "fa2": [None] * 3}, "matmul_flops": 7e14,
        "multiprocessors": 132, "capability": (9, 0),
    }  # fmt: skip
    return bench_cuda.GpuTiming(**{**usual, **changes})


def test_figures_of_a_cell():
    stated = timing().describe()
    assert stated["best_peer"] == "fa2" and stated["vs_best"]["median"] == 1.0 and stated["vs_cudnn"]["median"] == 1.5
    uses = [CELL.flops / (4096 * 132 * 2.0 * f) for f in (1e9, 2e9)]
    assert stated["tensor_use"] == pytest.approx(sum(uses) / 2, rel=1e-12)
    assert stated["peer_tensor_use"]["fa2"] is None and stated["clock_ghz"] == 1.5
    assert stated["seconds"]["ours"] == [2.0, 2.0, 4.0] and "vs_plain" not in stated
    unknown = timing(capability=(12, 0), peers={}, peer_hertz={}).describe()
    assert unknown["tensor_use"] is None and "vs_best" not in unknown


# ---- Clock


def test_the_clock_is_cycles_over_nanoseconds_of_the_same_multiprocessor():
    before = [[100, 1000], [0, 0], [50, 1000], [7, 1000]]
    after = [[100 + 3000, 3000], [900, 3000], [50 + 3002, 3000], [7, 3000]]  # 1: read once only; 3: stood still
    assert sm_clock.frequency(before, after) == pytest.approx(1.5005e9)
    assert sm_clock.frequency([[0, 0]], [[5, 5]]) is None
    assert sm_clock.tensor_use(4096 * 132 * 1.5e9, 1.0, 1.5e9, 132, (9, 0)) == 1.0
    assert sm_clock.tensor_use(1.0, 1.0, None, 132, (9, 0)) is None


# ---- Peers


def test_peers_are_skipped_by_name_with_their_reason_and_found_in_the_folders_named(tmp_path, monkeypatch):
    module = "flash_attn_interface"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(peers.FOLDERS_VARIABLE, raising=False)
    found, absent = peers.available(("fa2", "fa3"))
    assert list(found) == ["fa2"] and module in absent["fa3"]
    inside = tmp_path / "unpacked" / "deeper"
    inside.mkdir(parents=True)
    (tmp_path / "unpacked" / "more.pth").write_text("deeper\n")
    text = "def flash_attn_func(q, k, v, causal):\n    return q + (1 if causal else 0), None\n"
    (inside / f"{module}.py").write_text(text)
    monkeypatch.setenv(peers.FOLDERS_VARIABLE, str(tmp_path / "unpacked"))
    found, absent = peers.available(("fa3",))
    assert not absent
    q = torch.arange(24.0).reshape(1, 2, 3, 4)
    call = found["fa3"].prepare(q, q, q, True)
    assert torch.equal(call.result(call.run()), q + 1)  # rows first inside, (B,H,N,d) outside
    monkeypatch.delitem(sys.modules, module)


def test_a_module_that_breaks_while_it_loads_is_absent(monkeypatch):
    broken = peers.Peer("x", "x", "verify.no_such_module", lambda *_: None)
    monkeypatch.setitem(peers.PEERS, "x", broken)
    assert peers.available(("x",)) == ({}, {"x": "ModuleNotFoundError: No module named 'verify.no_such_module'"})
    assert peers.names(None) == tuple(peers.PEERS) and peers.names("none") == () and peers.names("fa3,fa2,fa3") == (
        "fa3", "fa2",
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["MATH"])
@pytest.mark.parametrize("gqa", [1, 2])
def test_the_adapter_of_torch_runs_one_backend(backend, gqa):
    cell = bench.Cell(dtype="bf16", d=32, n=48, causal=True, heads=4, gqa=gqa)
    q, k, v = bench_cuda.inputs(cell, "cpu")
    call = peers._sdpa(backend)(q, k, v, True)
    assert Expected(q, k, v, causal=True, dtype="bf16").difference(call.result(call.run())) is None


# ---- Host overhead


def test_overhead_is_the_median_difference_to_the_empty_package_in_the_same_rounds(right):
    seconds = {"ours": iter([30e-6, 33e-6, 50e-6]), "empty": iter([20e-6, 22e-6, 20e-6])}
    calls = []

    def package(name):
        def attention(q, k, v):
            calls.append(name)
            return right.attention(q, k, v)

        return SimpleNamespace(attention=attention)

    def sample(call):
        call()
        return Sample(next(seconds[calls[-1]]))

    found = overhead.measure(
        {"ours": package("ours")}, package("empty"), d=32, dtype="bf16", rounds=3, device="cpu", sample=sample
    )
    assert found["ours"] == {k: pytest.approx(v) for k, v in {"call_us": 33, "empty_us": 20, "above_us": 11}.items()}
    assert len(calls) == 2 + 6  # each was called once before the rounds


def test_the_empty_package_has_the_entry_that_its_binding_calls_and_its_own_digest():
    folder = overhead.empty_package(d=32, dtype="bf16")
    binding = (folder / "csrc" / "binding_cuda.cpp").read_text()
    (entry,) = re.findall(r"^(int attention_forward_sm80\(.*\));", binding, re.MULTILINE)
    kernel = (folder / overhead.KERNEL).read_text()
    (own,) = re.findall(r'^extern "C" (int attention_forward_sm80\(.*\)) {', kernel, re.MULTILINE)

    def types(signature):
        return [" ".join(part.split()[: 2 if "const" in part else 1]) for part in signature.split("(")[1].split(",")]

    assert types(own) == types(entry)
    usual = packages.emit(d=32, sram="96KB", dtypes=("bf16",), archs=("sm80",))
    assert packages.plan(folder)["digest"] != packages.plan(usual)["digest"]
    assert (
        packages.part(packages.load(folder), "recipe").NAMESPACE
        != packages.part(packages.load(usual), "recipe").NAMESPACE
    )


# ---- Grid, table, plot


def test_the_default_grid_is_the_published_one():
    shapes = Grid().shapes(bench_grid.WIDTHS)
    assert len(shapes) == 36 and all(len(forms) == 1 for forms in shapes)
    assert {(c.batch * c.n, c.heads * c.d) for (c,) in shapes} == {(16384, 2048)}
    forms = Grid(dtypes=("bf16", "fp16"), layouts=bench_grid.LAYOUTS, groups=(1, 8)).shapes([(128, 128)])[0]
    assert str(Grid(columns=1920).shapes([(192, 128)])[0][0]) == "bf16 d=192 dv=128 N=512 full"
    assert len(forms) == 8 and str(forms[0]) == "bf16 d=128 N=512 full"
    assert str(forms[-1]) == "fp16 d=128 N=512 full bnhd gqa=8"


@pytest.fixture
def stated(right, monkeypatch):
    """The result file of two cells."""
    monkeypatch.setattr(bench_grid, "_digest", lambda attn: "0" * 64)
    monkeypatch.setattr(bench_grid.packages, "part", lambda attn, name: SimpleNamespace(NAME="attn_d32"))
    cells = [
        bench.Cell(dtype="bf16", d=32, n=n, causal=c, heads=4) for n, c in itertools.product((64, 128), (False, True))
    ]
    timings = [timing(cell=cell) for cell in cells]
    timings[0] = timing(cell=cells[0], peers={"cudnn": [3.0] * 3}, absent={"fa2": "RuntimeError: no"})
    header = {"gpu": {"model": "a card"}, "versions": {}}
    return bench_grid.figures(
        Grid(), timings, {(32, 32): {"ours": right}}, absent={"fa3": "not here"}, header=header,
        built={"ours, d=32 dv=32": 1.0},
    )  # fmt: skip


def test_the_result_names_peers_absent_ones_and_the_matrix_product(stated):
    assert stated["matmul_gflops"] == {"median": 7e5, "min": 7e5, "max": 7e5}
    assert stated["cells"][0]["percent_of_matmul"] == pytest.approx(100 * stated["cells"][0]["ours_gflops"] / 7e5)
    means = stated["summary"]["ours"]["bf16 bhnd gqa=1"]
    assert means["cudnn"] == {
        "geometric_mean": pytest.approx(1.5),
        "worst": 1.5,
        "worst_cell": "bf16 d=32 N=128 causal",
        "cells": 4,
    }
    assert means["best"]["geometric_mean"] == pytest.approx(1.5**0.25) and means["fa2"]["cells"] == 3


def test_the_table_and_the_plot_show_every_cell(stated):
    from rich.console import Console

    console = Console(width=240, record=True, file=io.StringIO())
    console.print(bench_table.table(stated))
    text = console.export_text()
    assert text.count("causal") >= 2 and "no fa3: not here" in text and "best peer" in text
    assert "cudnn 1.50±0.38" in text and "fa2 1.00±0.05" in text
    lines = bench_plot.series(stated, 32, 32, False)
    assert list(lines) == ["ours", "cudnn", "fa2"] and [n for n, _ in lines["ours"]] == [64, 128]
    assert [n for n, _ in lines["fa2"]] == [128]


def test_a_call_that_another_target_took_is_seen_in_the_table():
    row = {"package": "sm90a", "path": {"target": "sm90a"}}
    assert bench_table.served(row) == "sm90a"
    assert bench_table.served({**row, "path": {"target": "sm80"}}) == "sm90a by sm80"


def test_the_report_holds_the_same_rows_and_means(stated):
    stated["machine"] |= {"date": "2026-01-02", "command": "python -m verify bench", "load": [0.0]}
    stated["machine"]["gpu"] |= {"driver": "1", "cuda": "13.0"}
    text = report.markdown("speed cuda", [{"file": "results/speed.json", **stated}])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(stated["cells"]) and "| 1.50±0.38 |" in lines[2]
    assert "The matrix product reaches 700 TFLOP/s" in text and "/ best 1.107 (worst 1.000" in text


def test_a_missing_matplotlib_is_said(stated, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.beside(bench_plot.draw, stated, tmp_path / "speed.json").startswith("no plot: ")


def test_the_plot_is_written_beside_the_result(stated, tmp_path):
    pytest.importorskip("matplotlib")
    assert plots.beside(bench_plot.draw, stated, tmp_path / "speed.json") == f"plot: {tmp_path / 'speed.png'}"
    assert (tmp_path / "speed.png").stat().st_size > 1000
