"""The speed figures: a row per launch, bars beside what was measured, and the table that a README gets."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from verify import report
from verify.emulator import speed


def test_a_measurement_counts_what_the_kernel_does():
    n, br, d = 80, 64, 64
    row = speed.measure(d, check=True, n=n, runs=2)
    query_tiles = -(-n // br)
    assert row["tile"][0] == br and len(row["seconds"]) == 2 and row["best_s"] == min(row["seconds"])
    assert row["bytes"]["q"] == (2 * n * d, 0) and row["bytes"]["o"] == (0, 2 * n * d)
    assert row["bytes"]["k"] == row["bytes"]["v"] == (2 * n * d * query_tiles, 0) and row["bytes"]["lse"] == (0, 4 * n)


def test_the_table_shows_each_bar_and_a_missed_one_is_not_hidden(monkeypatch):
    rows = {True: 0.3, False: 0.1}
    monkeypatch.setattr(speed, "BARS", {64: 0.2})
    monkeypatch.setattr(
        speed,
        "measure",
        lambda d, check: {
            "package": "attn_d64", "dtype": "bf16", "tile": [64, 256], "n": 512, "checker": check,
            "seconds": [rows[check]], "best_s": rows[check], "gflops": 1.0, "switches": 1000, "mma": 1, "bytes": {},
        },
    )  # fmt: skip
    figures = speed.run()
    assert not figures["holds"]
    text = report.markdown("emulator cpu", [{"file": "emulator_cpu.json", **figures}])
    assert "| `attn_d64` | bf16 | 64 x 256 | 512 | on | 0.300 | 0.2 | 1.00 | 1,000 |" in text
    assert "| off | 0.100 | - |" in text and "best of 1" in text and "emulator_cpu.json" in text


def test_an_out_that_is_a_folder_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "run", lambda: pytest.fail("measured"))
    done = CliRunner().invoke(speed.main, ["--out", str(tmp_path)])
    assert done.exit_code == 2 and "is a folder" in done.output
