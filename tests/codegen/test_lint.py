"""The emulator's contract: each rule is shown to be enforced on text that breaks only it."""

from __future__ import annotations

import pytest

from codegen import lint

CLEAN = """\
// Comments may say asm, __shared__, <<<1, 2>>> and __CUDA_ARCH__.
#include "ptx_sm80.cuh"
struct Params { const uint16_t *q, *k; float* o; int64_t stride[3]; };
__device__ __forceinline__ uint32_t offset(uint32_t row) { return row * 128; }
__global__ void __launch_bounds__(128) forward(const Params p, const float* bias, int n) {
  const uint32_t smem = dynamic_smem();
  float o[4] = {0.f, 0.f, 0.f, 0.f};
  const uint16_t* row = p.q + p.stride[2] * n;
  o[0] *= ld_global_f32(bias + n) * n;
  cp_async_16(smem + offset(n), row, true);
  o[1] = fmaf(n * p.stride[0] + n, n * p.stride[1], 4 * n);
  st_global_f32(p.o + n, o[0]);
}
extern "C" int launch(const Params* p, const float* scales, void* stream) {
  int count = p->stride[0] * scales[0];
  return cudaLaunchKernelEx(&config, forward, *p, scales, count);
}
"""
PTX = """\
// The only inline PTX.
#ifndef TILEPROOF_PTX_SM80_CUH
#define TILEPROOF_PTX_SM80_CUH
__device__ __forceinline__ uint32_t dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return __cvta_generic_to_shared(bytes);
}
__device__ __forceinline__ float ld_global_f32(const float* p) { asm volatile("ld.global"); return *p; }
#endif
"""

BREACHES = [
    (1, 'asm volatile("bar.sync 0;");'),
    (1, '__asm__("nop;");'),
    (2, "__shared__ float tile[64];"),
    (2, "extern __shared__ float all[];"),
    (2, "uint32_t s = __cvta_generic_to_shared(row);"),
    (3, "o[0] = bias[n];"),
    (3, "o[0] = *bias;"),
    (3, "o[0] = *(bias + n);"),
    (3, "o[0] = *(row + n);"),
    (3, "p.o[n] = o[0];"),
    (3, "*p.o = o[0];"),
    (3, "o[0] = *reinterpret_cast<const float*>(row);"),
    (3, "o[0] = *(float*)row;"),
    (3, "auto x = p.q[p.stride[0]];"),
    (4, "__nv_bfloat16 x;"),
    (4, "__half2 x = __floats2half2_rn(o[0], o[1]);"),
    (5, "other<<<1, 32>>>(p);"),
    (7, "#if __CUDA_ARCH__ >= 800\n#endif"),
]


def with_line(line):
    return CLEAN.replace("  cp_async_16", f"  {line}\n  cp_async_16")


def test_clean_text_has_no_violation():
    assert lint.violations("csrc/forward_sm80.cu", CLEAN) == []
    assert lint.violations("csrc/ptx_sm80.cuh", PTX) == []


@pytest.mark.parametrize("rule, line", BREACHES, ids=lambda x: str(x)[:30])
def test_each_rule_is_enforced(rule, line):
    found = lint.violations("csrc/forward_sm80.cu", with_line(line))
    assert [v.rule for v in found] == [rule]
    assert found[0].line == CLEAN[: CLEAN.index("  cp_async_16")].count("\n") + 1
    assert found[0].text in line


@pytest.mark.parametrize("include", ["#include <cuda_bf16.h>", "#include <cuda_fp16.h>"])
def test_vendor_headers_are_refused(include):
    assert [v.rule for v in lint.violations("a.cu", include + "\n" + CLEAN)] == [4]


@pytest.mark.parametrize(
    "text",
    [
        PTX.replace("#ifndef TILEPROOF_PTX_SM80_CUH", "#pragma once"),
        PTX.replace("#ifndef TILEPROOF_PTX_SM80_CUH", "#ifndef PTX_H"),
        PTX.replace("#define TILEPROOF_PTX_SM80_CUH\n", ""),
        "int x;\n" + PTX,
    ],
    ids=["pragma", "other guard", "not defined", "code before"],
)
def test_a_ptx_header_must_open_with_its_guard(text):
    assert {v.rule for v in lint.violations("csrc/ptx_sm80.cuh", text)} == {1}


def test_a_ptx_header_holds_one_shared_array_and_it_is_extern():
    second = PTX.replace("#endif", "__device__ void f() { extern __shared__ char more[]; }\n#endif")
    static = PTX.replace("extern __shared__", "__shared__")
    assert [v.rule for v in lint.violations("ptx_sm80.cuh", second)] == [2]
    assert [v.rule for v in lint.violations("ptx_sm80.cuh", static)] == [2]


@pytest.mark.parametrize("use", ["float c = acc[0];", "auto copy = acc;", "acc[1] = 0.f;", "scale(acc, 2.f);"])
def test_an_accumulator_in_flight_may_not_be_touched(use):
    text = "wgmma_m64n128k16_bf16(acc, a, b);\n{}\nwgmma_wait<0>();\n{}\n"
    assert [(v.rule, v.line) for v in lint.violations("a.cu", text.format(use, use))] == [(6, 2)]
    assert lint.violations("a.cu", text.format("wgmma_m64n128k16_bf16(acc, a2, b2);", use)) == []


def test_the_error_names_file_line_and_rule():
    with pytest.raises(lint.LintError, match=r"csrc/x.cu:10: rule 5 \(launch by cudaLaunchKernelEx\): k<<<1, 2>>>\(\)"):
        lint.require_clean({"csrc/x.cu": with_line("k<<<1, 2>>>();")})


def test_only_cuda_files_are_covered():
    assert lint.covers("csrc/a.cu") and lint.covers("csrc/b.cuh")
    assert not lint.covers("csrc/forward.h") and not lint.covers("op.py")
