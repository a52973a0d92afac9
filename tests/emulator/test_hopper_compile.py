"""The kernels that the emulator is tested with are real: nvcc accepts the same texts with the emitted PTX headers."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.emulator import hopper

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc (CUDA toolkit) on this machine")

# Wrong on purpose or written for layouts: ptxas may complain of how they use wgmma, but they compile.
NOT_TUNED = {"hopper_protocol", "hopper_product", "hopper_refusals"}


@pytest.mark.parametrize("name", hopper.NAMES)
def test_the_kernel_compiles_for_sm_90a(name, tmp_path):
    words = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", f"-I{hopper.headers()}"]
    source = str(hopper.KERNELS / f"{name}.cu")
    done = subprocess.run(
        ["nvcc", *words, "-cubin", "-o", str(tmp_path / "kernel.cubin"), source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert done.stderr.count(" 0 bytes spill stores") == done.stderr.count("bytes spill stores") > 0
    if name not in NOT_TUNED:
        assert "C75" not in done.stderr  # ptxas serialised no wgmma and injected no wait
