"""What a launch found and counted reaches Python: bytes per array, the emitted line, a sentence, every schedule."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import codegen
from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, FindingError, Schedule, extent, guarded, guarded_copy

TEMPLATES = Path(codegen.__file__).parent / "templates"
# Thread i of block b writes the float of lengths[32 b + i] to out + step * (32 b + i) + shift.
TEXT = """
#include <cuda_runtime.h>
#include "ptx_sm80.cuh"
struct Params { const int64_t* in; float* out; int n, step, shift; };
__global__ void copy(const __grid_constant__ Params p) {
  const int i = 32 * ctaid_x() + threadIdx.x;
  if (i >= p.n) return;
  const int64_t value = ld_global_s64(p.in + i);  // line 8
  st_global_f32(p.out + p.step * i + p.shift, static_cast<float>(value));  // line 9
}
extern "C" int run_copy(const int64_t* in, float* out, int n, int step, int shift) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((n + 31) / 32);
  config.blockDim = dim3(32);
  return cudaLaunchKernelEx(&config, copy, Params{in, out, n, step, shift});
}
"""


@pytest.fixture(scope="module")
def emulator():
    return Emulator(build.library(TEXT, includes=[TEMPLATES / "sm80"], name="copy.cu"))


@pytest.fixture
def arrays(emulator):
    """The emulator knows "in" (40 numbers) and "out" (40 floats, each to be written once)."""
    emulator.configure()
    emulator.clear()
    numbers, out = guarded_copy(np.arange(40, dtype=np.int64)), guarded((40,), np.float32)
    emulator.register("in", numbers)
    emulator.register("out", out, once=True)
    return numbers, out


def kinds(run):
    return [finding.kind for finding in run.findings]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_bytes_are_counted_per_array_and_launch_in_every_schedule(emulator, arrays, schedule):
    for _ in range(2):  # the second launch starts from zero
        emulator.clear()
        numbers, out = guarded_copy(np.arange(40, dtype=np.int64)), guarded((40,), np.float32)
        emulator.register("in", numbers)
        emulator.register("out", out, once=True)
        emulator.configure(schedule)
        run = emulator.launch("run_copy", numbers, out, 40, 1, 0).check()
        assert run.bytes("in") == (320, 0) and run.bytes("out") == (0, 160)
        assert run.bytes("unheard of") == (0, 0) and run.code == 0 and run.seconds > 0
        assert np.array_equal(out, np.arange(40, dtype=np.float32))


def test_reading_past_the_end_names_the_line_and_the_array(emulator, arrays):
    numbers, out = arrays
    run = emulator.launch("run_copy", numbers, out, 41, 1, 0)
    (finding,) = run.findings
    assert run.code != 0 and (finding.kind, finding.file, finding.line) == ("global-out-of-bounds", "copy.cu", 8)
    assert "behind the end of 'in'" in finding.sentence and finding.thread == 8 and finding.block == (1, 0, 0)
    with pytest.raises(FindingError, match=r"the context\ncopy.cu:8: thread 8") as caught:
        run.check("the context")
    assert caught.value.findings == run.findings


def test_an_array_that_was_not_registered_cannot_be_touched(emulator, arrays):
    numbers, _ = arrays
    assert emulator.launch("run_copy", numbers, guarded((40,), np.float32), 40, 1, 0).findings
    emulator.clear()
    assert emulator.launch("run_copy", *arrays, 40, 1, 0).findings


def test_a_read_only_array_cannot_be_written(emulator, arrays):
    numbers, _ = arrays
    run = emulator.launch("run_copy", numbers, numbers, 40, 1, 0)
    assert run.findings[0].line == 9 and np.array_equal(numbers, np.arange(40))


def test_every_element_must_be_written_exactly_once(emulator, arrays):
    numbers, out = arrays
    never = emulator.launch("run_copy", numbers, out, 39, 1, 0)
    assert never.code == 0 and len(never.findings) == 1 and "out" in never.findings[0].sentence
    emulator.clear()
    emulator.register("in", numbers)
    emulator.register("out", out, once=True)
    emulator.configure(collect=True)
    twice = emulator.launch("run_copy", numbers, out, 40, 0, 0)
    assert twice.findings and kinds(twice)[0] != kinds(never)[0]


def test_a_strided_output_has_gaps_that_must_not_be_written(emulator, arrays):
    numbers, _ = arrays
    for shift, holds in ((0, True), (1, False)):
        emulator.clear()
        emulator.register("in", numbers)
        home = guarded((80,), np.float32)
        emulator.register("out", home[::2][:39], once=True)
        run = emulator.launch("run_copy", numbers, home, 39, 2, shift)
        assert (not run.findings) == holds


def test_collecting_goes_on_after_a_finding(emulator, arrays):
    numbers, out = arrays
    emulator.configure(collect=True)
    several = emulator.launch("run_copy", numbers, out, 40, 0, 0)
    emulator.configure(collect=False)
    emulator.clear()
    emulator.register("in", numbers)
    emulator.register("out", out, once=True)
    first = emulator.launch("run_copy", numbers, out, 40, 0, 0)
    assert len(several.findings) > 1 and len(first.findings) < len(several.findings)


def test_an_error_code_without_a_finding_is_not_success():
    text = 'extern "C" int fail(const void*) { return 1; }'
    broken = Emulator(build.library(text, name="fail.cu"))
    with pytest.raises(FindingError, match="returned CUDA error 1"):
        broken.launch("fail", ctypes.c_void_p(0)).check()


def test_the_schedules_have_names_and_every_array_its_extent():
    assert [s.name for s in SCHEDULES] == ["ascending-late", "descending-early", "random"]
    assert Schedule("early", "random").name == "random-early"
    x = np.zeros((4, 6), dtype=np.int16)
    assert extent(x[::-1, 1::2]) == (x.ctypes.data + 2, x.ctypes.data + 48)
    made = guarded((3, 5), np.float32)
    assert np.isnan(made).all() and made.ctypes.data % 256 == 0 and made.flags.c_contiguous


def test_a_second_thread_is_refused_and_the_first_goes_on(emulator, arrays):
    numbers, out = arrays
    with emulator._alone():  # as a launch in another thread holds it
        for misuse in (
            lambda: emulator.launch("run_copy", numbers, out, 40, 1, 0), emulator.clear, emulator.configure,
            lambda: emulator.register("in", numbers), lambda: Emulator(emulator.library),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="another thread is using this emulator"):
                misuse()
    emulator.launch("run_copy", numbers, out, 40, 1, 0).check()


def test_words_that_the_library_cannot_take_are_refused(emulator):
    for words in ({"timing": "soon"}, {"order": "sideways"}):
        with pytest.raises(ValueError, match="timing is one of late, early, random"):
            emulator.configure(**words)
    for name in ('q"', "", "a\nb", "k\\"):
        with pytest.raises(ValueError, match="an array's name"):
            emulator.register(name, np.zeros(1))
