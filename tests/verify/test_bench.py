"""Speed is measured round by round against a peer; these tests check the measuring, never a time."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner

from codegen.errors import CheckFailed
from verify import bench, bench_report, packages
from verify.__main__ import main


def test_rounds_alternate_and_each_side_is_warmed_up():
    calls = []
    ours, peers = bench.alternate(
        lambda: calls.append("ours"), {"peer": lambda: calls.append("peer")}, rounds=4, clock=fake_clock({})
    )
    assert len(ours) == 4 and len(peers["peer"]) == 4
    assert calls[:2] == ["ours", "ours"]  # warm-up, then the call that sizes a sample
    assert calls[4:] == ["ours", "peer", "peer", "ours", "ours", "peer", "peer", "ours"]


def fake_clock(seconds):
    """A clock that runs the call once and answers from a table, whatever the machine does."""

    def clock(call, repeats):
        call()
        return seconds.get(call, bench.SAMPLE_S)

    return clock


def test_a_ratio_is_the_peers_time_over_ours_per_round():
    cell = bench.Cell(dtype="float32", d=64, n=512, causal=True)
    timing = bench.Timing(cell, [1.0, 2.0, 4.0], {"torch": [2.0, 3.0, 4.0]})
    assert timing.ratio("torch") == [2.0, 1.5, 1.0]
    stated = timing.describe()
    assert stated["vs_torch"]["median"] == 1.5 and stated["vs_torch"]["min"] == 1.0
    assert cell.flops == 4 * 8 * 512 * 512 * 64 / 2
    assert bench.Cell(dtype="bf16", d=192, dv=128, n=8, causal=False, heads=2).flops == 2 * 2 * 64 * 320
    assert bench.summary([timing], "torch") == {"float32": {"geometric_mean": 1.5, "worst_cell": 1.5, "cells": 1}}


def test_means_and_spreads():
    assert bench.geometric_mean([1.0, 4.0]) == pytest.approx(2.0, rel=1e-15)
    assert math.isnan(bench.geometric_mean([]))
    assert bench.spread([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0, "min": 3.0, "max": 3.0}
    assert [str(c) for c in bench.cells(["bf16"], [64], [512])] == ["bf16 d=64 N=512 full", "bf16 d=64 N=512 causal"]


def test_the_best_tile_wins_by_geometric_mean():
    speed = {(32, 16): 1.0, (64, 32): 1.5, (96, 64): 1.2}
    wanted = bench.cells(["bf16"], [64], [512])

    def timer(attn, cell, *, rounds):
        return bench.Timing(cell, [1.0], {"torch": [attn]})

    tile, means = bench_report.best_tile(speed.__getitem__, list(speed), wanted, timer=timer)
    assert tile == (64, 32) and means == pytest.approx(speed)


def test_the_command_times_a_package_and_names_machine_and_load(small_package, tmp_path):
    file = tmp_path / "bench.json"
    words = ["bench", str(small_package), "--n", "32", "--rounds", "2", "--out", str(file), "--threads", "1"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    assert len(figures["cells"]) == 2 and figures["summary"]["torch"]["float32"]["cells"] == 2
    assert figures["machine"]["versions"]["torch"] and len(figures["machine"]["load"]) == 3 and figures["threads"] == 1
    assert "geometric mean" in done.output


@pytest.mark.parametrize(
    "words, part",
    [
        (["--n", "many"], "not a list of whole numbers"),
        (["--tiles", "32by16", "--n", "32", "--d", "32"], "not a list of BRxBC"),
        (["--tiles", "31x15", "--n", "32", "--d", "32", "--dtype", "float32"], "none of 31x15 is legal"),
        (["--n", ","], "nothing is named"),
        (["--n", "32,0"], "--n 0: there is nothing to time"),
        (["--n=-5", "--backward"], "--n -5: there is nothing to time"),
        (["--gqa", "8"], "--gqa has no effect with --device cpu"),
        (["--mask", "full"], "--mask has no effect with --device cpu"),
        (["one", "two"], "a CPU times one at a time"),
        (["--device", "cuda", "--threads", "2"], "--threads has no effect with --device cuda"),
        (["--device", "cuda", "--peers", "fa5"], "known: cudnn, fa2, efficient, flex, fa3, fa4"),
        (["--device", "cuda", "--layout", "dhnb"], "known: bhnd, bnhd"),
        (["--device", "cuda", "--dtype", "float32"], "known: bf16, fp16"),
        (["--device", "cuda", "--n", "500"], "does not divide 16384 tokens"),
        (["--device", "cuda", "--d", "256", "--gqa", "3"], "try --hidden 1536"),
        (["--device", "cuda", "--d", "192:128"], "--d 192/128"),
        (["--device", "cuda", "--tiles", "grid"], "name tiles"),
        (["--device", "cuda", "one", "--sram", "227KB"], "--sram has no effect with a named package"),
    ],
)
def test_a_list_that_cannot_be_read_exits_2(words, part):
    done = CliRunner().invoke(main, ["bench", *words])
    assert done.exit_code == 2 and part in done.output


def test_a_dtype_that_the_package_has_no_kernel_for_exits_2(small_package):
    done = CliRunner().invoke(main, ["bench", str(small_package), "--n", "32", "--dtype", "float32,fp16"])
    assert done.exit_code == 2 and "--dtype fp16" in done.output and "its dtypes: float32" in done.output


def test_every_command_has_help():
    for command in main.commands:
        done = CliRunner().invoke(main, [command, "--help"])
        assert done.exit_code == 0 and ("--json" in done.output or command == "gpu-session")  # it writes JSON files
    assert packages.cache().name == "packages"


@pytest.mark.parametrize("whose", ["ours", "torch"])
def test_a_forward_pass_that_is_wrong_is_not_timed(small_package, monkeypatch, whose):
    attn, cell = packages.load(small_package), bench.Cell(dtype="float32", d=32, n=40, causal=True)
    assert bench.time_cell(attn, cell, rounds=1).ours
    home, name = (attn, "attention") if whose == "ours" else (torch.nn.functional, "scaled_dot_product_attention")
    right = getattr(home, name)
    monkeypatch.setattr(home, name, lambda *tensors, **words: right(*tensors, **words) * 1.001)
    with pytest.raises(CheckFailed, match=f"{whose} on float32 d=32 N=40 causal: batch 0, head"):
        bench.time_cell(attn, cell, rounds=1)
