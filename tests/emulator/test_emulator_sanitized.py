"""Emitted kernels have no undefined behaviour that g++'s sanitizer can see, such as an overrun of a register array.

The emulator sees every access to shared and global memory, but an array in registers is the compiler's own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import verify
from verify import packages, sanitize

# A process of its own: the sanitizer ends it.
RUN = """
import sys
from pathlib import Path
from verify import suite
from verify.emulator import build
from verify.emulator.device import Call
from verify.emulator.emulator import Emulator
from verify.inputs import FAMILIES
source, wrong, right = sys.argv[1:]
text = Path(source).read_text()
assert wrong in text
flags = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
emulator = Emulator(build.library(text.replace(wrong, right), includes=[Path(source).parent], flags=flags))
shape = suite.Shape(nq=70, nk=75, b=2, hq=2, hkv=1, causal="bottom_right", lengths=(1.0, 0.3))
case = suite.case(FAMILIES["gaussian"], shape, "sanitized", dtype="bf16", d=64, dv=64, seed=1)
Call.of(case).launch(emulator, "sm80").check()
print("clean")
"""


def run(wrong: str, right: str) -> subprocess.CompletedProcess[str]:
    source = packages.emit(sanitize.host()) / "csrc" / "forward_sm80.cu"
    words = [sys.executable, "-c", RUN, str(source), wrong, right]
    return subprocess.run(words, cwd=Path(verify.__file__).parents[1], capture_output=True, text=True)


def test_an_emitted_kernel_runs_clean():
    done = run("kernel", "kernel")
    assert done.stdout.strip() == "clean", done.stderr


def test_an_overrun_of_a_register_array_is_seen():
    line = "for (int n = 0; n < kDvPad / 8; ++n)\n#pragma unroll\n      for (int e = 0; e < 4; ++e) o[i][n][e] = 0.f;"
    done = run(line, line.replace("e < 4", "e < 5"))
    assert done.returncode != 0 and "out of bounds" in done.stderr and done.stdout == "", done.stderr
