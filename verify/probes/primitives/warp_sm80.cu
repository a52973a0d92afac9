// warp_sm80.cu: probes of the warp's collectives and arithmetic: ldmatrix, mma, shfl, redux, cvt, ex2.
//
// Each launcher takes device pointers and sizes and returns a cudaError_t. Inputs and expected outputs:
// verify/conformance/warp.py.
#include "ptx_sm80.cuh"

#include <cstring>

#include "probe.cuh"

namespace {

constexpr int kRegisterTable = 32 * 16;  // bytes: four registers for each lane

// out[lane] = the four registers of ldmatrix; rows[lane] = byte offset of the row that the lane names.
template <bool kTrans>
__global__ void ldmatrix_kernel(const void* image, int bytes, const void* rows, uint32_t* out) {
  const uint32_t smem = dynamic_smem();
  const int lane = threadIdx.x;
  load_shared(smem, image, bytes);
  load_shared(smem + bytes, rows, kRegisterTable);
  uint32_t row[4], r[4];
  load_registers(row, smem + bytes, lane);
  if constexpr (kTrans) {
    ldmatrix_x4_trans(r, smem + row[0]);
  } else {
    ldmatrix_x4(r, smem + row[0]);
  }
  store_registers(out, r, lane);
}

// One product per block: tables of registers a (4 per lane), b (2 of 4 used) and c (4, float32) in, d out.
template <bool kBFloat>
__global__ void mma_kernel(const char* a, const char* b, const char* c, uint32_t* d) {
  const uint32_t smem = dynamic_smem();
  const int lane = threadIdx.x, block = blockIdx.x;
  load_shared(smem, a + block * kRegisterTable, kRegisterTable);
  load_shared(smem + kRegisterTable, b + block * kRegisterTable, kRegisterTable);
  load_shared(smem + 2 * kRegisterTable, c + block * kRegisterTable, kRegisterTable);
  uint32_t left[4], right[4], bits[4];
  load_registers(left, smem, lane);
  load_registers(right, smem + kRegisterTable, lane);
  load_registers(bits, smem + 2 * kRegisterTable, lane);
  float sum[4] = {as_float(bits[0]), as_float(bits[1]), as_float(bits[2]), as_float(bits[3])};
  if constexpr (kBFloat) {
    mma_m16n8k16_bf16(sum, left, right[0], right[1]);
  } else {
    mma_m16n8k16_f16(sum, left, right[0], right[1]);
  }
  const uint32_t result[4] = {as_bits(sum[0]), as_bits(sum[1]), as_bits(sum[2]), as_bits(sum[3])};
  store_registers(d + block * 32 * 4, result, lane);
}

// out[block][lane] = value of lane ^ masks[block] in column 0, the largest of column 1 over the warp in column 1.
__global__ void exchange_kernel(const void* values, const void* masks, uint32_t* out) {
  const uint32_t smem = dynamic_smem();
  const int lane = threadIdx.x, block = blockIdx.x;
  load_shared(smem, values, kRegisterTable);
  load_shared(smem + kRegisterTable, masks, kRegisterTable);
  uint32_t value[4], mask[4];
  load_registers(value, smem, lane);
  load_registers(mask, smem + kRegisterTable, block);
  const uint32_t exchanged = as_bits(shfl_xor(as_float(value[0]), int(mask[0])));
  const uint32_t largest = uint32_t(redux_max_s32(int(value[1])));
  const uint32_t result[4] = {exchanged, largest, ctaid_x(), 0};
  store_registers(out + block * 32 * 4, result, lane);
}

// Four arguments in, per thread: ex2 of each to `powers`; the pairs as bf16x2 and f16x2 to `pairs`.
__global__ void arithmetic_kernel(const char* arguments, uint32_t* powers, uint32_t* pairs) {
  const uint32_t smem = dynamic_smem();
  const int threads = blockDim.x, thread = threadIdx.x;
  const int index = int(blockIdx.x) * threads + thread;
  load_shared(smem, arguments + 16 * threads * int(blockIdx.x), 16 * threads);
  uint32_t bits[4];
  load_registers(bits, smem, thread);
  const float x[4] = {as_float(bits[0]), as_float(bits[1]), as_float(bits[2]), as_float(bits[3])};
  const uint32_t power[4] = {as_bits(ex2_approx_ftz(x[0])), as_bits(ex2_approx_ftz(x[1])),
                             as_bits(ex2_approx_ftz(x[2])), as_bits(ex2_approx_ftz(x[3]))};
  const uint32_t pair[4] = {cvt_rn_bf16x2(x[0], x[1]), cvt_rn_bf16x2(x[2], x[3]), cvt_rn_f16x2(x[0], x[1]),
                            cvt_rn_f16x2(x[2], x[3])};
  store_registers(powers, power, index);
  store_registers(pairs, pair, index);
}

}  // namespace

// image: `bytes` (a multiple of 16); rows: uint32 (32, 4), column 0 used; out: uint32 (32, 4).
extern "C" int probe_ldmatrix(const void* image, const void* rows, uint32_t* out, int bytes, int trans) {
  auto kernel = trans ? ldmatrix_kernel<true> : ldmatrix_kernel<false>;
  return run(kernel, 1, 32, bytes + kRegisterTable, image, bytes, rows, out);
}

// a, b, c, d: uint32 (count, 32, 4).
extern "C" int probe_mma(const char* a, const char* b, const char* c, uint32_t* d, int count, int bfloat) {
  auto kernel = bfloat ? mma_kernel<true> : mma_kernel<false>;
  return run(kernel, count, 32, 3 * kRegisterTable, a, b, c, d);
}

// values: uint32 (32, 4); masks: uint32 (32, 4), entry (block, 0) used; out: uint32 (count, 32, 4).
extern "C" int probe_exchange(const void* values, const void* masks, uint32_t* out, int count) {
  return run(exchange_kernel, count, 32, 2 * kRegisterTable, values, masks, out);
}

// arguments, powers, pairs: (128 * blocks, 4) float32, float32 bits, uint32.
extern "C" int probe_arithmetic(const char* arguments, uint32_t* powers, uint32_t* pairs, int blocks) {
  return run(arithmetic_kernel, blocks, 128, 128 * 16, arguments, powers, pairs);
}
