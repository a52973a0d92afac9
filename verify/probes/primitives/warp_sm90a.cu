// warp_sm90a.cu: probes of stmatrix, shared accesses, rcp, lg2, integer forms, votes and atomics.
//
// Each launcher takes device pointers and sizes and returns a cudaError_t. Inputs and expected outputs:
// verify/conformance/warp.py.
#include "ptx_sm90a.cuh"

#include <cstring>

#include "probe.cuh"

namespace {

constexpr int kRegisterTable = 32 * 16;

// out = `bytes` of shared memory, at first `background`, after stmatrix of registers[lane] to the rows of rows[lane].
template <bool kTrans>
__global__ void stmatrix_kernel(const void* background, int bytes, const void* rows, const void* registers,
                                uint32_t* out) {
  const uint32_t smem = dynamic_smem();
  const int lane = threadIdx.x;
  load_shared(smem, background, bytes);
  load_shared(smem + bytes, rows, kRegisterTable);
  load_shared(smem + bytes + kRegisterTable, registers, kRegisterTable);
  uint32_t row[4], r[4];
  load_registers(row, smem + bytes, lane);
  load_registers(r, smem + bytes + kRegisterTable, lane);
  if constexpr (kTrans) {
    stmatrix_x4_trans(smem + row[0], r);
  } else {
    stmatrix_x4(smem + row[0], r);
  }
  dump_shared(out, smem, bytes);
}

// Lane l stores its four registers to place 11 l (mod 32), then reads 4 bytes from word 37 l + 5 (mod 128):
// out[l] = (that word, the largest of registers 0..2 as signed integers, bits through float and back, register 3 of
// lane ^ masks[block]); any[block] = whether any register 0 equals masks[block], four times.
__global__ void words_kernel(const void* registers, const void* masks, uint32_t* out, uint32_t* any) {
  const uint32_t smem = dynamic_smem();
  const int lane = threadIdx.x, block = blockIdx.x;
  load_shared(smem, registers, kRegisterTable);
  load_shared(smem + kRegisterTable, masks, kRegisterTable);
  const uint32_t scratch = smem + 2 * kRegisterTable;
  uint32_t r[4], mask[4];
  load_registers(r, smem, lane);
  load_registers(mask, smem + kRegisterTable, block);
  st_shared_b128(scratch + 16 * (11 * lane % 32), r);
  __syncthreads();
  const uint32_t word = ld_shared_b32(scratch + 4 * ((37 * lane + 5) % 128));
  const int32_t largest = max3_s32(int32_t(r[0]), int32_t(r[1]), int32_t(r[2]));
  const int32_t same = float_as_s32(s32_as_float(int32_t(r[1])));
  const uint32_t result[4] = {word, uint32_t(largest), uint32_t(same), shfl_xor_b32(r[3], int(mask[0]))};
  store_registers(out + block * 32 * 4, result, lane);
  const uint32_t found = vote_any(r[0] == mask[0]) ? 1 : 0;
  const uint32_t votes[4] = {found, found, found, found};
  if (lane == 0) store_registers(any, votes, block);
}

// Four arguments in, per thread: rcp of each to `reciprocals`, lg2 of each to `logarithms`.
__global__ void reciprocals_kernel(const char* arguments, uint32_t* reciprocals, uint32_t* logarithms) {
  const uint32_t smem = dynamic_smem();
  const int threads = blockDim.x, thread = threadIdx.x;
  const int index = int(blockIdx.x) * threads + thread;
  load_shared(smem, arguments + 16 * threads * int(blockIdx.x), 16 * threads);
  uint32_t bits[4], reciprocal[4], logarithm[4];
  load_registers(bits, smem, thread);
  for (int i = 0; i < 4; ++i) {
    reciprocal[i] = as_bits(rcp_approx_ftz(as_float(bits[i])));
    logarithm[i] = as_bits(lg2_approx_ftz(as_float(bits[i])));
  }
  store_registers(reciprocals, reciprocal, index);
  store_registers(logarithms, logarithm, index);
}

// Every thread of every block adds `step` to counter (thread mod 4) and stores what it found to found[its number]; then
// adds its own thread number to sums: element thread mod 8, pair thread mod 4, quadruple thread mod 2.
__global__ void atomics_kernel(uint32_t* counters, uint32_t step, float* found, float* sums) {
  const int thread = threadIdx.x;
  const int number = int(blockIdx.x) * int(blockDim.x) + thread;
  const uint32_t before = atomic_add_global_u32(counters + thread % 4, step);
  st_global_f32(found + number, float(before));
  const float value = float(thread);
  red_add_f32(sums + thread % 8, value);
  red_add_v2_f32(sums + 8 + 2 * (thread % 4), value, value + 1);
  red_add_v4_f32(sums + 16 + 4 * (thread % 2), value, value + 1, value + 2, value + 3);
}

}  // namespace

// background, out: `bytes`; rows: uint32 (32, 4), column 0 used; registers: uint32 (32, 4).
extern "C" int probe_stmatrix(const void* background, const void* rows, const void* registers, uint32_t* out,
                              int bytes, int trans) {
  auto kernel = trans ? stmatrix_kernel<true> : stmatrix_kernel<false>;
  return run(kernel, 1, 32, bytes + 2 * kRegisterTable, background, bytes, rows, registers, out);
}

// registers: uint32 (32, 4); masks: uint32 (32, 4), entry (block, 0) used; out: (count, 32, 4); any: (count, 4).
extern "C" int probe_words(const void* registers, const void* masks, uint32_t* out, uint32_t* any, int count) {
  return run(words_kernel, count, 32, 3 * kRegisterTable, registers, masks, out, any);
}

// arguments, reciprocals, logarithms: float32 (128 * blocks, 4).
extern "C" int probe_reciprocals(const char* arguments, uint32_t* reciprocals, uint32_t* logarithms, int blocks) {
  return run(reciprocals_kernel, blocks, 128, 16 * 128, arguments, reciprocals, logarithms);
}

// counters: uint32 (4,); found: float32 (64 * blocks,); sums: float32 (24,).
extern "C" int probe_atomics(uint32_t* counters, float* found, float* sums, int step, int blocks) {
  return run(atomics_kernel, blocks, 64, 1024, counters, uint32_t(step), found, sums);
}
