// core_arithmetic.cu: one product, conversion or approximate function, with operands as bits from global memory.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ float as_float(uint32_t bits) { return __uint_as_float(bits); }

// in: per lane a[0..3], b0, b1. out: per lane d[0..3] of D = A B.
template <bool kBf16>
__global__ void product(const int64_t* in, float* out) {
  uint32_t r[6];
  for (int i = 0; i < 3; ++i) {
    const int64_t pair = ld_global_s64(in + 3 * threadIdx.x + i);
    r[2 * i] = static_cast<uint32_t>(pair);
    r[2 * i + 1] = static_cast<uint32_t>(pair >> 32);
  }
  const uint32_t a[4] = {r[0], r[1], r[2], r[3]};
  float d[4] = {};
  if (kBf16)
    mma_m16n8k16_bf16(d, a, r[4], r[5]);
  else
    mma_m16n8k16_f16(d, a, r[4], r[5]);
  for (int i = 0; i < 4; ++i) st_global_f32(out + 4 * threadIdx.x + i, d[i]);
}

// in: two floats per thread, low and high. out: their bf16 pair, their f16 pair.
__global__ void convert(const int64_t* in, float* out) {
  const int i = 128 * ctaid_x() + threadIdx.x;
  const int64_t pair = ld_global_s64(in + i);
  const float low = as_float(static_cast<uint32_t>(pair)), high = as_float(static_cast<uint32_t>(pair >> 32));
  st_global_f32(out + 2 * i, as_float(cvt_rn_bf16x2(low, high)));
  st_global_f32(out + 2 * i + 1, as_float(cvt_rn_f16x2(low, high)));
}

__global__ void exponential(const int64_t* in, float* out) {
  const int i = 128 * ctaid_x() + threadIdx.x;
  const int64_t pair = ld_global_s64(in + i);
  st_global_f32(out + 2 * i, ex2_approx_ftz(as_float(static_cast<uint32_t>(pair))));
  st_global_f32(out + 2 * i + 1, ex2_approx_ftz(as_float(static_cast<uint32_t>(pair >> 32))));
}

// in: two floats per thread. out: the reciprocal of the first, the logarithm of the second.
__global__ void reciprocal_logarithm(const int64_t* in, float* out) {
  const int i = 128 * ctaid_x() + threadIdx.x;
  const int64_t pair = ld_global_s64(in + i);
  st_global_f32(out + 2 * i, rcp_approx_ftz(as_float(static_cast<uint32_t>(pair))));
  st_global_f32(out + 2 * i + 1, lg2_approx_ftz(as_float(static_cast<uint32_t>(pair >> 32))));
}

int launch(void (*kernel)(const int64_t*, float*), int blocks, int threads, const int64_t* in, float* out) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  return cudaLaunchKernelEx(&config, kernel, in, out);
}

}  // namespace

extern "C" int run_product(const int64_t* in, float* out, int bf16) {
  return launch(bf16 ? product<true> : product<false>, 1, 32, in, out);
}
extern "C" int run_convert(const int64_t* in, float* out, int blocks) { return launch(convert, blocks, 128, in, out); }
extern "C" int run_exponential(const int64_t* in, float* out, int blocks) {
  return launch(exponential, blocks, 128, in, out);
}
extern "C" int run_reciprocal_logarithm(const int64_t* in, float* out, int blocks) {
  return launch(reciprocal_logarithm, blocks, 128, in, out);
}
