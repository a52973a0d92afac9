"""generated/ is what the command writes today, and stands alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "generated" / "attn_d128_sram192k"

BLOCK_OURS = """
import sys
for name in ("spec", "codegen", "verify", "numpy", "jinja2", "mpmath"):
    sys.modules[name] = None  # importing it now raises ImportError
"""


def test_the_checked_in_packages_are_fresh():
    run = subprocess.run([sys.executable, "-m", "codegen", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_package_imports_and_computes_without_us(tmp_path):
    """A project can vendor the folder: nothing of spec, codegen or verify is needed, nor what they need."""
    (tmp_path / "vendored").symlink_to(PACKAGE, target_is_directory=True)
    script = BLOCK_OURS + (
        "import torch, vendored as attn\n"
        "q = torch.randn(1, 2, 5, 128)\n"
        "print(tuple(attn.attention(q, q, q, causal=True).shape))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "(1, 2, 5, 128)"


def test_generated_is_a_namespace_folder_and_not_in_the_wheel():
    assert not (ROOT / "generated" / "__init__.py").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["spec*", "codegen*", "verify*"]
