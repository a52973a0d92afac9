"""The command line: what it refuses, with which message and exit code, and that a refusal writes nothing."""

from __future__ import annotations

import json
import re

import pytest

from codegen import cli, emit
from codegen.package import PLAN_FILE


@pytest.fixture
def codegen(tmp_path, capsys, monkeypatch):
    """Run the command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(line: str):
        with pytest.raises(SystemExit) as e:
            cli.main(line.split())
        out, err = capsys.readouterr()
        return e.value.code or 0, out, err

    return run


def listing(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


REFUSED = [
    ("--sram abc --d 128", "--sram abc: not a size", "192KB = 192KiB = 196608 bytes"),
    ("--sram 0 --d 128", "--sram 0: the fast memory must hold something", "192KB"),
    ("--sram -1KB --d 128", "--sram -1KB: not a size", "192KB"),
    ("--sram 1.5 --d 128", "--sram 1.5: not a size", "whole number"),
    ("--sram 1.5KB --d 128", "--sram 1.5KB: not a size", "whole number"),
    ("--sram 1025MB --d 128", "no fast memory is that large", "at most 1048576KB"),
    ("--sram 99999999999999999999KB --d 128", "no fast memory is that large", ""),
    (f"--sram {'9' * 5000} --d 128", "a number of 5000 characters is too large", ""),
    (f"--sram 192KB --d {'9' * 5000}", "a number of 5000 characters is too large", ""),
    ("--sram 192KB --d 12", "--d 12: no kernel for this head size", "every multiple of 8 from 8 to 256"),
    ("--sram 192KB --d 16384", "--d 16384: no kernel for this head size", "every multiple of 8 from 8 to 256"),
    ("--sram 192KB --d 0", "--d 0: no kernel for this head size", "try --d 8"),
    ("--sram 192KB --d x", "--d x: not a whole number", ""),
    ("--sram 192KB --d 128.0", "--d 128.0: not a whole number", ""),
    ("--sram 192KB --d 128 --dv 12", "--dv 12: no kernel for this head size", "try --dv 16"),
    ("--sram 192KB --d 128 --br 0", "--br 0: must be at least 1", ""),
    ("--sram 192KB --d 128 --bc -4", "--bc -4: must be at least 1", ""),
    ("--sram 192KB --d 128 --dtype int8", "--dtype int8: unknown", "float32, float64, bf16, fp16"),
    ("--sram 192KB --d 128 --dtype bf16,,fp16", "an empty name", ""),
    ("--sram 192KB --d 128 --arch sm100a", "--arch sm100a: known", "its kernels come later"),
    ("--sram 192KB --d 128 --arch sm75", "--arch sm75: known", "today: cpu, sm80"),
    ("--sram 192KB --d 128 --arch riscv", "--arch riscv: no such target", "today: cpu, sm80"),
    ("--sram 192KB --d 128 --arch sm_80", "--arch sm_80: no such target", "did you mean sm80?"),
    ("--sram 192KB --d 128 --arch sm80 --dtype float32", "--arch sm80 has no kernel for float32", "bf16, fp16"),
    ("--sram 192KB --d 128 --algorithm fa1", "--algorithm fa1: comes later", "today: fa2"),
    ("--sram 192KB --d 128 --algorithm x", "--algorithm x: unknown", "today: fa2"),
    ("--sram 192KB --d 128 --tiling tuned", "--tiling tuned has no effect on cpu, sm80", "sm90a has measured plans"),
    ("--sram 192KB --d 128 --tiling best", "--tiling best: unknown", "known: paper, tuned"),
    ("--sram 192KB --d 128 --mask window(5)", "--mask: not available yet", ""),
    ("--sram 192KB --d 128 --score tanh", "--score: not available yet", ""),
    ("--sram 192KB --d 128 --bias 1,H,N,N", "--bias: not available yet", ""),
    ("--sram 192KB --d 128 --dropout", "--dropout: not available yet", ""),
    ("--sram 192KB --d 128 --varlen", "--varlen: not available yet", ""),
    ("--sram 192KB --d 128 --name Bad-Name", "--name Bad-Name: not a package name", ""),
    ("--sram 192KB --d 128 --name torch", "--name torch: would hide the module torch", ""),
    ("--sram 192KB --d 128 --name json", "--name json: would hide the module json", ""),
    ("--sram 192KB --d 128 --explain --build", "--explain and --build do not go together", ""),
    ("--sram 192KB --d 128 --at-n 512", "--at-n has no effect without --explain", ""),
    ("--sram 192KB --d 128 --explain --at-n 0", "--at-n 0: must be at least 1", ""),
    ("--sram 192KB", "--d is missing", "codegen --sram 192KB --d 128"),
    ("", "--sram is missing", "codegen --sram 192KB --d 128"),
    ("--sram 192KB --d 128 --frobnicate", "No such option", ""),
    ("--sram 192KB --d 128 extra", "unexpected extra argument", ""),
]


@pytest.mark.field("R098", "R123")
@pytest.mark.parametrize("line, message, hint", REFUSED, ids=[line[:60] or "nothing" for line, _, _ in REFUSED])
def test_a_request_that_cannot_be_met_is_one_message_and_exit_2(codegen, tmp_path, line, message, hint):
    code, out, err = codegen(line)
    assert code == 2 and out == ""
    assert err.startswith("codegen: error: ") and message in err and hint in err
    assert all(rest.startswith("  ") for rest in err.splitlines()[1:])
    assert "Traceback" not in err and listing(tmp_path) == []


@pytest.mark.field("R096")
@pytest.mark.parametrize(
    "line", ["--sram 1KB --d 256", "--sram 1KB --d 256 --arch sm80", "--sram 1KB --d 256 --arch cpu"]
)
def test_no_tiling_fits_says_what_would(codegen, tmp_path, line):
    code, _, err = codegen(line)
    assert code == 2 and listing(tmp_path) == []
    assert err.startswith("codegen: error: no tile fits 1,024 bytes") and err.count("fits 1,024") == 1
    assert "d=256" in err and "smallest" in err and err.count("try --sram") == 1
    enough = int(err.split("try --sram ")[1].split("KB")[0])
    assert codegen(line.replace("1KB", f"{enough}KB") + " --explain")[0] == 0
    assert codegen(line.replace("1KB", f"{enough - 1}KB") + " --explain")[0] == 2


NEIGHBOURS = {
    "--d 128 --bc 60 --arch sm80": "try --bc 48 or 64",
    "--d 128 --br 60 --arch sm80": "try --br 48 or 64",
    "--d 128 --br 144 --arch sm80": "try --br 128 or 160",
    "--d 128 --br 60 --bc 60 --arch sm80": "try --br 48 --bc 48 or 64",
    "--d 128 --bc 60 --arch sm90a": "try --bc 48 or 64",
    "--d 128 --br 60 --arch sm90a": "try --br 64",
    "--d 128 --br 320 --arch sm90a": "try --br 192",  # 256 rows spill at every length
    "--d 128 --br 192 --bc 160 --arch sm90a": "try --br 128, or --bc 128",
    "--d 64 --br 60 --arch cpu --dtype bf16": "try --br 32 or 64",
    "--d 64 --bc 100 --arch cpu,sm80": "try --bc 96 or 112",  # 104 is whole for cpu alone
    "--d 64 --br 100000": "try --br 160",
}


@pytest.mark.field("R098")
@pytest.mark.parametrize("line", NEIGHBOURS)
def test_a_refused_tile_names_its_neighbours_that_every_target_takes(codegen, line):
    code, _, err = codegen(f"--sram 192KB {line}")
    assert code == 2 and err.splitlines()[-1] == f"  {NEIGHBOURS[line]}" and err.count("try --") == 1
    words = line.split()
    for part in NEIGHBOURS[line].removeprefix("try ").split(", or "):
        fixed, _, last = part.partition(" or ")
        tiles = [fixed, *([" ".join([*fixed.split()[:-1], last])] if last else [])]
        for tile in tiles:
            given = dict(zip(words[::2], words[1::2], strict=True)) | dict(zip(*[iter(tile.split())] * 2, strict=True))
            assert codegen(f"--sram 192KB --explain {' '.join(f'{k} {v}' for k, v in given.items())}")[0] == 0, tile


@pytest.mark.parametrize(
    "tile, widths",
    [
        ("--bc 100", "--sram 64KB --d 128 --arch cpu,sm80 --no-backward"),
        ("--br 60", "--sram 16KB --d 192 --arch cpu"),
        ("--br 8 --bc 65", "--sram 16KB --d 192 --arch sm80,sm90a"),
    ],
)
def test_a_refused_tile_where_the_budget_is_too_small_as_well_says_what_serves_without_it(codegen, tile, widths):
    code, _, err = codegen(f"{widths} {tile}")
    words = tile.split()[::2]
    hint = re.fullmatch(rf"  try --sram (\d+)KB without {' and '.join(words)}", err.splitlines()[-1])
    assert code == 2 and hint and err.count("try ") == 1
    sram, enough = widths.split(" --d")[0], int(hint[1])
    for kb, expected in ((enough, 0), (enough - 1, 2)):
        assert codegen(f"{widths.replace(sram, f'--sram {kb}KB')} --explain")[0] == expected


def test_a_refused_tile_where_no_other_fits_is_told_to_go(codegen):
    line = "--sram 192KB --d 256 --arch cpu"
    code, _, err = codegen(f"{line} --br 15 --bc 100")
    assert code == 2 and err.splitlines()[-1] == "  try without --br and --bc"
    assert codegen(f"{line} --explain")[0] == 0


@pytest.mark.field("R098")
@pytest.mark.parametrize("side", ["br", "bc"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 15, 17, 100000])
def test_an_illegal_tile_override_is_refused_never_adjusted(codegen, tmp_path, side, size):
    code, out, err = codegen(f"--sram 192KB --d 128 --{side} {size}")
    assert code == 2 and out == "" and listing(tmp_path) == []
    assert err.startswith("codegen: error: ") and str(size) in err


def test_a_folder_that_holds_something_else_is_left_alone(codegen, tmp_path):
    target = tmp_path / "generated" / "attn_d128_sram192k"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("irreplaceable")
    for line in ("--sram 192KB --d 128", "--sram 192KB --d 128 --dry-run"):
        code, out, err = codegen(line)
        assert code == 2 and out == "" and "is not a tileproof package: left untouched" in err
    assert listing(tmp_path) == ["generated", "generated/attn_d128_sram192k", "generated/attn_d128_sram192k/thesis.tex"]


def test_what_the_file_system_refuses_is_one_message_and_exit_1(codegen):
    for line in ("--sram 192KB --d 128 --check", "--sram 192KB --d 128", "--check"):
        code, _, err = codegen(f"{line} --out {'a' * 300}")
        assert code == 1 and err.startswith("codegen: error: ") and "Traceback" not in err


def test_the_default_command_writes_checks_and_repeats_itself(codegen, tmp_path):
    code, out, err = codegen("--sram 192KB --d 128")
    target = tmp_path / "generated" / "attn_d128_sram192k"
    assert (code, err) == (0, "")
    assert "192KB = 196,608 bytes" in out and "128 x 192" in out and "212,992" in out
    first = {p: p.read_bytes() for p in target.rglob("*") if p.is_file()}
    code, out, _ = codegen("--sram 196608 --d 128 --dv 128 --arch sm80,cpu --out generated")
    assert code == 0 and {p: p.read_bytes() for p in target.rglob("*") if p.is_file()} == first
    code, out, _ = codegen("--check")
    assert code == 0 and "fresh" in out
    code, out, _ = codegen("--check --json")
    assert json.loads(out)[0]["certified"] is False


def test_a_budget_for_the_forward_pass_alone_names_the_way_out(codegen):
    line = "--sram 48KB --d 128 --dtype float32"
    code, _, err = codegen(line)
    assert code == 2 and "no backward tile fits 49,152 bytes" in err and ", or --no-backward" in err
    code, out, _ = codegen(f"{line} --no-backward --dry-run")
    assert code == 0 and "attn_d128_sram48k_float32_forward/csrc/forward_cpu_v4.cpp" in out and "backward" not in out
    code, _, err = codegen("--sram 1KB --d 128 --dtype float32")
    assert code == 2 and "--no-backward" not in err


def test_a_package_without_backward_is_checked_as_what_it_is(codegen):
    assert codegen("--sram 64KB --d 64 --arch cpu --no-backward")[0] == 0
    assert codegen("--check")[0] == codegen("--sram 64KB --d 64 --arch cpu --no-backward --check")[0] == 0
    code, _, err = codegen("--sram 64KB --d 64 --arch cpu --check")
    assert code == 1 and "attn_d64_sram64k_cpu: missing" in err


def test_dry_run_lists_what_would_be_written_and_writes_nothing(codegen, tmp_path):
    code, out, _ = codegen("--sram 192KB --d 128 --dry-run")
    assert code == 0 and "generated/attn_d128_sram192k/plan.json" in out and listing(tmp_path) == []
    code, out, _ = codegen("--sram 192KB --d 128 --dry-run --json")
    files = json.loads(out)["files"]
    codegen("--sram 192KB --d 128")
    target = tmp_path / "generated" / "attn_d128_sram192k"
    assert files == {p.relative_to(target).as_posix(): p.stat().st_size for p in target.rglob("*") if p.is_file()}


def test_json_of_an_emission_is_one_object_on_stdout(codegen, tmp_path):
    code, out, _ = codegen("--sram 64KB --d 64 --arch cpu --name mine --json")
    told = json.loads(out)
    assert code == 0 and told["package"] == "generated/mine" and told["plan"]["name"] == "mine"
    assert told["plan"]["command"] == "codegen --sram 64KB --d 64 --arch cpu --name mine"
    assert emit.is_package(tmp_path / "generated" / "mine")
    assert (tmp_path / "generated" / "mine" / PLAN_FILE).exists()


@pytest.mark.parametrize("flag", ["build", "wheel", "verify"])
def test_a_tool_that_fails_is_exit_1_and_the_package_stays(codegen, tmp_path, monkeypatch, flag):
    from codegen import tools

    monkeypatch.setattr(tools.sys, "executable", "/bin/false")
    code, _, err = codegen(f"--sram 64KB --d 64 --arch cpu --name mine --{flag}")
    assert code == 1 and "failed (exit 1)" in err and "Traceback" not in err
    assert emit.is_package(tmp_path / "generated" / "mine")


def test_a_tool_that_cannot_start_is_exit_1(codegen, monkeypatch, tmp_path):
    from codegen import tools

    monkeypatch.setattr(tools.sys, "executable", str(tmp_path / "nothing"))
    code, _, err = codegen("--sram 64KB --d 64 --arch cpu --name mine --build")
    assert code == 1 and "cannot start" in err


def test_a_missing_package_fails_the_check(codegen):
    code, _, err = codegen("--check")
    assert code == 1 and "no tileproof package under generated" in err
    code, _, err = codegen("--check --sram 192KB --d 128")
    assert code == 1 and "generated/attn_d128_sram192k: missing" in err


def test_help_and_version(codegen):
    assert codegen("--help")[0] == 0
    code, out, _ = codegen("--version")
    assert code == 0 and out.startswith("codegen, version ")
