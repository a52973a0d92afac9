"""Writing a package is one step: a kill anywhere loses nothing, and nothing that is not ours is touched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from codegen import emit
from codegen.errors import RequestError, ToolError
from codegen.package import FORMAT, PLAN_FILE


def package(text: str, name: str = "attn_x") -> dict[str, bytes]:
    """Files that pass for a rendered package; different text, different digest."""
    files = {"__init__.py": b"# " + text.encode(), "op.py": text.encode() * 3, "csrc/forward.h": b"int x;\n"}
    if text == "two":
        files["csrc/deep/more.cu"] = b"// only in two\n"
    listed = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    plan = {"format": FORMAT, "name": name, "request": {}, "digest": listed["op.py"], "files": listed}
    return {**files, PLAN_FILE: json.dumps(plan).encode()}


ONE, TWO = package("one"), package("two")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in emit may catch it."""


def kill_at(monkeypatch, step: int, halfway: bool) -> list[str]:
    """Make the `step`-th change to the file system the last one; `halfway`: that one is only half done."""
    done: list[str] = []

    def wrap(name):
        real = getattr(emit, name)

        def changed(first, *rest):
            done.append(name)
            if len(done) == step + 1:
                if halfway and name == "_write":
                    real(first, rest[0][: len(rest[0]) // 2])
                if halfway and name == "_remove":
                    victims = sorted(p for p in first.rglob("*") if p.is_file())
                    victims[0].unlink()
                raise Killed
            real(first, *rest)

        monkeypatch.setattr(emit, name, changed)

    for name in ("_write", "_flush", "_rename", "_remove"):
        wrap(name)
    return done


def steps_of(tmp_path_factory, first: dict[str, bytes] | None) -> list[str]:
    out = tmp_path_factory.mktemp("count")
    if first:
        emit.write_files(first, out)
    with pytest.MonkeyPatch.context() as patch:
        done = kill_at(patch, 10**9, False)
        emit.write_files(TWO, out)
    return done


@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
@pytest.mark.parametrize("before", [None, ONE], ids=["new", "replace"])
def test_a_kill_at_any_step_leaves_one_whole_package(tmp_path_factory, before, halfway):
    steps = steps_of(tmp_path_factory, before)
    assert {"_write", "_flush", "_rename"} <= set(steps)
    for step in range(len(steps)):
        out = tmp_path_factory.mktemp("out")
        if before:
            emit.write_files(before, out)
            (out / "attn_x" / "certificate.json").write_text("{}")
            before = {**before, "certificate.json": b"{}"}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, step, halfway)
            emit.write_files(TWO, out)
        target = out / "attn_x"
        if target.exists():
            assert contents(target) in ([before, TWO] if before else [TWO])
        with emit.locked(out):
            emit.restore(out)
        assert not emit.has_leftovers(out)
        if before or target.exists():
            assert contents(target) in ([before, TWO] if before else [TWO]), steps[step]
        emit.write_files(TWO, out)
        assert contents(target) == TWO and [p.name for p in out.iterdir()] == ["attn_x"]


@pytest.mark.parametrize("step", range(8))
def test_a_kill_while_restoring_is_restored_too(tmp_path, step):
    emit.write_files(ONE, tmp_path)
    os.rename(tmp_path / "attn_x", tmp_path / ".attn_x.tileproof-old")
    (tmp_path / ".attn_x.tileproof-new").mkdir()
    (tmp_path / ".attn_x.tileproof-new" / "half").write_text("")
    with pytest.MonkeyPatch.context() as patch, emit.locked(tmp_path):
        kill_at(patch, step, True)
        with contextlib.suppress(Killed):
            emit.restore(tmp_path)
    with emit.locked(tmp_path):
        emit.restore(tmp_path)
    assert contents(tmp_path / "attn_x") == ONE and not emit.has_leftovers(tmp_path)


def test_another_package_written_to_the_folder_restores_the_first(tmp_path):
    emit.write_files(ONE, tmp_path)
    os.rename(tmp_path / "attn_x", tmp_path / ".attn_x.tileproof-old")
    emit.write_files(package("three", "attn_y"), tmp_path)
    assert contents(tmp_path / "attn_x") == ONE


KILLED_WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_emit
from codegen import emit
from pathlib import Path
real, calls = emit._rename, []
def rename(a, b):
    real(a, b)
    os.kill(os.getpid(), signal.SIGKILL)
emit._rename = rename
emit.write_files(test_emit.TWO, Path(sys.argv[2]))
"""


def test_a_writer_that_is_killed_drops_its_lock(tmp_path):
    emit.write_files(ONE, tmp_path)
    root = Path(emit.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, str(Path(__file__).parent), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == -9 and not (tmp_path / "attn_x").exists()
    emit.write_files(ONE, tmp_path)
    assert contents(tmp_path / "attn_x") == ONE and not emit.has_leftovers(tmp_path)


def test_concurrent_writers_and_readers_see_whole_packages_only(tmp_path):
    failures = []

    def writer(files):
        for _ in range(15):
            try:
                emit.write_files(files, tmp_path)
            except BaseException as e:
                failures.append(repr(e))

    threads = [threading.Thread(target=writer, args=(files,)) for files in (ONE, TWO, ONE, TWO)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    assert contents(tmp_path / "attn_x") in (ONE, TWO) and not emit.has_leftovers(tmp_path)


def test_a_lock_that_is_never_released_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(emit, "LOCK_TIMEOUT_S", 0.05)
    with emit.locked(tmp_path), pytest.raises(ToolError, match="locked by another writer"):
        emit.write_files(ONE, tmp_path)


def test_equal_bytes_are_not_written_again_and_keep_their_certificate(tmp_path):
    target = emit.write_files(ONE, tmp_path)
    (target / "certificate.json").write_text("{}")
    stamp = (target / "op.py").stat().st_mtime_ns, (target / "op.py").stat().st_ino
    emit.write_files(ONE, tmp_path)
    assert ((target / "op.py").stat().st_mtime_ns, (target / "op.py").stat().st_ino) == stamp
    assert (target / "certificate.json").exists()


def test_other_bytes_drop_the_certificate_and_the_by_products(tmp_path):
    target = emit.write_files(ONE, tmp_path)
    (target / "certificate.json").write_text("{}")
    for by_product in ("__pycache__", "build", "attn_x.egg-info"):
        (target / by_product).mkdir()
        (target / by_product / "x").write_text("")
    emit.write_files(TWO, tmp_path)
    assert contents(target) == TWO


def make_folder(target):
    target.mkdir()
    (target / "thesis.tex").write_text("irreplaceable")


def make_file(target):
    target.write_text("irreplaceable")


def make_link(target):
    (target.parent / "real").mkdir()
    target.symlink_to("real")


def make_other_plan(target):
    target.mkdir()
    (target / PLAN_FILE).write_text('{"format": "a travel plan"}')


def make_visited_package(target):
    emit.write_files(ONE, target.parent)
    (target / "csrc" / "notes.md").write_text("irreplaceable")


def make_package_with_a_link(target):
    emit.write_files(ONE, target.parent)
    (target / "shared").symlink_to("/tmp")


@pytest.mark.parametrize(
    "make", [make_folder, make_file, make_link, make_other_plan, make_visited_package, make_package_with_a_link]
)
def test_what_is_not_ours_is_refused_and_left_untouched(tmp_path, make):
    target = tmp_path / "attn_x"
    make(target)
    before = {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
    with pytest.raises(RequestError, match="left untouched"):
        emit.write_files(TWO, tmp_path)
    assert {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")} == before


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "attn_x").mkdir()
    assert contents(emit.write_files(ONE, tmp_path)) == ONE


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("irreplaceable")
    for out in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(RequestError, match="is not a folder to write packages to"):
            emit.write_files(ONE, out)
    assert (tmp_path / "out").read_text() == "irreplaceable"


def test_a_file_system_that_refuses_is_a_message_and_leaves_the_old_package(tmp_path, monkeypatch):
    emit.write_files(ONE, tmp_path)

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(emit, "_write", full)
        with pytest.raises(ToolError, match="No space left on device"):
            emit.write_files(TWO, tmp_path)
    assert contents(tmp_path / "attn_x") == ONE
    emit.write_files(TWO, tmp_path)
    assert contents(tmp_path / "attn_x") == TWO
