"""Installation: a pure wheel without build requirements, and a wheel that carries compiled libraries."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

USE = "import torch, attn_test; q = torch.ones(1, 1, 3, 16); print(torch.equal(attn_test.attention(q, q, q), q))"


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)], cwd="/", env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pip_install(what: Path, target: Path) -> None:
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, what)


def check_record(wheel: Path, contents) -> None:
    """Every file is in RECORD with its hash and size, and RECORD names itself last."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("RECORD")]
        rows = list(csv.reader(io.StringIO(archive.read(name).decode())))
        assert [row[0] for row in rows] == archive.namelist()
        for path, digest, size in rows[:-1]:
            data = archive.read(path)
            assert digest == f"sha256={contents._record_hash(data)}" and int(size) == len(data)
        assert rows[-1] == [name, "", ""]


def test_pip_installs_the_folder_without_build_requirements(folder, tmp_path, cache):
    """--no-index: nothing can be downloaded, so nothing is needed."""
    before = sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    pip_install(folder, tmp_path / "site")
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before  # no by-products
    installed = tmp_path / "site" / "attn_test"
    assert {p.name for p in (installed / "csrc").iterdir()} == {p.name for p in (folder / "csrc").iterdir()}
    assert not list(installed.rglob("*.so"))
    assert run("-c", USE, PYTHONPATH=str(tmp_path / "site")) == "True"
    ask = "import importlib.metadata as m; print(m.requires('attn_test'))"
    assert run("-c", ask, PYTHONPATH=str(tmp_path / "site")) == "['torch>=2.10', 'filelock>=3.12']"


def test_a_compiled_wheel_needs_no_compiler(folder, tmp_path, attn):
    made = run("-m", "attn_test", "wheel", tmp_path / "out", PYTHONPATH=str(folder.parent))
    wheel = Path(made.splitlines()[-1])
    assert wheel.parent == tmp_path / "out" and wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    check_record(wheel, attn.op.contents)
    pip_install(wheel, tmp_path / "site")
    used = run(
        "-c", USE, PYTHONPATH=str(tmp_path / "site"), CXX="no-such-compiler", TILEPROOF_CACHE=str(tmp_path / "none")
    )
    assert used == "True"
    assert not (tmp_path / "none").exists()


def test_a_library_made_for_other_content_is_not_used(packages, folder, tmp_path, attn, monkeypatch):
    run("-m", "attn_test", "wheel", tmp_path / "out", PYTHONPATH=str(folder.parent))
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as archive:
        archive.extractall(tmp_path / "site")
    installed = tmp_path / "site" / "attn_test"
    module = packages.imported(installed, "attn_shipped")
    assert module.build()["cpu"] == installed / "lib" / "cpu.so"
    source = installed / "csrc" / "binding.h"
    source.write_text(source.read_text() + "// changed\n")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(module.BuildError):
        module.build()


def test_wheels_of_equal_content_are_equal(attn, tmp_path):
    contents = attn.op.contents
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = contents.write_wheel(tmp_path / "a"), contents.write_wheel(tmp_path / "b")
    assert one.name == two.name and one.read_bytes() == two.read_bytes()
    check_record(one, contents)


def test_the_command_builds_and_reports_errors(folder, tmp_path, cache):
    out = run("-m", "attn_test", "build", PYTHONPATH=str(folder.parent))
    kind, file = out.split(" ", 1)
    assert kind == "cpu" and Path(file).is_file() and cache in Path(file).parents
    done = subprocess.run(
        [sys.executable, "-m", "attn_test", "build"], cwd=folder.parent, capture_output=True, text=True, check=False,
        env={**os.environ, "CXX": "no-such-compiler", "TILEPROOF_CACHE": str(tmp_path / "empty")},
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("attn_test: error: CXX='no-such-compiler' is not a command")


def test_the_source_distribution_installs(folder, tmp_path, attn):
    name = attn.op.contents.build_sdist(str(tmp_path))
    shutil.unpack_archive(tmp_path / name, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    pip_install(unpacked, tmp_path / "site")
    assert (tmp_path / "site" / "attn_test" / "csrc" / "forward.h").is_file()
