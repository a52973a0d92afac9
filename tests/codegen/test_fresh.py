"""--check finds every difference between a package on disk and its regeneration, and forgives no certificate."""

from __future__ import annotations

import json

import pytest

from codegen import check, emit, problem
from codegen.errors import CheckFailed
from codegen.package import PLAN_FILE, render_package

PROBLEM = problem.make(sram_bytes=65536, d=32, archs=["cpu"], dtypes=["float32"])
NAME = "attn_d32_sram64k_float32"


@pytest.fixture
def out(tmp_path):
    emit.write_package(PROBLEM, tmp_path)
    return tmp_path


def differences(out):
    with pytest.raises(CheckFailed) as e:
        check.check(out)
    return str(e.value)


def test_a_fresh_package_passes_by_request_and_by_folder(out):
    assert [r.differences for r in check.check(out)] == [()]
    assert [r.folder.name for r in check.check(out, PROBLEM)] == [NAME]


def test_a_package_is_checked_by_its_name_alone(out):
    assert [r.folder.name for r in check.check(out, name=NAME)] == [NAME]
    with pytest.raises(CheckFailed, match="other: missing"):
        check.check(out, name="other")


def test_an_edited_file_is_named_with_its_line(out):
    path = out / NAME / "op.py"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:6], "x = 1\n", *text[7:]]))
    assert f"{NAME}/op.py:7: differs" in differences(out)


def test_a_missing_an_extra_and_a_truncated_file_are_named(out):
    (out / NAME / "csrc" / "forward.h").unlink()
    (out / NAME / "csrc" / "extra.h").write_text("")
    data = (out / NAME / "op.py").read_bytes()
    (out / NAME / "op.py").write_bytes(data[:-1])
    message = differences(out)
    assert "csrc/forward.h: no such file" in message and "csrc/extra.h: not part of the package" in message
    assert f"op.py: has {len(data) - 1} bytes instead of {len(data)}" in message or "op.py:" in message


@pytest.mark.parametrize("text", ["{", "", "[1]", "[" * 100_000, "\0"])
def test_a_damaged_plan_does_not_hide_the_package(out, text):
    (out / NAME / PLAN_FILE).write_text(text)
    said = differences(out)
    assert "plan.json is not the plan of a tileproof package" in said
    assert "move it away and emit it again" in said  # regenerating over it is refused


@pytest.mark.parametrize("damage", [5, {}, {"archs": None}, {"archs": [["cpu"]]}, {"dtypes": "float32"}, {"br": "x"}])
def test_a_damaged_request_is_a_difference(out, damage):
    plan = json.loads((out / NAME / PLAN_FILE).read_text())
    plan["request"] = {**plan["request"], **damage} if isinstance(damage, dict) and damage else damage
    (out / NAME / PLAN_FILE).write_text(json.dumps(plan))
    assert f"{NAME}/plan.json" in differences(out)


@pytest.mark.parametrize("files", [None, 5, ["op.py"], "op.py"])
def test_a_damaged_list_of_files_is_a_difference(out, files):
    plan = json.loads((out / NAME / PLAN_FILE).read_text())
    (out / NAME / PLAN_FILE).write_text(json.dumps({**plan, "files": files}))
    assert "plan.json is not the plan of a tileproof package" in differences(out)


def test_a_link_to_a_folder_is_not_part_of_the_package(out, tmp_path):
    (out / NAME / "elsewhere").symlink_to(tmp_path)
    assert "elsewhere: not part of the package" in differences(out)


def test_a_plan_with_another_request_is_found_by_the_request(out):
    other = problem.make(sram_bytes=65536, d=64, archs=["cpu"], dtypes=["float32"])
    emit.write_files(render_package(other, NAME), out)
    assert check.check(out)  # consistent with itself
    with pytest.raises(CheckFailed, match=r"plan\.json"):
        check.check(out, PROBLEM)


def test_figures_of_a_certificate_are_ignored_but_not_its_digest(out):
    digest = json.loads((out / NAME / PLAN_FILE).read_text())["digest"]
    certificate = out / NAME / "certificate.json"
    held = {"devices": {"cpu": {"holds": True, "worst": 0.5}}}
    certificate.write_text(json.dumps({"digest": digest, **held}))
    assert [r.certified for r in check.check(out)] == [True]
    certificate.write_text(json.dumps({"digest": "0" * 64, **held}))
    assert "certificate.json: made for digest 000000000000" in differences(out)
    certificate.write_text("not JSON")
    assert "certificate.json: not a certificate" in differences(out)


@pytest.mark.parametrize("devices", [{}, {"cpu": {"holds": False}}, {"cpu": {"holds": True}, "cuda": {"holds": False}}])
def test_a_certificate_of_violations_does_not_make_a_package_certified(out, devices):
    digest = json.loads((out / NAME / PLAN_FILE).read_text())["digest"]
    (out / NAME / "certificate.json").write_text(json.dumps({"digest": digest, "devices": devices}))
    assert [(r.certified, r.differences) for r in check.check(out)] == [(False, ())]


def test_a_check_first_restores_what_a_killed_writer_left(out):
    (out / NAME).rename(out / f".{NAME}.tileproof-old")
    assert [r.folder.name for r in check.check(out)] == [NAME]
    assert not emit.has_leftovers(out)


def test_by_products_of_a_build_are_no_difference(out):
    for folder in ("__pycache__", "build", f"{NAME}.egg-info"):
        (out / NAME / folder).mkdir()
        (out / NAME / folder / "x").write_text("")
    assert check.check(out)[0].differences == ()


def test_checking_nothing_is_a_failure(tmp_path):
    for out in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckFailed, match="no tileproof package"):
            check.check(out)
