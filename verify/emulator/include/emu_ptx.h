// emu_ptx.h: the prelude of an emulated compilation: twins of the PTX headers, with their names and signatures.
//
// It defines the headers' include guards, so that the emitted `#include "ptx_sm80.cuh"` is read and skipped. Each twin
// carries its call site and calls the runtime; what the instruction means is said in src/, from the PTX ISA.
#pragma once
#define TILEPROOF_PTX_SM80_CUH
#include <cstdint>

#include "cuda_runtime.h"
#include "emu_ptx_sm90a.h"

namespace emu {

extern double ex2_error;
float ex2(float x);
uint32_t to_bf16(float x);
uint32_t to_f16(float x);
void cp_async_copy(uint32_t destination, const void* source, int bytes, int source_bytes, Site site);
void cp_async_commit_group();
void cp_async_wait_group(int newest);
void ldmatrix(uint32_t* registers, uint32_t row, int matrices, bool transposed, Site site);
void mma_m16n8k16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool bf16, Site site);
int redux_max(int value, Site site);
void load_global(const void* address, void* value, int bytes, Site site);
void store_global(void* address, const void* value, int bytes, Site site);

}  // namespace emu

inline uint32_t dynamic_smem() { return 0x400; }  // emu::kSharedBase
inline uint32_t ctaid_x() { return blockIdx.x; }

// ---- Global to shared, asynchronous
inline void cp_async_16(uint32_t dst, const void* src, EMU_SITE) { emu::cp_async_copy(dst, src, 16, 16, EMU_HERE); }
inline void cp_async_16_zfill(uint32_t dst, const void* src, int bytes, EMU_SITE) {
  emu::cp_async_copy(dst, src, 16, bytes, EMU_HERE);
}
inline void cp_async_commit() { emu::cp_async_commit_group(); }
template <int kNewest>
inline void cp_async_wait() {
  emu::cp_async_wait_group(kNewest);
}

// ---- Matrix fragments
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row, EMU_SITE) { emu::ldmatrix(r, row, 4, false, EMU_HERE); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row, EMU_SITE) { emu::ldmatrix(r, row, 4, true, EMU_HERE); }
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_SITE) {
  emu::mma_m16n8k16(d, a, b0, b1, true, EMU_HERE);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_SITE) {
  emu::mma_m16n8k16(d, a, b0, b1, false, EMU_HERE);
}

// ---- Arithmetic
inline float ex2_approx_ftz(float x) { return emu::ex2(x); }
inline uint32_t cvt_rn_bf16x2(float low, float high) { return emu::to_bf16(low) | emu::to_bf16(high) << 16; }
inline uint32_t cvt_rn_f16x2(float low, float high) { return emu::to_f16(low) | emu::to_f16(high) << 16; }
inline float s32_as_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline float shfl_xor(float value, int mask, EMU_SITE) {
  return emu::shuffle_as(0xffffffffu, value, emu::own_lane() ^ mask, EMU_HERE);
}
inline int redux_max_s32(int value, EMU_SITE) { return emu::redux_max(value, EMU_HERE); }

// ---- Shared memory by ordinary accesses
inline void st_shared_b32(uint32_t dst, uint32_t value, EMU_SITE) { emu::store_shared(dst, &value, 4, EMU_HERE); }
inline void ld_shared_b128(uint32_t (&r)[4], uint32_t src, EMU_SITE) { emu::load_shared(src, r, 16, EMU_HERE); }

// ---- Global memory by ordinary accesses
inline int64_t ld_global_s64(const int64_t* src, EMU_SITE) {
  int64_t value;
  emu::load_global(src, &value, 8, EMU_HERE);
  return value;
}
inline float ld_global_f32(const float* src, EMU_SITE) {
  float value;
  emu::load_global(src, &value, 4, EMU_HERE);
  return value;
}
inline void ld_global_b128(uint32_t (&r)[4], const void* src, EMU_SITE) { emu::load_global(src, r, 16, EMU_HERE); }
inline void st_global_f32(float* dst, float value, EMU_SITE) { emu::store_global(dst, &value, 4, EMU_HERE); }
inline void st_global_b128(void* dst, const uint32_t (&r)[4], EMU_SITE) { emu::store_global(dst, r, 16, EMU_HERE); }
inline void red_add_f32(float* p, float a, EMU_SITE) { emu::red_add_global_f32(p, &a, 1, EMU_HERE); }
