// hopper_softmax.cuh: online softmax over the accumulator of m64n64k16, two rows a thread.
//
// Lane 4 g + t of warp w holds in s[4 j + 2 h + e] the score of row 16 w + g + 8 h, column 8 j + 2 t + e.
// Source: Milakov and Gimelshein (arXiv:1805.02867); FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
#ifndef HOPPER_SOFTMAX_CUH
#define HOPPER_SOFTMAX_CUH
#include "hopper_tiles.cuh"

namespace hopper {

constexpr float kNegInf = -INFINITY;
constexpr float kLn2 = 0.693147180559945f;
constexpr float kLog2e = 1.44269504088896f;

struct Softmax {
  float m[2] = {kNegInf, kNegInf};  // row maxima of the scores seen
  float l[2] = {0.f, 0.f};          // this thread's part of the row sums

  // Turns scores into weights exp2((s - m) * scale_log2); alpha is what older outputs are to be scaled by.
  __device__ __forceinline__ void weigh(float (&s)[32], float (&alpha)[2], float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = m[h];
#pragma unroll
      for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      largest = fmaxf(largest, shfl_xor(largest, 1));
      largest = fmaxf(largest, shfl_xor(largest, 2));
      const float base = largest == kNegInf ? 0.f : largest * scale_log2;  // (-inf) - (-inf) would be NaN
      alpha[h] = ex2_approx_ftz(m[h] * scale_log2 - base);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * h + e];
          x = ex2_approx_ftz(x * scale_log2 - base);
          sum += x;
        }
      }
      l[h] = l[h] * alpha[h] + sum;
      m[h] = largest;
    }
  }

  // Completes the row sums over the quad and writes the log-sum-exp; leaves 1 / l in `inverse` (0 for an empty row).
  __device__ __forceinline__ void finish(float (&inverse)[2], float* lse, int row, int rows, float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l[h] += shfl_xor(l[h], 1);
      l[h] += shfl_xor(l[h], 2);
      inverse[h] = l[h] == 0.f ? 0.f : 1.f / l[h];
      if (threadIdx.x % 4 == 0 && row + 8 * h < rows) {
        st_global_f32(lse + row + 8 * h, l[h] == 0.f ? kNegInf : m[h] * scale_log2 * kLn2 + logf(l[h]));
      }
    }
  }
};

// Sets the scores to -inf that lie outside: columns from `columns` on, and with kCausal those right of the diagonal
// column = row + shift. `row` and `column` are the thread's first.
template <bool kCausal>
__device__ __forceinline__ void mask(float (&s)[32], int row, int column, int columns, int shift) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int x = column + 8 * (i / 4) + i % 2, y = row + 8 * (i / 2 % 2);
    if (x >= columns || (kCausal && x > y + shift)) s[i] = kNegInf;
  }
}

// Rescales an accumulator of any width to a new row maximum.
template <int kOutputs>
__device__ __forceinline__ void rescale(float (&o)[kOutputs], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] *= alpha[i / 2 % 2];
}

// The weights as A operands of four k16 steps.
__device__ __forceinline__ void pack(uint32_t (&a)[4][4], const float (&s)[32]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = cvt_rn_bf16x2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
}

// Number of K/V tiles of `bc` columns that the rows [row0, row0 + rows) see; at least 1, which may be masked whole.
template <bool kCausal>
__device__ __forceinline__ int tile_count(int row0, int rows, int nq, int nk, int bc) {
  int columns = nk;
  if (kCausal) {
    const int last = row0 + rows + nk - nq;
    columns = last < 0 ? 0 : last < nk ? last : nk;
  }
  return columns > bc ? (columns + bc - 1) / bc : 1;
}

}  // namespace hopper
#endif  // HOPPER_SOFTMAX_CUH
