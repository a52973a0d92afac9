"""Kernels are compiled once per content, safely by many processes at once, and a machine without g++ is told so.

The runtime is replaced by one of three lines where only the building is under test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.errors import RequestError, ToolError
from verify import packages
from verify.emulator import build

KERNEL = '#include "offset.h"\nextern "C" int answer() { return kRuntime + kOffset; }\n'


@pytest.fixture
def small_runtime(tmp_path, monkeypatch):
    """A runtime of one constant and a cache of its own; returns the folder of the header offset.h."""
    for name in ("include", "src", "kernels"):
        (tmp_path / name).mkdir()
    (tmp_path / "include" / "emu_ptx.h").write_text("extern const int kRuntime;\n")
    (tmp_path / "src" / "constant.cpp").write_text("extern const int kRuntime = 40;\n")
    (tmp_path / "kernels" / "offset.h").write_text("constexpr int kOffset = 2;\n")
    monkeypatch.setattr(build, "INCLUDE", tmp_path / "include")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setenv("TILEPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "kernels"


def test_equal_content_is_one_library_and_any_change_makes_another(small_runtime):
    first = build.library(KERNEL, includes=[small_runtime])
    assert first.answer() == 42
    assert build.library(KERNEL, includes=[small_runtime]) is first
    paths = {build.file(KERNEL, includes=[small_runtime])}
    for change in (
        lambda: build.file(KERNEL + "\n", includes=[small_runtime]),
        lambda: build.file(KERNEL, includes=[small_runtime], flags=["-DMORE=1"]),
        lambda: build.file(KERNEL, includes=[small_runtime], name="other.cu"),
        lambda: (small_runtime / "offset.h").write_text("constexpr int kOffset = 3;\n"),
        lambda: (build.SOURCES / "constant.cpp").write_text("extern const int kRuntime = 50;\n"),
        lambda: (build.INCLUDE / "emu_ptx.h").write_text("extern const int kRuntime;  // changed\n"),
    ):
        made = change()
        paths.add(made if isinstance(made, Path) else build.file(KERNEL, includes=[small_runtime]))
    assert len(paths) == 7
    assert build.library(KERNEL, includes=[small_runtime]).answer() == 53


def test_a_file_finds_the_headers_beside_it_and_is_named_without_its_folder(small_runtime):
    source = small_runtime / "forward_test.cu"
    source.write_text(KERNEL + 'extern "C" const char* place() { return __FILE__; }\n')
    library = build.library(source)
    library.place.restype = build.ctypes.c_char_p
    assert library.answer() == 42 and library.place() == b"forward_test.cu"


def test_two_libraries_share_no_state(small_runtime):
    text = "inline int& count() { static int n = 0; return n; }\n"
    one, two = (build.library(f'{text}extern "C" int next() {{ return ++count(); }}  // {x}\n') for x in "ab")
    assert [one.next(), one.next(), two.next()] == [1, 2, 1]


def test_a_library_does_not_say_which_checkout_made_it(small_runtime):
    (build.INCLUDE / "emu_ptx.h").write_text("inline int twice(const volatile int& x) { return x + x; }\n")
    made = build.file("extern const int kRuntime; int offset() { return twice(kRuntime); }\n")
    assert str(build.INCLUDE).encode() not in made.read_bytes(), "findings would differ for a second checkout"


def test_what_does_not_compile_or_link_is_shown_by_its_line(small_runtime):
    with pytest.raises(ToolError, match=r"(?s)mine.cu does not compile.*mine.cu:1:.*wrong"):
        build.library("int x = wrong;", name="mine.cu")
    with pytest.raises(ToolError, match="undefined reference to `elsewhere"):
        build.library('int elsewhere();\nextern "C" int f() { return elsewhere(); }\n')
    assert not list(build.cache().glob("*.so"))


def test_a_package_without_the_target_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no kernel for sm80"):
        build.package(tmp_path, "sm80")


@pytest.mark.parametrize("version, number", [("g++ (Old) 11.4.0", "11.4.0"), ("clang version 18.1", "18.1.0")])
def test_without_a_new_enough_compiler_the_message_says_what_is_there(tmp_path, monkeypatch, version, number):
    fake = tmp_path / "g++"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo {number}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    build._compiler.cache_clear()
    try:
        with pytest.raises(RequestError) as caught:
            build.compiler()
    finally:
        build._compiler.cache_clear()
    assert "the emulator needs g++ 12 or later" in str(caught.value) and "apt install g++" in str(caught.value)
    fake.unlink()
    try:
        with pytest.raises(RequestError, match="none is on PATH"):
            build.compiler()
    finally:
        build._compiler.cache_clear()


COLD = """
import sys, time
from pathlib import Path
from verify.emulator import build
def make(work):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(0.3)
    (work / "product").write_text("whole")
print(build._published(Path(sys.argv[1]), "product", make).read_text())
"""


def test_of_many_processes_one_compiles_and_all_get_a_whole_library(tmp_path):
    words = [sys.executable, "-c", COLD, str(tmp_path / "cache" / "x.so"), str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(Path(packages.__file__).parents[1])}
    jobs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    assert [job.communicate()[0].strip() for job in jobs] == ["whole"] * 4
    assert (tmp_path / "log").read_text() == "made\n"
    assert not [one for one in (tmp_path / "cache").iterdir() if one.is_dir()]


def test_a_failed_build_publishes_nothing_and_the_next_one_may_succeed(tmp_path):
    path = tmp_path / "x.so"

    def fail(work):
        (work / "product").write_text("half")
        raise ToolError("no")

    with pytest.raises(ToolError):
        build._published(path, "product", fail)
    assert not path.exists()
    assert build._published(path, "product", lambda work: (work / "product").write_text("whole")).read_text() == "whole"


@pytest.mark.parametrize("damage", ["truncated", "emptied", "overwritten", "gone"])
def test_a_damaged_library_is_made_again(tmp_path, damage):
    path = tmp_path / "x.so"
    build._published(path, "product", lambda work: (work / "product").write_text("whole"))
    if damage == "gone":
        path.unlink()
        (path.parent / ".x.so.sha256").write_bytes(b"\xff")
    else:
        path.write_text({"truncated": "who", "emptied": "", "overwritten": "whale"}[damage])
    made = build._published(path, "product", lambda work: (work / "product").write_text("again"))
    assert made.read_text() == "again"
    assert build._published(path, "product", lambda work: pytest.fail("made twice")).read_text() == "again"


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".x-abc").mkdir()
    (tmp_path / ".y-abc").mkdir()  # of another library, which may be being built
    build._published(tmp_path / "x.so", "product", lambda work: (work / "product").write_text("whole"))
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == [".y-abc"]


def test_a_cache_that_cannot_be_written_says_what_to_try(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match=r"(?s)cannot write to .*try TILEPROOF_CACHE="):
        build._published(tmp_path / "file" / "x.so", "product", lambda work: None)
    with pytest.raises(ToolError, match="wrote nothing"):
        build._published(tmp_path / "x.so", "product", lambda work: None)


def test_a_source_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "forward.cu").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "forward.cu", tmp_path / "missing.cu", tmp_path):
        with pytest.raises(RequestError, match="cannot be read as CUDA text"):
            build.library(path)


def test_a_compiler_that_is_no_program_is_turned_down(tmp_path, monkeypatch):
    (tmp_path / "g++").write_text("no program")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    build._compiler.cache_clear()
    try:
        with pytest.raises(RequestError, match=r"(?s)none is on PATH.*g\+\+: Exec format error"):
            build.compiler()
    finally:
        build._compiler.cache_clear()
