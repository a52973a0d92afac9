"""The sanitizer runs and the GPU session as far as they go without a GPU: faults apply, outputs are read right."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from codegen import lint
from codegen import package as rendered
from codegen.errors import RequestError
from verify import (
    entry_points,
    gpu_packages,
    gpu_session,
    gpu_tests,
    guarded,
    guarded_problems,
    kernel_hashes,
    packages,
    sanitize,
)
from verify.__main__ import main
from verify.cases import CAUSAL


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc (CUDA toolkit) on PATH")
def test_launchers_of_every_unit_compile_for_the_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    folder = gpu_packages.request(gpu_packages.SANITIZED_HOPPER[2])
    assert set(sanitize.launchers(folder)) == {"forward_sm80", "forward_sm90a_0"}


@pytest.mark.parametrize(
    "fault", (*sanitize.FAULTS, *sanitize.WGMMA_FAULTS), ids=lambda fault: f"{fault.arch}-{fault.mutant.name}"
)
def test_a_planted_fault_changes_the_kernel_and_only_its_text(fault):
    files = rendered.render_package(sanitize.host(fault.arch))
    changed = fault.mutant.apply(files)  # raises when nothing changes
    kernels = [path for path in files if path.endswith((".cu", ".cuh")) and changed[path] != files[path]]
    assert kernels and all(fault.arch in path for path in kernels)
    for path in kernels:  # still the text that an emulator takes: the fault is one of the kernel, not of its form
        assert not lint.violations(path, changed[path].decode())


def test_each_tool_has_a_fault():
    assert {fault.tool for fault in sanitize.FAULTS} == set(sanitize.TOOLS)
    assert len({fault.mutant.name for fault in sanitize.FAULTS}) == len(sanitize.FAULTS)


SAID = {
    "clean": ("========= COMPUTE-SANITIZER\nguarded calls: 24\n========= ERROR SUMMARY: 0 errors\n", (0, 24)),
    "one error": ("========= Invalid __global__ write\nTraceback\n========= ERROR SUMMARY: 1 error\n", (1, None)),
    "many errors": (
        "========= ERROR SUMMARY: 28 errors\n========= ERROR SUMMARY: 25 errors were not printed. Use --print-limit\n",
        (28, None),
    ),
    "hazards": (
        "guarded calls: 24\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", (3, 24),
    ),
    "a warning is a hazard": (
        "guarded calls: 24\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", (1, 24),
    ),
    "no end": ("========= COMPUTE-SANITIZER\n\nno end after 240 s", (None, None)),
    "no sanitizer": ("guarded calls: 24\n", (None, 24)),
}  # fmt: skip


@pytest.mark.parametrize("said", SAID)
def test_the_output_of_a_tool_is_read(said):
    text, want = SAID[said]
    assert sanitize.read(text) == want
    errors, calls = want
    clean = sanitize.Report("memcheck", "p", errors, calls, 1.0, "")
    planted = sanitize.Report("memcheck", "p", errors, calls, 1.0, "", fault="f")
    assert clean.holds == (said == "clean")
    assert planted.holds == (said in ("one error", "many errors", "hazards", "a warning is a hazard"))


def test_a_report_keeps_what_concerns_the_device():
    device = [f"========= Invalid __global__ write of size {i} bytes" for i in range(40)]
    host = ["=========     Saved host backtrace up to", "=========         Host Frame: main", "frame #3: run + 0x1"]
    text = sanitize.shortened("\n".join([*device[:20], *host, *device[20:], "========= ERROR SUMMARY: 40 errors"]))
    assert "size 0 bytes" in text and "ERROR SUMMARY: 40" in text and "\n...\n" in text
    assert "Host" not in text and "frame" not in text and len(text.splitlines()) < 20


def test_the_arguments_have_the_layout_of_the_emitted_headers(tmp_path):
    """Offsets as the C++ compiler has them, for both forms."""
    forward = [name for name, *_ in entry_points.ForwardArgs._fields_]
    backward = [name for name, *_ in entry_points.BackwardArgs._fields_]
    for debug in (False, True):
        asked = packages.request(sram="163KB", d=64, archs=("sm80",), br=64, bc=32, debug=debug)
        files = rendered.render_package(asked)
        for header in ("forward.h", "backward.h"):
            (tmp_path / header).write_bytes(files[f"csrc/{header}"])
        fields = [("ForwardArgs", name) for name in forward if debug or not name.startswith("trace")]
        fields += [("BackwardArgs", name) for name in backward]
        lines = "".join(f'  std::printf("%zu\\n", offsetof({args}, {name}));\n' for args, name in fields)
        head = '#include <cstddef>\n#include <cstdio>\n#include "backward.h"\n#include "forward.h"\n'
        source = tmp_path / "offsets.cpp"
        source.write_text(f"{head}int main() {{\n{lines}}}\n")
        subprocess.run(["c++", "-std=c++17", str(source), "-o", str(tmp_path / "offsets")], check=True)
        said = subprocess.run([str(tmp_path / "offsets")], check=True, capture_output=True, text=True).stdout.split()
        assert [int(x) for x in said] == [getattr(getattr(entry_points, args), name).offset for args, name in fields]


def test_the_guarded_problems_have_an_edge_in_every_loop():
    for br, bc in ((16, 16), (32, 128), (128, 64), (16, 304)):
        made = guarded_problems.problems(br, bc)
        assert len({p.name for p in made}) == len(made)
        assert {p.layout for p in made} == {"contiguous", "bnhd", "padded"}
        assert {p.causal for p in made} == set(CAUSAL)
        assert any(p.nq % br and p.nk % bc for p in made) and any(p.nq % br == 0 and p.nk % bc == 0 for p in made)
        assert any(p.hq > p.hkv for p in made) and any(p.nk == 0 for p in made) and any(p.nq > 2 * br for p in made)
        assert any(p.nq > p.nk > 0 and p.causal == "bottom_right" for p in made)
        for p in made:
            assert p.lengths is None or (len(p.lengths) == p.b and all(0 <= n <= p.nk for n in p.lengths))


def test_the_covering_problems_have_every_branch():
    for br, bc in ((16, 16), (32, 128), (128, 64), (16, 304)):
        made = guarded_problems.covering(br, bc)
        assert len(made) == len(guarded_problems.COVERING) < len(guarded_problems.problems(br, bc))
        for causal in (False, True):
            some = [p for p in made if (p.causal != "none") == causal]
            assert any(p.nq % br and p.nk % bc for p in some) and any(p.lengths for p in some)
        assert any(p.hq > p.hkv for p in made) and any(p.nk == 0 for p in made)
        assert any(p.nq > br and p.nk >= 2 * bc for p in made)  # whole tiles beside the cut ones
        assert any(p.lengths and 0 in p.lengths for p in made)
        assert any(p.nq > p.nk > 0 and p.causal == "bottom_right" for p in made)


def watched(tool):
    """(package, unit, dtype, pass) -> the steps that `tool` watches, in all packages of a session."""
    found = {}
    for folder in gpu_packages.sanitized():
        plan = packages.plan(folder)
        for step in guarded.steps(plan, "sm80", ["forward_sm80", "backward_sm80"], guarded.EXTENTS[tool]):
            found.setdefault((folder, step.unit, step.dtype, step.variant is None), []).append(step)
    return found


def test_every_kernel_and_branch_runs_under_every_tool():
    assert set(guarded.EXTENTS) == {"", *sanitize.TOOLS}
    whole, calls = watched(""), {}
    assert len(whole) == 8 * 2 * 2
    for tool in guarded.EXTENTS:
        made = watched(tool)
        assert set(made) == set(whole)
        for steps in made.values():
            names = {step.problem.name for step in steps}
            assert names >= set(guarded_problems.COVERING) and len(names) == len(steps)
        for folder in gpu_packages.sanitized():
            for backward in (False, True):  # in one of the dtypes: all of them
                of_all = [{s.problem.name for s in made[key]} for key in made if (key[0], key[3]) == (folder, backward)]
                assert max(map(len, of_all)) == len(guarded_problems.problems(16, 16))
        calls[tool] = sum(step.calls for steps in made.values() for step in steps)
    one, whole_grid, sparing = 1 + 2, 8 * 2 * 12, 8 * (12 + 5)  # forward, and backward in both forms
    assert calls == {
        "": 2 * one * whole_grid, "memcheck": 2 * one * whole_grid, "initcheck": 2 * one * sparing,
        "racecheck": one * sparing, "synccheck": one * sparing,
    }  # fmt: skip


def test_a_kernel_that_the_op_does_not_take_here_runs_through_its_entry_point():
    plan = packages.plan(packages.emit(sanitize.host()))
    steps = list(guarded.steps(plan, "sm90a", ["forward_sm80", "backward_sm80"], guarded.EXTENTS["memcheck"]))
    assert {step.entry: step.calls for step in steps} == {"forward_sm80": 1, "backward_sm80": 2}
    assert not any(step.op_too for step in steps)
    steps = list(guarded.steps(plan, "sm80", ["backward_sm80"], guarded.EXTENTS["memcheck"]))
    assert {step.entry: step.calls for step in steps} == {"backward_sm80": 4}


@pytest.mark.parametrize("words", [gpu_packages.DEBUG, *gpu_packages.SANITIZED_HOPPER], ids=lambda words: words["d"])
@pytest.mark.parametrize("tool", guarded.EXTENTS)
def test_every_unit_that_gets_a_launcher_is_called(words, tool):
    folder = gpu_packages.request(words)
    units = {file.stem for file in (folder / "csrc").glob("*ward_*.cu")}
    steps = guarded.steps(packages.plan(folder), "sm80", units, guarded.EXTENTS[tool])
    assert units and {step.entry for step in steps} == units


def test_a_launcher_of_another_name_is_refused():
    """Else no call is made, and no tool finds anything."""
    plan = packages.plan(gpu_packages.request(gpu_packages.DEBUG))
    with pytest.raises(RequestError, match="has no such unit"):
        list(guarded.steps(plan, "sm80", ["forward_sm80", "sm80"], guarded.EXTENTS[""]))
    assert not sanitize.Report("memcheck", "attn", errors=0, calls=0, seconds=1.0, text="").holds


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Fakes what needs a GPU: `fake.said` is what a tool says of (tool, fault), `fake.seen` what was run, in order."""
    made = SimpleNamespace(said={}, seen=[], folders=[])
    for name, d in (("narrow", 64), ("wide", 256)):
        folder = tmp_path / name
        folder.mkdir()
        made.folders.append(folder)
        (folder / "plan.json").write_text(json.dumps({"request": {"d": d, "dv": d}}))
    monkeypatch.setattr(sanitize.packages, "plan", lambda folder: json.loads((folder / "plan.json").read_text()))
    monkeypatch.setattr(sanitize.Fault, "package", lambda fault: made.folders[0])
    monkeypatch.setattr(sanitize, "sanitizer", lambda folder: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "build", lambda folder: {})
    monkeypatch.setattr(sanitize.machine, "describe", lambda device: {"gpu": {"model": "none"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def examine(folder, tool, *, fault, timeout_s):
        made.seen.append((tool, folder.name, fault, timeout_s))
        errors = made.said.get((tool, fault), 1 if fault else 0)
        return sanitize.Report(tool, folder.name, errors, 24, 1.0, "", fault)

    monkeypatch.setattr(sanitize, "examine", examine)
    return made


def test_the_slowest_tool_starts_first_and_every_report_is_kept(fake):
    kept = []
    figures = sanitize.run(fake.folders, plant=True, jobs=1, timeout_s=50.0, keep=kept.append)
    assert [tool for tool, _, fault, _ in fake.seen if not fault][::2] == list(sanitize.SLOWEST_FIRST)
    assert [name for _, name, fault, _ in fake.seen if not fault] == ["wide", "narrow"] * 4
    assert [bool(fault) for _, _, fault, _ in fake.seen] == [False] * 8 + [True] * 7
    assert {limit for *_, limit in fake.seen} == {50.0}
    assert figures["holds"] and not figures["missing"] and sanitize.did_as_asked(figures, sanitize.TOOLS)
    assert [len(one["clean"]) + len(one["planted"]) for one in kept] == list(range(1, 16))
    assert [len(one["missing"]) for one in kept] == list(range(14, -1, -1))
    assert [one["holds"] for one in kept] == [False] * 14 + [True]
    assert [row["tool"] for row in figures["clean"]][::2] == list(sanitize.TOOLS)
    assert sanitize.table(kept[3]).row_count == sanitize.table(figures).row_count == 15


@pytest.mark.parametrize("bad", [("racecheck", None), ("synccheck", "divergent_barrier")])
@pytest.mark.parametrize("errors", ["wrong", None])
def test_one_report_that_does_not_hold_is_enough(fake, bad, errors):
    fake.said[bad] = errors if errors is None else int(bad[1] is None)
    figures = sanitize.run(fake.folders, plant=True, jobs=2)
    assert not figures["holds"] and not figures["missing"]
    assert not sanitize.did_as_asked(figures, sanitize.TOOLS)
    assert sanitize.did_as_asked(figures, [tool for tool in sanitize.TOOLS if tool != bad[0]])


def test_what_was_left_out_does_not_hold(fake):
    some = sanitize.run(fake.folders, tools=("memcheck",), jobs=2)
    assert not some["holds"] and sanitize.did_as_asked(some, ("memcheck",)) and len(some["missing"]) == 6
    late = sanitize.run(fake.folders, plant=True, jobs=2, seconds=1.0)
    assert not late["holds"] and not late["clean"] and len(late["missing"]) == 15
    assert not sanitize.did_as_asked(late, sanitize.TOOLS) and not sanitize.did_as_asked(late, ("memcheck",))
    fake.seen.clear()
    sanitize.run(fake.folders, jobs=2, seconds=30.0)
    assert all(0 < limit <= 30.0 for *_, limit in fake.seen)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_no_tool_is_started(fake, monkeypatch, error):
    at_once = sanitize.examine

    def examine(*job, **words):
        time.sleep(0.2)
        return at_once(*job, **words)

    def keep(figures):
        raise error

    monkeypatch.setattr(sanitize, "examine", examine)
    with pytest.raises(error):
        sanitize.run(fake.folders, jobs=1, keep=keep)
    assert len(fake.seen) < 8  # but for one that ran meanwhile


def test_a_tool_that_does_not_end_is_stopped_and_does_not_hold(monkeypatch, tmp_path):
    """With all that it started: the calls under a tool are a process of their own, and hold its pipe."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{guarded.DONE} 24'\nsleep 300 &\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "sanitizer", lambda folder: str(tool))
    monkeypatch.setattr(sanitize, "build", lambda folder: {"forward_sm80": tmp_path / "library.so"})
    report = sanitize.examine(tmp_path, "racecheck", timeout_s=1.0)
    assert not report.holds and report.errors is None and "no end after 1 s" in report.text


def test_every_package_of_the_session_is_legal_and_its_tile_is_what_was_asked():
    tables = [*gpu_packages.PACKAGES.values(), gpu_packages.DEBUG]
    tables += [gpu_packages.tile_request(d, t) for d, tiles in gpu_packages.SPEED_TILES.items() for t in tiles]
    widths = set()
    for words in tables:
        plans = rendered.decide(packages.request(**words))
        for variant in (v for d in plans.decisions for v in d.variants if v.target == "sm80"):
            assert words.get("br", variant.plan.br) == variant.plan.br
            assert variant.plan.fast_memory_bytes <= 163 * 1024
            widths.add((words["d"], words.get("dv", words["d"])))
    assert len(widths) >= 9 and any(d != dv for d, dv in widths)
    assert set(gpu_packages.SANITIZED) <= set(gpu_packages.PACKAGES)


def test_a_kernel_is_known_by_its_code():
    text = 'int x;  // one\n/* two\n three */ asm("mov // no comment;");\n'
    assert kernel_hashes.code_hash(text) == kernel_hashes.code_hash('int x;\n\n  asm("mov // no comment;"); // four')
    assert kernel_hashes.code_hash(text) != kernel_hashes.code_hash(text.replace("no comment", "another"))
    assert kernel_hashes.code_hash(text) != kernel_hashes.code_hash(text.replace("x", "y"))


def test_of_a_header_only_what_the_kernels_call_counts():
    one = "__device__ __forceinline__ int one(int x) { return x; }\n"
    two = "template <int N>\n__device__ __forceinline__ int two() {\n  if (N) { return one(N); }\n  return 0;\n}\n"
    three = "__device__ __forceinline__ void three(int (&x)[4]) { x[0] = one(3); }\n"
    constant = "constexpr int kTwo = 2;\n"
    header = one + two + constant + three
    for callers, wanted in (("two<4>();", one + two + constant), ("three(x);", one + constant + three), ("", constant)):
        assert kernel_hashes.called(header, callers).split() == wanted.split()


def test_a_junit_file_is_read(tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="t1" time="0.5"><properties><property name="x" value="1"/>'
        '</properties></testcase><testcase classname="a" name="t2"><failure message="m">no</failure></testcase>'
        '<testcase classname="a" name="t3"><skipped/></testcase></testsuite></testsuites>'
    )
    rows = gpu_tests.junit(file)
    assert [r["state"] for r in rows] == ["passed", "failed", "skipped"]
    assert rows[0] == {"test": "a::t1", "state": "passed", "seconds": 0.5, "x": "1"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("words", [["sanitize", "{package}"], ["gpu-session", "--out", "{out}"]])
def test_without_a_gpu_the_commands_say_so(words, small_package, tmp_path):
    filled = [word.format(package=small_package, out=tmp_path) for word in words]
    done = CliRunner().invoke(main, filled)
    assert done.exit_code == 2 and "torch sees no CUDA device" in done.output


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, ["gpu-session", "--part", "first_call", "--out", str(tmp_path / "file")])
    assert done.exit_code == 2 and "no folder can be made there" in done.output


def test_unknown_names_are_refused(small_package, tmp_path):
    done = CliRunner().invoke(main, ["sanitize", str(small_package), "--tool", "leakcheck"])
    assert done.exit_code == 2 and "known: memcheck, racecheck, initcheck, synccheck" in done.output
    done = CliRunner().invoke(main, ["gpu-session", "--out", str(tmp_path), "--part", "all"])
    assert done.exit_code == 2 and f"known: {', '.join(gpu_session.PARTS)}" in " ".join(done.output.split())
