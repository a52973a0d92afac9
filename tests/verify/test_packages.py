"""Packages are emitted into a cache by their content, and imported by path."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen.errors import RequestError
from verify import certificate, mutants, packages
from verify.__main__ import main


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path))
    return tmp_path


def test_a_second_request_finds_the_first_ones_package(cache):
    first = packages.emit(d=16, dtypes=("float32",), archs=("cpu",))
    stamp = (first / "plan.json").stat().st_mtime_ns
    assert first.is_relative_to(cache) and packages.emit(d=16, dtypes=("float32",), archs=("cpu",)) == first
    assert (first / "plan.json").stat().st_mtime_ns == stamp


def test_requests_that_differ_get_packages_that_differ(cache):
    words = {"d": 16, "dtypes": ("float32",), "archs": ("cpu",)}
    found = {packages.emit(**words, **more) for more in ({}, {"dv": 24}, {"br": 64}, {"bc": 32}, {"debug": True})}
    assert len(found) == 5
    assert len({packages.plan(folder)["digest"] for folder in found}) == 5


def test_a_package_is_imported_from_where_it_lies(cache):
    folder = packages.emit(d=16, dtypes=("float32",), archs=("cpu",))
    attn = packages.load(folder)
    assert callable(attn.attention) and packages.load(folder) is attn
    copy = shutil.copytree(folder, cache / "elsewhere" / folder.name)
    other = packages.load(copy)
    assert other is not attn and other.__file__ != attn.__file__
    assert packages.part(attn, "toolchain").cxx().command


@pytest.mark.parametrize("made", [lambda path: path / "nothing", lambda path: path])
def test_what_is_no_package_is_refused_with_a_hint(made, tmp_path):
    with pytest.raises(RequestError, match="no tileproof package there"):
        packages.find(str(made(tmp_path)))
    with pytest.raises(RequestError, match="not a tileproof package"):
        packages.load(made(tmp_path))


def test_a_package_that_does_not_import_leaves_no_half_module(cache):
    folder = shutil.copytree(packages.emit(d=16, dtypes=("float32",), archs=("cpu",)), cache / "broken")
    whole = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text("raise OSError('unreadable')\n")
    with pytest.raises(OSError, match="unreadable"):
        packages.load(folder)
    (folder / "__init__.py").write_text(whole)
    assert callable(packages.load(folder).attention)


def test_a_changed_package_is_sealed_with_a_digest_of_its_own(cache):
    mutant = next(m for m in mutants.CPU if m.name == "o_not_rescaled")
    folder = mutants.package(mutant, packages.request(d=16, dtypes=("float32",), archs=("cpu",)))
    stated = packages.plan(folder)["digest"]
    assert stated != packages.plan(packages.emit(d=16, dtypes=("float32",), archs=("cpu",)))["digest"]
    assert any(stated[:12] in file.read_text() for file in folder.glob("*.py"))


def test_what_is_no_regular_file_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")  # as a device node would be
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "file" / "below", Path("")):
        before = sorted(p.name for p in tmp_path.iterdir())
        with pytest.raises(RequestError, match=r"try out\.json"):
            packages.write_json(path, {})
        done = CliRunner().invoke(main, ["calibrate", "--quick", "--out", str(path)])  # before any work
        assert done.exit_code == 2 and "verify: error" in done.output
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert (tmp_path / "fifo").is_fifo()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    packages.write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "real.json").read_text()) == [1]


def test_figures_that_are_not_finite_are_valid_json(tmp_path):
    def refused(word):
        raise AssertionError(f"{word} is no JSON")

    packages.write_json(tmp_path / "x.json", {"got": math.inf, "want": (-math.inf, math.nan, 1.5, "a", None)})
    read = json.loads((tmp_path / "x.json").read_text(), parse_constant=refused)
    assert read == {"got": "inf", "want": ["-inf", "nan", 1.5, "a", None]}


def test_a_relative_cache_is_one_folder_whatever_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEPROOF_CACHE", "here")
    assert packages.cache() == tmp_path / "here" / "packages"


def test_a_plan_that_was_changed_is_refused_and_a_changed_kernel_is_named(cache):
    folder = shutil.copytree(packages.emit(d=16, dtypes=("float32",), archs=("cpu",)), cache / "copy")
    assert packages.find(str(folder)) == folder and packages.changed(folder) == []
    whole = (folder / "plan.json").read_text()
    plan = json.loads(whole)
    lame = {name: value for name, value in plan.items() if name != "variants"}
    for other in (lame, {**plan, "variants": []}, {**plan, "request": {**plan["request"], "d": 24}}):
        (folder / "plan.json").write_text(json.dumps(other))
        with pytest.raises(RequestError, match=r"plan\.json was changed after it was emitted"):
            packages.find(str(folder))
    (folder / "plan.json").write_text(whole)
    (folder / "checks.py").write_text("")
    assert packages.find(str(folder)) == folder and packages.changed(folder) == ["checks.py"]
    with pytest.raises(RequestError, match=r"checks\.py is not the file that plan\.json names"):
        certificate.write(folder, "cpu", {})
    assert not (folder / "certificate.json").exists()
