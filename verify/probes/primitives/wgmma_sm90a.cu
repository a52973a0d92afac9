// wgmma_sm90a.cu: probes of wgmma: descriptors of A and B, and the fragments of every N.
//
// The launcher takes device pointers, two relative descriptors and sizes, and returns a cudaError_t. A relative
// descriptor counts its start from the start of shared memory. Inputs and expected outputs:
// verify/conformance/wgmma.py.
#include "ptx_sm90a.cuh"

#include <cstring>

#include "probe.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kRegisterTable = kThreads * 16;

enum class Form { kBf16Ss, kF16Ss, kBf16Rs, kF16Rs };

// The one wrapper of this N and form: `a` is the descriptor of A or unused, `r` its registers or unused.
template <int kN, Form kForm, int kTransA, int kTransB>
struct Wgmma;

#define TILEPROOF_WGMMA(N)                                                                                            \
  template <int kTransA, int kTransB>                                                                                 \
  struct Wgmma<N, Form::kBf16Ss, kTransA, kTransB> {                                                                  \
    static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t a, const uint32_t (&)[4], uint64_t b,    \
                                                 int accumulate) {                                                    \
      wgmma_m64n##N##k16_bf16_ss<kTransA, kTransB>(d, a, b, accumulate);                                              \
    }                                                                                                                 \
  };                                                                                                                  \
  template <int kTransA, int kTransB>                                                                                 \
  struct Wgmma<N, Form::kF16Ss, kTransA, kTransB> {                                                                   \
    static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t a, const uint32_t (&)[4], uint64_t b,    \
                                                 int accumulate) {                                                    \
      wgmma_m64n##N##k16_f16_ss<kTransA, kTransB>(d, a, b, accumulate);                                               \
    }                                                                                                                 \
  };                                                                                                                  \
  template <int kTransA, int kTransB>                                                                                 \
  struct Wgmma<N, Form::kBf16Rs, kTransA, kTransB> {                                                                  \
    static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t, const uint32_t (&r)[4], uint64_t b,     \
                                                 int accumulate) {                                                    \
      wgmma_m64n##N##k16_bf16_rs<kTransB>(d, r, b, accumulate);                                                       \
    }                                                                                                                 \
  };                                                                                                                  \
  template <int kTransA, int kTransB>                                                                                 \
  struct Wgmma<N, Form::kF16Rs, kTransA, kTransB> {                                                                   \
    static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t, const uint32_t (&r)[4], uint64_t b,     \
                                                 int accumulate) {                                                    \
      wgmma_m64n##N##k16_f16_rs<kTransB>(d, r, b, accumulate);                                                        \
    }                                                                                                                 \
  };
// clang-format off
#define TILEPROOF_EVERY_N(DO)                                                                                         \
  DO(8) DO(16) DO(24) DO(32) DO(40) DO(48) DO(56) DO(64) DO(72) DO(80) DO(88)                                         \
  DO(96) DO(104) DO(112) DO(120) DO(128) DO(136) DO(144) DO(152) DO(160) DO(168)                                      \
  DO(176) DO(184) DO(192) DO(200) DO(208) DO(216) DO(224) DO(232) DO(240) DO(248) DO(256)
TILEPROOF_EVERY_N(TILEPROOF_WGMMA)
// clang-format on

// Shared memory = image; d[i] starts as first + thread + 128 i and receives one product; registers: A of _rs.
template <int kN, Form kForm, int kTransA, int kTransB>
__global__ void __launch_bounds__(kThreads)
    wgmma_kernel(const void* image, int bytes, const void* registers, float* out, uint64_t a, uint64_t b, float first,
                 int accumulate) {
  const uint32_t smem = dynamic_smem();
  const int thread = threadIdx.x;
  load_shared(smem, image, bytes);
  load_shared(smem + bytes, registers, kRegisterTable);
  uint32_t r[4];
  load_registers(r, smem + bytes, thread);
  fence_proxy_async();
  __syncthreads();
  float d[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = first + float(thread + kThreads * i);
  pin(d);
  pin(r);
  wgmma_fence();
  Wgmma<kN, kForm, kTransA, kTransB>::issue(d, a + (smem >> 4), r, b + (smem >> 4), accumulate);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) st_global_f32(out + thread * (kN / 2) + i, d[i]);
}

using Kernel = void (*)(const void*, int, const void*, float*, uint64_t, uint64_t, float, int);

// For every N: both formats with A and B by K-major descriptors, and with A in registers and B K-major (bf16) or
// MN-major (f16).
Kernel for_n(int n, bool bfloat, bool from_registers) {
#define TILEPROOF_CASE(N)                                                                                             \
  if (n == N && from_registers) {                                                                                     \
    return bfloat ? wgmma_kernel<N, Form::kBf16Rs, 0, 0> : wgmma_kernel<N, Form::kF16Rs, 0, 1>;                       \
  }                                                                                                                   \
  if (n == N) return bfloat ? wgmma_kernel<N, Form::kBf16Ss, 0, 0> : wgmma_kernel<N, Form::kF16Ss, 0, 0>;
  TILEPROOF_EVERY_N(TILEPROOF_CASE)
  return nullptr;
}

// The other forms, for the N that their probes use; nullptr for one that no probe uses.
Kernel for_layout(int n, int trans_a, int trans_b, bool bfloat, bool from_registers) {
  if (from_registers) {
    if (trans_b != int(bfloat)) return for_n(n, bfloat, true);
    if (n != 64) return nullptr;
    return bfloat ? wgmma_kernel<64, Form::kBf16Rs, 0, 1> : wgmma_kernel<64, Form::kF16Rs, 0, 0>;
  }
  if (!trans_a && !trans_b) return for_n(n, bfloat, false);
  if (trans_a && trans_b && n == 64) {
    return bfloat ? wgmma_kernel<64, Form::kBf16Ss, 1, 1> : wgmma_kernel<64, Form::kF16Ss, 1, 1>;
  }
  if (!bfloat) return nullptr;
  if (trans_a) return !trans_b && n == 16 ? wgmma_kernel<16, Form::kBf16Ss, 1, 0> : nullptr;
  return n == 8     ? wgmma_kernel<8, Form::kBf16Ss, 0, 1>
         : n == 40  ? wgmma_kernel<40, Form::kBf16Ss, 0, 1>
         : n == 256 ? wgmma_kernel<256, Form::kBf16Ss, 0, 1>
                    : nullptr;
}

}  // namespace

// image: `bytes` of shared memory; registers: uint32 (128, 4); out: float32 (128, n / 2).
extern "C" int probe_wgmma(const void* image, const void* registers, float* out, int64_t a, int64_t b, int bytes, int n,
                           int trans_a, int trans_b, int bfloat, int from_registers, int first, int accumulate) {
  const Kernel kernel = for_layout(n, trans_a, trans_b, bfloat != 0, from_registers != 0);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return run(kernel, 1, kThreads, bytes + kRegisterTable, image, bytes, registers, out, uint64_t(a), uint64_t(b),
             float(first), accumulate);
}
