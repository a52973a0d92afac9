"""The whole process of the default command: fast, without torch or NumPy, and byte-identical when run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import codegen

ROOT = Path(codegen.__file__).parents[1]
COMMAND = [sys.executable, "-m", "codegen", "--sram", "192KB", "--d", "128"]
IMPORTS = """
import sys
from codegen import cli
try:
    cli.main(["--sram", "192KB", "--d", "128"])
except SystemExit as e:
    assert not e.code, e.code
print("imported", *sorted({name.split(".")[0] for name in sys.modules}))
"""


def run(command, cwd):
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )


def test_emission_imports_neither_torch_nor_numpy(tmp_path):
    imported = run([sys.executable, "-c", IMPORTS], tmp_path).stdout.split("imported ")[1].split()
    assert "jinja2" in imported
    assert not {"torch", "numpy", "mpmath", "flint", "verify", "ml_dtypes"} & set(imported)


def test_the_default_command_repeats_its_bytes_within_the_time_promised(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    seconds = []  # of processor time: what others do on the machine does not count
    for folder in folders:
        folder.mkdir()
        before = os.times()
        run(COMMAND, folder)
        after = os.times()
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    made = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    assert made[0] == made[1] and len(made[0]) > 10
    assert min(seconds) < 1.5
