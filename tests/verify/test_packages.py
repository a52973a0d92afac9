"""Packages are emitted into a cache by their content, and imported by path."""

from __future__ import annotations

import shutil

import pytest

from codegen.errors import RequestError
from verify import mutants, packages


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
