// Tiles in shared memory, products of them, and their way to and from memory, for backward_sm80.cu.
//
// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// sm80 bf16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// sm80 fp16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 ba7ffc233c2783a2
//
// A tile is panels of 64, 32 or 16 columns, row by row, the 16-byte chunks of a row permuted so that the 8 rows of an
// ldmatrix matrix, and the 8 lanes of one phase of a store, fall into 8 different groups of 4 banks.
#pragma once
#include "ptx_sm80.cuh"

namespace {

struct BFloat16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_bf16(d, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return cvt_rn_bf16x2(low, high); }
  // The number whose 16 bits these are.
  static __device__ __forceinline__ float widen(uint32_t bits) { return s32_as_float(int32_t(bits << 16)); }
};

struct Float16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_f16(d, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return cvt_rn_f16x2(low, high); }
  // The number whose 16 bits these are.
  static __device__ __forceinline__ float widen(uint32_t bits) {
    const float x = s32_as_float(int32_t((bits & 0x7fff) << 13)) * 0x1p112f;  // exponents start at -15
    const float magnitude = x < 0x1p16f ? x : x == 0x1p16f ? __builtin_huge_valf() : __builtin_nanf("");
    return bits & 0x8000 ? -magnitude : magnitude;
  }
};

template <int kRows, int kPanel>
constexpr uint32_t kPanelBytes = 2 * kRows * kPanel;

template <int kPanel>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  constexpr uint32_t kChunks = kPanel / 8, kRowsPerLine = 8 / kChunks;  // a line is 128 bytes, all 32 banks
  return 2 * kPanel * row + ((chunk ^ (row / kRowsPerLine % kChunks)) << 4);
}

// A tile at address `at`, and the operands of mma that it holds, each a 16 x 16 block for ldmatrix.x4. Matrix q of a
// block covers its rows 8 * (q % 2).. and columns 8 * (q / 2).., or the other way round, as the operand's registers are
// ordered. A step to the next 16 columns of a panel flips address bits that only the chunk occupies, hence the xor.
template <int kRows, int kPanel>
struct Tile {
  uint32_t address, rows_first, rows_last;  // of the tile; what this lane adds for a block

  __device__ __forceinline__ explicit Tile(uint32_t tile) : address(tile) {
    const uint32_t row = threadIdx.x % 8, q0 = threadIdx.x / 8 % 2, q1 = threadIdx.x / 16 % 2;
    rows_first = swizzled<kPanel>(row + 8 * q0, q1), rows_last = swizzled<kPanel>(row + 8 * q1, q0);
  }
  __device__ __forceinline__ uint32_t block(uint32_t lane, int r, int c) const {  // r and c count in 16s
    constexpr int kBlocks = kPanel / 16;
    return address + c / kBlocks * kPanelBytes<kRows, kPanel> + 32 * kPanel * r + (lane ^ (32 * (c % kBlocks)));
  }
  // The tile is A (rows i, k16 step k), B^T (16 columns n of B), A^T or B.
  __device__ __forceinline__ void a(uint32_t (&r)[4], int i, int k) const { ldmatrix_x4(r, block(rows_first, i, k)); }
  __device__ __forceinline__ void bt(uint32_t (&r)[4], int n, int k) const { ldmatrix_x4(r, block(rows_last, n, k)); }
  __device__ __forceinline__ void at(uint32_t (&r)[4], int i, int k) const {
    ldmatrix_x4_trans(r, block(rows_last, k, i));
  }
  __device__ __forceinline__ void b(uint32_t (&r)[4], int n, int k) const {
    ldmatrix_x4_trans(r, block(rows_first, k, n));
  }
};

// Starts the copy of a (kRows, kCols) tile whose rows are `row_bytes` apart in memory. Rows outside first <= row < end
// and columns from kCols on become zero and are not read: whatever lies there must not meet a weight of 0.
template <int kThreads, int kRows, int kCols, int kPanel>
__device__ __forceinline__ void load_tile(uint32_t tile, const char* src, int64_t row_bytes, int first, int end) {
  constexpr int kLanes = kPanel / 8, kRowStep = kThreads / kLanes;  // 16 bytes per thread
  const int row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
  src += row * row_bytes + 16 * chunk;
#pragma unroll 8  // all passes but for blocks of few warps
  for (int r = 0; r < kRows; r += kRowStep, src += kRowStep * row_bytes) {
    if (kRows % kRowStep != 0 && row + r >= kRows) break;
    const uint32_t dst = tile + swizzled<kPanel>(row + r, chunk);
#pragma unroll
    for (int c = 0; c < kCols; c += kPanel) {
      const bool exists = first <= row + r && row + r < end && (kCols % 16 == 0 || c + 8 * chunk < kCols);
      cp_async_16_zfill(dst + c / kPanel * kPanelBytes<kRows, kPanel>, src + 2 * c, exists ? 16 : 0);
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][n][e] = 0.f;
}

// C += A B over kSteps k16 steps: a(r, i, k) fetches the operand of m16 tile i, b(r, n, k) that of 16 columns, of which
// there are `columns` <= kN / 2. With more than kAtOnce steps unrolled, ptxas fetches so early that others spill.
template <typename Element, int kSteps, int kAtOnce = 4, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void multiply(float (&c)[kM][kN][4], int columns, A a, B b) {
#pragma unroll kAtOnce
  for (int k = 0; k < kSteps; ++k) {
    uint32_t left[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) a(left[i], i, k);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n)
      if (n < columns) {
        uint32_t right[4];
        b(right, n, k);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          Element::mma(c[i][2 * n], left[i], right[0], right[1]);
          Element::mma(c[i][2 * n + 1], left[i], right[2], right[3]);
        }
      }
  }
}

// Two n8 accumulators, rounded to 16 bits, are one k16 A operand: no data moves between lanes.
template <typename Element, int kM, int kN>
__device__ __forceinline__ void round_to(uint32_t (&r)[kM][kN][2], const float (&x)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) r[i][n][h] = Element::pack(x[i][n][2 * h], x[i][n][2 * h + 1]);
}

// The A operands that a warp has in its own registers, for a `multiply` that is all unrolled.
template <int kM, int kN>
__device__ __forceinline__ auto own(const uint32_t (&x)[kM][kN][2]) {
  return [&x](uint32_t (&r)[4], int i, int k) {
    r[0] = x[i][2 * k][0], r[1] = x[i][2 * k][1], r[2] = x[i][2 * k + 1][0], r[3] = x[i][2 * k + 1][1];
  };
}

// Writes rows 0 <= row < end of a gradient: x times `factor` where keep(row), else `fill`. This warp has m16 tiles from
// row `first` on and every kStep-th 16 columns from 16 * column on. The tile in shared memory is free for it.
template <typename Element, int kThreads, int kRows, int kCols, int kPanel, int kStep, int kM, int kN, typename Keep>
__device__ __forceinline__ void finish(char* out, int64_t row_bytes, uint32_t tile, const float (&x)[kM][kN][4],
                                       int first, int column, int end, float factor, float fill, Keep keep) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + 16 * i + 8 * h + g;
      const bool kept = keep(row);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int c = 16 * (column + kStep * (n / 2)) + 8 * (n % 2);
        const float low = kept ? x[i][n][2 * h] * factor : fill, high = kept ? x[i][n][2 * h + 1] * factor : fill;
        if (c < kCols)
          st_shared_b32(tile + c / kPanel * kPanelBytes<kRows, kPanel> + swizzled<kPanel>(row, c % kPanel / 8) + 4 * t,
                        Element::pack(low, high));
      }
    }
  __syncthreads();
  constexpr int kLanes = kPanel / 8;
  const int chunk = threadIdx.x % kLanes;
  for (int row = threadIdx.x / kLanes; row < end; row += kThreads / kLanes)
#pragma unroll
    for (int c = 0; c < kCols; c += kPanel)
      if (kCols % 16 == 0 || c + 8 * chunk < kCols) {
        uint32_t r[4];
        ld_shared_b128(r, tile + c / kPanel * kPanelBytes<kRows, kPanel> + swizzled<kPanel>(row, chunk));
        st_global_b128(out + row * row_bytes + 2 * c + 16 * chunk, r);
      }
}

}  // namespace
