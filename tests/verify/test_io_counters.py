"""Hardware counters beside the formula, as far as they go without a GPU: what ncu prints, and what it refuses."""

from __future__ import annotations

import json
import stat
import sys

import pytest

from codegen.errors import ToolError
from verify import io, io_calls, io_driver, io_ncu, packages
from verify.guarded_problems import Problem

METRIC_NAMES = [metric for metric, _ in io_ncu.METRICS.values()]
KERNEL_NAME = "void attention_forward_d64_dv64_32x32<BFloat16>(Params)"


def page(launches):
    """What `ncu --csv --page raw` prints: the program's own lines, names, units, launches."""
    head = ["ID", "Process ID", "Kernel Name", *METRIC_NAMES]
    units = ["", "", "", "sector", "sector", "byte", "byte", "byte"]
    rows = [[str(i), "7", KERNEL_NAME, *values] for i, values in enumerate(launches)]
    lines = [",".join(f'"{value}"' for value in row) for row in (head, units, *rows)]
    return "\n".join(["==PROF== Connected to process 7", "launched 2", *lines, ""])


@pytest.fixture(scope="module")
def kernel():
    return io.kernel_of(packages.emit(sram="163KB", d=64, br=32, bc=32, dtypes=("bf16",), archs=("sm80",)))


def test_launches_are_read_in_bytes():
    first, second = io_ncu.read(page([["4", "2", "1,024", "2,048", "0"], ["10", "n/a", "3", "4", "5"]]))
    assert first.kernel == KERNEL_NAME
    assert first.counted == {
        "l2_read": 128, "l2_written": 64, "l2_all": 1024, "dram_read": 2048, "dram_written": 0,
    }  # fmt: skip
    assert second.counted == {"l2_read": 320, "l2_all": 3, "dram_read": 4, "dram_written": 5}


@pytest.mark.parametrize("said", ["", "==ERROR== something\n", "launched 2\n"])
def test_a_page_without_launches_is_none(said):
    assert io_ncu.read(said) == []


def test_a_launch_stands_beside_the_formula_and_compulsory_traffic(kernel):
    problem = Problem("full", 64, 96, hq=4, hkv=2)
    (launch,) = io_ncu.read(page([["1000", "10", "1", "2", "3"]]))
    row = io_ncu.describe(kernel, problem, launch)
    assert row["formula_read"] == 2 * 4 * (64 * 64 + 2 * 96 * 128)  # 2 row tiles pass over K and V, per query head
    assert row["compulsory_read"] == 2 * (4 * 64 * 64 + 2 * 96 * 128)
    assert row["formula_written"] == 4 * 64 * (2 * 64 + 4)
    assert row["l2_read"] == 32000
    assert io_ncu.ratios(row)[0] == f"{32000 / row['formula_read']:.3f}"
    assert io_ncu.ratios({**row, "formula_read": 0, "dram_written": None})[0] == "-"


def fake_ncu(tmp_path, monkeypatch, said, code=0, launches=None):
    """An ncu on PATH that prints `said`; or a page with as many launches as the calls, and `launches` more."""
    tool = tmp_path / "ncu"
    body = f"print({said!r})" if launches is None else (
        f"import json\nn = len(json.load(open(sys.argv[-1]))) + {launches}\n"
        f"head, units, row = {page([['4', '2', '3', '4', '5']]).splitlines()[2:5]!r}\n"
        "print('\\n'.join([head, units] + n * [row]))"
    )  # fmt: skip
    tool.write_text(f"#!{sys.executable}\nimport sys\n{body}\nsys.exit({code})\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(io_ncu.packages, "part", lambda *args: _Built())


class _Built:
    def library(self, kind):
        assert kind == "cuda"


def test_every_call_is_matched_to_its_launch(kernel, tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, "", launches=0)
    found = io_ncu.counters([kernel])
    assert found["available"] and len(found["rows"]) == len(io_ncu.shapes(kernel)) > 19
    assert all(row["l2_read"] == 128 for row in found["rows"])
    assert "--kernel-name regex:attention_forward" in found["command"] and str(tmp_path) not in found["command"]
    (table,) = io_ncu.tables(found)
    assert table.row_count == len(found["rows"])


def test_a_launch_too_many_is_an_error(kernel, tmp_path, monkeypatch):
    fake_ncu(tmp_path, monkeypatch, "", launches=1)
    with pytest.raises(ToolError, match="profiled"):
        io_ncu.counters([kernel])


@pytest.mark.parametrize(
    "said, why",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "does not let us read the GPU's counters"),
        ("==ERROR== Failed to find metric regex:x", "profiled nothing: ==ERROR== Failed to find metric"),
    ],
)
def test_a_machine_that_refuses_counters_says_why(kernel, tmp_path, monkeypatch, said, why):
    fake_ncu(tmp_path, monkeypatch, said, code=1)
    found = io_ncu.counters([kernel])
    assert not found["available"] and why in found["why"] and found["rows"] == []
    assert why in io_ncu.tables(found)[0]


def test_without_ncu_it_says_so(kernel, monkeypatch):
    monkeypatch.setattr(io_ncu.shutil, "which", lambda *args, **more: None)
    assert "ncu is not on PATH" in io_ncu.counters([kernel])["why"]


def test_the_driver_gets_back_the_shape_that_was_described(kernel):
    for problem in io_ncu.shapes(kernel):
        assert io_driver.problem_of(json.loads(json.dumps(io_calls.describe(problem)))) == problem
