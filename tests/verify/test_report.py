"""README figures come from result files, and a README that differs from them is noticed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from codegen.errors import CheckFailed
from verify import __main__ as cli
from verify import bench, gpu_commands, gpu_packages, gpu_run, kernel_hashes, machine, report
from verify.commands import report as command


@pytest.fixture
def results(tmp_path):
    cell = bench.Cell(dtype="bf16", d=64, n=512, causal=False)
    timing = bench.Timing(cell, [1e-3, 1e-3], {"torch": [2e-3, 2e-3]})
    figures = {
        "kind": "bench",
        "device": "cpu",
        "machine": machine.describe(),
        "threads": 2,
        "package": "--sram 192KB per d and dtype, cpu",
        "tiles": {"bf16 d=64": {"tile": [128, 64], "tried": {"128x64": 2.0, "96x64": 1.5}}},
        "cells": [timing.describe()],
        "summary": {"torch": bench.summary([timing], "torch")},
    }
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "bench_cpu.json").write_text(json.dumps(figures))
    return folder


README = "before\n<!-- figures: bench cpu -->\nold\n<!-- end of figures -->\nafter\n"


def test_a_block_is_filled_and_the_rest_is_left_alone(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    assert report.refresh(readme, results, write=False, generated=tmp_path) and readme.read_text() == README
    assert report.refresh(readme, results, write=True, generated=tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n<!-- figures: bench cpu -->\n") and text.endswith(
        "<!-- end of figures -->\nafter\n"
    )
    assert "| dtype | d | 512 full |" in text and "| bf16 | 64 | 2.00 |" in text and "old" not in text
    assert "geometric mean 2.00" in text and "bf16 d=64: 128x64 (tried: 128x64 2.00, 96x64 1.50)" in text
    assert "bench_cpu.json" in text and "load" in text
    assert not report.refresh(readme, results, write=True, generated=tmp_path)


def test_a_block_without_a_result_file_is_an_error(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README.replace("bench cpu", "bench cuda"))
    with pytest.raises(CheckFailed, match="no result file for the block 'bench cuda'"):
        report.refresh(readme, results, write=True, generated=tmp_path)


def test_a_readme_that_is_not_there_passes_no_check(tmp_path):
    done = CliRunner().invoke(cli.main, ["report", "--check", "--readme", str(tmp_path / "README.md")])
    assert done.exit_code == 2 and "does not exist" in done.output
    assert all(readme.is_file() for readme in command.READMES)  # the default, from wherever it is called


def test_the_command_notices_a_readme_that_is_stale(results, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    monkeypatch.setattr(command, "RESULTS", results)
    run = CliRunner().invoke
    assert run(cli.main, ["report", "--check", "--readme", str(readme)]).exit_code == 1
    done = run(cli.main, ["report", "--readme", str(readme)])
    assert done.exit_code == 0 and "geometric mean 2.00" in done.output
    assert run(cli.main, ["report", "--check", "--readme", str(readme)]).exit_code == 0


@pytest.mark.parametrize("block", ["certificate", "bench cpu"])
def test_a_readme_that_is_stale_by_a_certificate_says_how_to_have_the_old_one_back(
    results, tmp_path, monkeypatch, block
):
    readme = tmp_path / "README.md"
    readme.write_text(README.replace("bench cpu", block))
    stated = {"format": "tileproof certificate 1", "name": "attn", "digest": "0", "devices": {}}
    (tmp_path / "generated" / "attn").mkdir(parents=True)
    (tmp_path / "generated" / "attn" / "certificate.json").write_text(json.dumps(stated))
    monkeypatch.setattr(command, "RESULTS", results)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.main, ["report", "--check", "--readme", str(readme)])
    assert done.exit_code == 1 and "try python -m verify report" in done.stderr
    assert ("git checkout generated brings the checked-in certificate back" in done.stderr) is (block == "certificate")


def test_a_header_names_machine_versions_command_and_load(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a/verify/__main__.py", "bench", "/b/attn_d64", "--n", "512"])
    found = machine.describe()
    assert found["cpu"]["cores"] >= 1 and found["versions"]["python"] and len(found["load"]) == 3
    assert found["command"] == "python -m verify bench attn_d64 --n 512"


@pytest.mark.parametrize(
    ("file", "table"),
    [("cuda", gpu_packages.PACKAGES), ("sm90a", gpu_packages.HOPPER), ("backward", gpu_packages.BACKWARD)],
)
def test_the_figures_of_a_gpu_are_for_the_kernels_as_they_are_emitted_today(file, table):
    """A certificate made on a GPU stays true as long as the kernels' code does: hashes without comments."""
    stated = json.loads((gpu_run.ROOT / f"verify/results/certificates_{file}_h200.json").read_text())["packages"]
    assert set(stated) == set(table)
    for name, words in table.items():
        kernels = stated[name]["kernels"]
        assert kernels and kernel_hashes.of(gpu_packages.request(words), among=kernels) == kernels, name


def test_what_no_sanitizer_came_to_the_end_of_is_named():
    def row(package, **more):
        return {"tool": "memcheck", "package": package, "fault": None, "errors": 0, "calls": 12, "holds": True, **more}

    figures = {
        "file": "f.json",
        "machine": machine.describe(),
        "environment": "guarded",
        "clean": [row("one"), row("two", calls=None, holds=False)],
        "planted": [],
        "missing": [row("three"), row("host", fault="no_barrier")],
    }
    said = report.markdown("sanitize cuda", [{**figures, "kind": "sanitize"}])
    assert "| memcheck | 1 | 12 | 0 |" in said
    assert "Errors, or no end: memcheck on `two`, memcheck on `three`, memcheck on `no_barrier`." in said


def test_failed_tests_and_files_that_never_ended_are_named():
    def said(failed, **more):
        rows = [{"test": "a::good", "state": "passed"}, *({"test": f"a::{n}", "state": "failed"} for n in failed)]
        figures = {"kind": "tests", "file": "f.json", "machine": machine.describe(), "tests": rows}
        counts = {"passed": 1, "failed": len(failed), "skipped": 0}
        return report.markdown("tests cuda", [{**figures, **counts, **more}])

    assert "1 passed, 0 failed, 0 skipped. " in said([]) and "Failed" not in said([])
    assert "2 failed, 0 skipped. Failed: `a::one[x]`, `a::two`. " in said(["one[x]", "two"])
    assert "0 skipped. Never came to an end: `tests/gpu/test_x.py`. " in said([], missing=["tests/gpu/test_x.py"])
    most = said([f"n{i}" for i in range(report.MOST_NAMED + 3)])
    assert f"`a::n{report.MOST_NAMED - 1}` and 3 more. " in most and f"`a::n{report.MOST_NAMED}`" not in most


def test_what_a_benchmark_lacks_stands_under_its_table():
    figures = {
        "kind": "speed", "file": "f.json", "machine": machine.describe(), "cells": [], "peers": {}, "rounds": 7,
        "shapes": "16384 tokens", "matmul_gflops": None, "summary": {"sm90a": {"bf16 bhnd gqa=1": {}}},
        "absent": {}, "failures": [], "left_out": [], "bars": [gpu_commands.bar("cells", 36, least=36)],
    }  # fmt: skip
    assert "16384 tokens, median of 7 rounds. " in report.markdown("speed cuda", [figures])
    short = {
        **figures, "absent": {"fa3": "not installed"}, "left_out": ["d=64 N=512"],
        "bars": [gpu_commands.bar("tensor use", 0.8588, least=0.86), gpu_commands.bar("host us", None, most=12.0)],
    }  # fmt: skip
    assert (
        "7 rounds. No fa3: not installed. Out of time: d=64 N=512. "
        "DOES NOT HOLD: tensor use: 0.8588, wanted at least 0.86. "
        "DOES NOT HOLD: host us: no figure, wanted at most 12. "
    ) in report.markdown("speed cuda", [short])
