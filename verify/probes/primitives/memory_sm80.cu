// memory_sm80.cu: probes of copies and accesses: cp.async with and without zero fill, its groups, ld and st widths.
//
// Each launcher takes device pointers and sizes and returns a cudaError_t. Inputs and expected outputs:
// verify/conformance/copies.py.
#include "ptx_sm80.cuh"

#include <cstring>

#include "probe.cuh"

namespace {

constexpr int kThreads = 64;
constexpr int kBytes = kThreads * 16;

// Thread i copies 16 bytes of `source` to place 5 i + 3 (mod 64); every third thread copies 0 bytes of them.
__global__ void cp_async_kernel(const char* source, const void* background, void* out) {
  const uint32_t smem = dynamic_smem();
  const int thread = threadIdx.x;
  load_shared(smem, background, 2 * kBytes);
  cp_async_16(smem + 16 * ((5 * thread + 3) % kThreads), source + 16 * thread);
  cp_async_16_zfill(smem + kBytes + 16 * ((5 * thread + 3) % kThreads), source + 16 * thread, thread % 3 ? 16 : 0);
  cp_async_commit();
  cp_async_wait<0>();
  dump_shared(out, smem, 2 * kBytes);
}

// Four groups of one copy each into four places. After wait<2> the two oldest are there, after wait<0> all;
// out = places 0, 1 read after the first wait, then 2, 3 read after the second.
__global__ void cp_async_groups_kernel(const char* source, char* out) {
  const uint32_t smem = dynamic_smem();
  const int thread = threadIdx.x;
  for (int group = 0; group < 4; ++group) {
    cp_async_16(smem + group * kBytes + 16 * thread, source + group * kBytes + 16 * thread);
    cp_async_commit();
  }
  cp_async_wait<2>();
  uint32_t r[4];
  for (int group = 0; group < 4; ++group) {
    if (group == 2) cp_async_wait<0>();
    ld_shared_b128(r, smem + group * kBytes + 16 * thread);  // this thread's own copies: no barrier needed
    st_global_b128(out + group * kBytes + 16 * thread, r);
  }
}

// 4-byte stores to shared memory in a scrambled order, 16-byte loads of the neighbour's, then every global width. Words
// come by loads of 8 bytes, and of the 16 that two threads share; floats by loads of 4.
__global__ void access_kernel(const int64_t* words, uint32_t* wide, float* single, uint32_t* aligned) {
  const uint32_t smem = dynamic_smem();
  const int thread = threadIdx.x;
  uint32_t r[4];
  ld_global_b128(r, words + thread / 2 * 2);
  const int64_t word = thread % 4 < 2 ? ld_global_s64(words + thread)
                                      : int64_t(uint64_t(r[thread % 2 * 2 + 1]) << 32 | r[thread % 2 * 2]);
  for (int part = 0; part < 4; ++part) {
    const int place = (4 * thread + part) * 7 % (4 * kThreads);
    st_shared_b32(smem + 4 * place, uint32_t(word >> (8 * part)));
  }
  __syncthreads();
  ld_shared_b128(r, smem + 16 * (thread ^ 1));
  st_global_b128(wide + 4 * thread, r);
  st_global_f32(single + thread, ld_global_f32(reinterpret_cast<const float*>(words + thread) + 1));
  if (thread == 0) {
    const uint32_t bits[4] = {smem % 1024, 0, 0, 0};
    st_global_b128(aligned, bits);
  }
}

}  // namespace

// source: 64 * 16 bytes; background, out: 2 * 64 * 16 bytes.
extern "C" int probe_cp_async(const char* source, const void* background, void* out) {
  return run(cp_async_kernel, 1, kThreads, 2 * kBytes, source, background, out);
}

// source, out: 4 * 64 * 16 bytes.
extern "C" int probe_cp_async_groups(const char* source, char* out) {
  return run(cp_async_groups_kernel, 1, kThreads, 4 * kBytes, source, out);
}

// words: int64 (64,); wide: uint32 (64, 4); single: float32 (64,); aligned: uint32 (4,).
extern "C" int probe_access(const int64_t* words, uint32_t* wide, float* single, uint32_t* aligned) {
  return run(access_kernel, 1, kThreads, kBytes, words, wide, single, aligned);
}
