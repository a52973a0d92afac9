"""The context switch keeps what a function call must keep: by hand on x86-64 and AArch64, and by ucontext."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from verify.emulator import build

TEST = Path(__file__).parent / "kernels" / "core_context.cpp"


def run(tmp_path, compiler, *flags, through=()):
    program = tmp_path / "switch"
    words = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{build.SOURCES}", str(TEST)]
    subprocess.run([*words, str(build.SOURCES / "context.cpp"), *flags, "-o", str(program)], check=True)
    return subprocess.run([*through, str(program)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("flags", [(), ("-DEMU_CONTEXT_UCONTEXT",)], ids=["by hand", "ucontext"])
def test_values_and_stacks_survive_two_thousand_switches(tmp_path, flags):
    assert run(tmp_path, build.compiler().command, *flags) == "ok\n"


CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.skipif(
    platform.machine() == "aarch64" or not (shutil.which(CROSS) and shutil.which(QEMU)),
    reason=f"needs {CROSS} and {QEMU} (on AArch64 the test above is this one)",
)
def test_the_switch_for_aarch64_under_an_interpreter(tmp_path):
    assert run(tmp_path, CROSS, "-static", through=[QEMU]) == "ok\n"
