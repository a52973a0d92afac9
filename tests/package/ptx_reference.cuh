#ifndef TILEPROOF_PTX_REFERENCE_CUH
#define TILEPROOF_PTX_REFERENCE_CUH
// The global memory primitives and the 16-bit conversions of the reference kernels.
#include <cstdint>

__device__ __forceinline__ float ld_global_bf16(const void* p, int64_t i) {
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16);
}

__device__ __forceinline__ float ld_global_fp16(const void* p, int64_t i) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<const uint16_t*>(p)[i]));
  return x;
}

__device__ __forceinline__ int64_t ld_global_i64(const void* p, int64_t i) {
  return static_cast<const int64_t*>(p)[i];
}

__device__ __forceinline__ float ld_global_f32(const void* p, int64_t i) { return static_cast<const float*>(p)[i]; }

__device__ __forceinline__ void st_global_16(void* p, int64_t i, float x, bool is_bf16) {
  uint16_t bits;
  if (is_bf16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  static_cast<uint16_t*>(p)[i] = bits;
}

__device__ __forceinline__ void st_global_f32(void* p, int64_t i, float x) { static_cast<float*>(p)[i] = x; }
#endif
