"""The built wheel, not only an editable install: it carries its templates and emits the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("spec", "codegen", "verify")


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory):
    """The wheel built from this tree, unpacked: what `pip install` would put on sys.path."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:  # a copy: setuptools would add what an earlier build left in build/
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(out), str(source)], check=True, capture_output=True, text=True)
    (wheel,) = out.glob("tileproof-*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


def test_the_wheel_emits_the_checked_in_package_into_an_empty_folder(unpacked_wheel, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(unpacked_wheel)}
    run = subprocess.run(
        [sys.executable, "-P", "-m", "codegen", "--sram", "192KB", "--d", "128", "--out", str(tmp_path / "out")],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    emitted = tmp_path / "out" / "attn_d128_sram192k"
    checked_in = ROOT / "generated" / "attn_d128_sram192k"
    names = {p.relative_to(emitted) for p in emitted.rglob("*") if p.is_file()}
    assert names
    for name in names:
        assert (emitted / name).read_bytes() == (checked_in / name).read_bytes(), name


def test_the_wheel_holds_only_our_three_packages(unpacked_wheel):
    tops = {p.name for p in unpacked_wheel.iterdir() if not p.name.endswith(".dist-info")}
    assert tops == set(FOLDERS)


def test_the_wheel_holds_every_file_of_our_packages(unpacked_wheel):
    """A pattern that package-data forgets shows only where the wheel is installed: `verify calibrate` has probes."""
    found = [p for name in FOLDERS for p in (ROOT / name).rglob("*")]
    files = [p for p in found if p.is_file() and "__pycache__" not in p.parts]
    assert files and not [p for p in files if not (unpacked_wheel / p.relative_to(ROOT)).is_file()]
