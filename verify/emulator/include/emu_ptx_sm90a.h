// emu_ptx_sm90a.h: twins of the instruction wrappers in ptx_sm90a.cuh, of the same names and parameters.
//
// Each twin is one call into the runtime, with its call site as hidden last argument. The include guard of the real
// header is defined here, so that the emitted `#include "ptx_sm90a.cuh"` finds nothing more to say.
// Source: PTX ISA 9.0; the files under src/ name the sections.
#ifndef TILEPROOF_EMULATOR_PTX_SM90A_H
#define TILEPROOF_EMULATOR_PTX_SM90A_H
#define TILEPROOF_PTX_SM90A_CUH
#include "cuda.h"
#include "cuda_runtime.h"

namespace emu {

// mbarrier.cpp
void mbarrier_init(uint32_t address, uint32_t count, Site site);
void fence_mbarrier_init(Site site);
void mbarrier_arrive(uint32_t address, Site site);
void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, Site site);
bool mbarrier_try_wait_parity(uint32_t address, uint32_t parity, Site site);
void fence_proxy_async(Site site);

// tma.cpp
void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, const int* coordinates, int rank, Site site);
void tma_store(const CUtensorMap* map, uint32_t src, const int* coordinates, int rank, bool reduce, Site site);
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, Site site);
void bulk_store(void* dst, uint32_t src, uint32_t bytes, bool reduce, Site site);
void bulk_commit(Site site);
void bulk_wait(int newest, Site site);
void bulk_wait_read(int newest, Site site);
void prefetch_tensormap(const CUtensorMap* map, Site site);

// wgmma.cpp
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int newest, Site site);
// d: the n / 2 accumulators of the lane. a_registers: four, or null for A by its descriptor.
void wgmma_product(float* d, int n, const uint32_t* a_registers, uint64_t a, uint64_t b, bool trans_a, bool trans_b,
                   bool f16, bool accumulate, Site site);

// registers.cpp, stmatrix.cpp, atomics.cpp
void setmaxnreg(int count, bool increase, Site site);
void stmatrix_x4(uint32_t row, const uint32_t* registers, bool transposed, Site site);
uint32_t atomic_add_global_u32(uint32_t* address, uint32_t value, Site site);
void red_add_global_f32(float* address, const float* values, int count, Site site);  // the sm_80 twins call it as well

// shadow.cpp; the sm_80 twins call the first two as well. collective.cpp
void load_shared(uint32_t address, void* value, int bytes, Site site);
void store_shared(uint32_t address, const void* value, int bytes, Site site);
bool vote_any(bool predicate, Site site);

// arithmetic.cpp
float rcp(float x);
float lg2(float x);

}  // namespace emu

// ---- mbarrier and proxy fence

inline void mbarrier_init(uint32_t bar, uint32_t count, EMU_SITE) { emu::mbarrier_init(bar, count, EMU_HERE); }
inline void fence_mbarrier_init(EMU_SITE) { emu::fence_mbarrier_init(EMU_HERE); }
inline void mbarrier_arrive(uint32_t bar, EMU_SITE) { emu::mbarrier_arrive(bar, EMU_HERE); }
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes, EMU_SITE) {
  emu::mbarrier_arrive_expect_tx(bar, bytes, EMU_HERE);
}
inline bool mbarrier_try_wait_parity(uint32_t bar, uint32_t parity, EMU_SITE) {
  return emu::mbarrier_try_wait_parity(bar, parity, EMU_HERE);
}
inline void fence_proxy_async(EMU_SITE) { emu::fence_proxy_async(EMU_HERE); }

// ---- Bulk copies

inline void prefetch_tensormap(const CUtensorMap* map, EMU_SITE) { emu::prefetch_tensormap(map, EMU_HERE); }

inline void tma_load_2d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, EMU_SITE) {
  const int c[] = {c0, c1};
  emu::tma_load(dst, map, bar, c, 2, EMU_HERE);
}
inline void tma_load_3d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, EMU_SITE) {
  const int c[] = {c0, c1, c2};
  emu::tma_load(dst, map, bar, c, 3, EMU_HERE);
}
inline void tma_load_4d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, int c3, EMU_SITE) {
  const int c[] = {c0, c1, c2, c3};
  emu::tma_load(dst, map, bar, c, 4, EMU_HERE);
}
inline void tma_load_5d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2, int c3, int c4,
                        EMU_SITE) {
  const int c[] = {c0, c1, c2, c3, c4};
  emu::tma_load(dst, map, bar, c, 5, EMU_HERE);
}
inline void tma_store_2d(const CUtensorMap* map, uint32_t src, int c0, int c1, EMU_SITE) {
  const int c[] = {c0, c1};
  emu::tma_store(map, src, c, 2, false, EMU_HERE);
}
inline void tma_store_3d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, EMU_SITE) {
  const int c[] = {c0, c1, c2};
  emu::tma_store(map, src, c, 3, false, EMU_HERE);
}
inline void tma_store_4d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, EMU_SITE) {
  const int c[] = {c0, c1, c2, c3};
  emu::tma_store(map, src, c, 4, false, EMU_HERE);
}
inline void tma_store_5d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, int c4, EMU_SITE) {
  const int c[] = {c0, c1, c2, c3, c4};
  emu::tma_store(map, src, c, 5, false, EMU_HERE);
}
inline void tma_reduce_add_2d(const CUtensorMap* map, uint32_t src, int c0, int c1, EMU_SITE) {
  const int c[] = {c0, c1};
  emu::tma_store(map, src, c, 2, true, EMU_HERE);
}
inline void tma_reduce_add_3d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, EMU_SITE) {
  const int c[] = {c0, c1, c2};
  emu::tma_store(map, src, c, 3, true, EMU_HERE);
}
inline void tma_reduce_add_4d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, EMU_SITE) {
  const int c[] = {c0, c1, c2, c3};
  emu::tma_store(map, src, c, 4, true, EMU_HERE);
}
inline void tma_reduce_add_5d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, int c4, EMU_SITE) {
  const int c[] = {c0, c1, c2, c3, c4};
  emu::tma_store(map, src, c, 5, true, EMU_HERE);
}

inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, EMU_SITE) {
  emu::bulk_load(dst, src, bytes, bar, EMU_HERE);
}
inline void bulk_store(void* dst, uint32_t src, uint32_t bytes, EMU_SITE) {
  emu::bulk_store(dst, src, bytes, false, EMU_HERE);
}
inline void bulk_reduce_add_f32(float* dst, uint32_t src, uint32_t bytes, EMU_SITE) {
  emu::bulk_store(dst, src, bytes, true, EMU_HERE);
}
inline void bulk_commit(EMU_SITE) { emu::bulk_commit(EMU_HERE); }
template <int kNewest>
void bulk_wait(EMU_SITE) {
  static_assert(kNewest >= 0, "a number of groups");
  emu::bulk_wait(kNewest, EMU_HERE);
}
template <int kNewest>
void bulk_wait_read(EMU_SITE) {
  static_assert(kNewest >= 0, "a number of groups");
  emu::bulk_wait_read(kNewest, EMU_HERE);
}

// ---- wgmma

inline void wgmma_fence(EMU_SITE) { emu::wgmma_fence(EMU_HERE); }
inline void wgmma_commit(EMU_SITE) { emu::wgmma_commit(EMU_HERE); }
template <int kNewest>
void wgmma_wait(EMU_SITE) {
  static_assert(kNewest >= 0 && kNewest <= 7, "the instruction takes 0..7");
  emu::wgmma_wait(kNewest, EMU_HERE);
}

#define EMU_WGMMA(N, DTYPE, F16)                                                                                       \
  template <int kTransA, int kTransB>                                                                                  \
  void wgmma_m64n##N##k16_##DTYPE##_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate, EMU_SITE) {          \
    emu::wgmma_product(d, N, nullptr, a, b, kTransA, kTransB, F16, accumulate != 0, EMU_HERE);                         \
  }                                                                                                                    \
  template <int kTransB>                                                                                               \
  void wgmma_m64n##N##k16_##DTYPE##_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate,          \
                                       EMU_SITE) {                                                                     \
    emu::wgmma_product(d, N, a, 0, b, false, kTransB, F16, accumulate != 0, EMU_HERE);                                 \
  }
#define EMU_WGMMA_TYPES(N) EMU_WGMMA(N, bf16, false) EMU_WGMMA(N, f16, true)
EMU_WGMMA_TYPES(8) EMU_WGMMA_TYPES(16) EMU_WGMMA_TYPES(24) EMU_WGMMA_TYPES(32)
EMU_WGMMA_TYPES(40) EMU_WGMMA_TYPES(48) EMU_WGMMA_TYPES(56) EMU_WGMMA_TYPES(64)
EMU_WGMMA_TYPES(72) EMU_WGMMA_TYPES(80) EMU_WGMMA_TYPES(88) EMU_WGMMA_TYPES(96)
EMU_WGMMA_TYPES(104) EMU_WGMMA_TYPES(112) EMU_WGMMA_TYPES(120) EMU_WGMMA_TYPES(128)
EMU_WGMMA_TYPES(136) EMU_WGMMA_TYPES(144) EMU_WGMMA_TYPES(152) EMU_WGMMA_TYPES(160)
EMU_WGMMA_TYPES(168) EMU_WGMMA_TYPES(176) EMU_WGMMA_TYPES(184) EMU_WGMMA_TYPES(192)
EMU_WGMMA_TYPES(200) EMU_WGMMA_TYPES(208) EMU_WGMMA_TYPES(216) EMU_WGMMA_TYPES(224)
EMU_WGMMA_TYPES(232) EMU_WGMMA_TYPES(240) EMU_WGMMA_TYPES(248) EMU_WGMMA_TYPES(256)
#undef EMU_WGMMA_TYPES
#undef EMU_WGMMA

// For the compiler of the GPU only: registers do not move across it.
template <int kCount>
void pin(float (&)[kCount]) {}
template <int kCount>
void pin(uint32_t (&)[kCount]) {}

// ---- Registers and barriers

template <int kRegisters>
void setmaxnreg_inc(EMU_SITE) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "a multiple of 8 in 24..256");
  emu::setmaxnreg(kRegisters, true, EMU_HERE);
}
template <int kRegisters>
void setmaxnreg_dec(EMU_SITE) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "a multiple of 8 in 24..256");
  emu::setmaxnreg(kRegisters, false, EMU_HERE);
}
inline void bar_sync(int id, int threads, EMU_SITE) { emu::barrier_sync(id, threads, "bar.sync", EMU_HERE); }
inline void bar_arrive(int id, int threads, EMU_SITE) { emu::barrier_arrive(id, threads, "bar.arrive", EMU_HERE); }

// ---- Warp

inline bool vote_any(bool predicate, EMU_SITE) { return emu::vote_any(predicate, EMU_HERE); }
inline uint32_t shfl_xor_b32(uint32_t value, int mask, EMU_SITE) {
  return emu::shuffle(0xffffffffu, value, emu::own_lane() ^ mask, EMU_HERE);
}
inline void stmatrix_x4(uint32_t row, const uint32_t (&r)[4], EMU_SITE) { emu::stmatrix_x4(row, r, false, EMU_HERE); }
inline void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4], EMU_SITE) {
  emu::stmatrix_x4(row, r, true, EMU_HERE);
}

// ---- Arithmetic. Correctly rounded or nearly so, where the GPU may be off by its documented error.

inline float rcp_approx_ftz(float x) { return emu::rcp(x); }
inline float lg2_approx_ftz(float x) { return emu::lg2(x); }

// ---- Integers

inline int32_t float_as_s32(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline int32_t max3_s32(int32_t a, int32_t b, int32_t c) { return max(max(a, b), c); }

// ---- Shared and global memory

inline uint32_t ld_shared_b32(uint32_t src, EMU_SITE) {
  uint32_t value;
  emu::load_shared(src, &value, 4, EMU_HERE);
  return value;
}
inline void st_shared_b128(uint32_t dst, const uint32_t (&r)[4], EMU_SITE) { emu::store_shared(dst, r, 16, EMU_HERE); }
inline uint32_t atomic_add_global_u32(uint32_t* p, uint32_t v, EMU_SITE) {
  return emu::atomic_add_global_u32(p, v, EMU_HERE);
}
inline void red_add_v2_f32(float* p, float a, float b, EMU_SITE) {
  const float values[] = {a, b};
  emu::red_add_global_f32(p, values, 2, EMU_HERE);
}
inline void red_add_v4_f32(float* p, float a, float b, float c, float d, EMU_SITE) {
  const float values[] = {a, b, c, d};
  emu::red_add_global_f32(p, values, 4, EMU_HERE);
}

#endif  // TILEPROOF_EMULATOR_PTX_SM90A_H
