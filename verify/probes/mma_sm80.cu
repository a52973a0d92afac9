// mma_sm80.cu: the arithmetic of the sm_80 kernels on the device at hand, through the emitted wrappers.
#include <cmath>
#include <cstdint>

#include "ptx_sm80.cuh"

namespace {

// Element (0, 0) of D = C + A B with 16 terms, one warp per block. Row 0 of A is in lanes 0..3, column 0 of B too.
template <bool kBFloat>
__global__ void dot_kernel(const uint16_t* a, const uint16_t* b, float* c, int64_t count) {
  const int64_t block = blockIdx.x;
  const int t = threadIdx.x % 4, g = threadIdx.x / 4;
  if (block >= count) return;
  auto pair = [&](const uint16_t* x, int at) {
    return g == 0 ? uint32_t(x[block * 16 + at]) | uint32_t(x[block * 16 + at + 1]) << 16 : 0u;
  };
  const uint32_t fragment[4] = {pair(a, 2 * t), 0, pair(a, 2 * t + 8), 0};
  float d[4] = {g == 0 && t == 0 ? c[block] : 0.f, 0.f, 0.f, 0.f};
  if constexpr (kBFloat) {
    mma_m16n8k16_bf16(d, fragment, pair(b, 2 * t), pair(b, 2 * t + 8));
  } else {
    mma_m16n8k16_f16(d, fragment, pair(b, 2 * t), pair(b, 2 * t + 8));
  }
  if (threadIdx.x == 0) c[block] = d[0];
}

// worst[0]: largest relative error (as bits of a double) of ex2 over -x for x of the bit patterns begin..end - 1;
// worst[1]: largest true value whose result is 0.
__global__ void exp2_kernel(uint32_t begin, uint32_t end, uint32_t stride, unsigned long long* worst) {
  for (uint64_t at = begin + (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * stride; at < end;
       at += uint64_t(gridDim.x) * blockDim.x * stride) {
    const float x = __uint_as_float(uint32_t(at) | 0x80000000u);
    const float y = ex2_approx_ftz(x);
    const double want = exp2(double(x));
    if (y == 0) {
      atomicMax(&worst[1], (unsigned long long)__double_as_longlong(want));
    } else {
      const double error = fabs(double(y) / want - 1);
      atomicMax(&worst[0], (unsigned long long)__double_as_longlong(error));
    }
  }
}

// Largest error of logf on [1, 2^24]: relative to max(|ln x|, 1).
__global__ void log_kernel(uint32_t begin, uint32_t end, uint32_t stride, unsigned long long* worst) {
  for (uint64_t at = begin + (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * stride; at < end;
       at += uint64_t(gridDim.x) * blockDim.x * stride) {
    const float x = __uint_as_float(uint32_t(at));
    const double want = log(double(x));
    const double error = fabs(double(logf(x)) - want) / fmax(want, 1.0);
    atomicMax(worst, (unsigned long long)__double_as_longlong(error));
  }
}

__global__ void special_kernel(float* out) {
  out[0] = ex2_approx_ftz(0.f);
  out[1] = ex2_approx_ftz(-0.f);
  out[2] = ex2_approx_ftz(-INFINITY);
  out[3] = ex2_approx_ftz(NAN);
}

int finish(cudaError_t error) { return int(error != cudaSuccess ? error : cudaDeviceSynchronize()); }

}  // namespace

// All pointers are device memory. Each returns a cudaError_t.
extern "C" int dots(const uint16_t* a, const uint16_t* b, float* c, int64_t count, int bfloat) {
  if (bfloat) {
    dot_kernel<true><<<unsigned(count), 32>>>(a, b, c, count);
  } else {
    dot_kernel<false><<<unsigned(count), 32>>>(a, b, c, count);
  }
  return finish(cudaGetLastError());
}

extern "C" int exp2_errors(uint32_t begin, uint32_t end, uint32_t stride, unsigned long long* worst) {
  exp2_kernel<<<2048, 256>>>(begin, end, stride, worst);
  return finish(cudaGetLastError());
}

extern "C" int log_errors(uint32_t begin, uint32_t end, uint32_t stride, unsigned long long* worst) {
  log_kernel<<<2048, 256>>>(begin, end, stride, worst);
  return finish(cudaGetLastError());
}

extern "C" int specials(float* out) {
  special_kernel<<<1, 1>>>(out);
  return finish(cudaGetLastError());
}
