// softmax_sm90a.cuh: the online softmax on wgmma accumulators.
//
// s[i] of a lane belongs to its row h = i / 2 % 2 and to key 8 (i / 4) + i % 2 after its first one; the four lanes of a
// quad share the two rows. Scores stay raw, and exp is taken in base 2: p = exp2(c s - c m), c = scale log2(e).
//
// Holds after every key tile: m is the largest raw score of the keys seen (with kLazy at most 8 / c below it), -inf if
// there was none; it never decreases. A NaN score makes l NaN although the maximum may drop it.
#pragma once
#include <cstdint>

#include "ptx_sm90a.cuh"

namespace {

using Rows = float[2];  // one number per row of this lane
constexpr float kNegInf = -__builtin_huge_valf();

// Keys from left[h] on, counted from this lane's first key, do not exist for row h.
template <int kCount>
__device__ __forceinline__ void mask(float (&s)[kCount], const int (&left)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i / 4 * 8 + i % 2 >= left[i / 2 % 2]) s[i] = kNegInf;
}

// Takes a row over to the maximum of m and its new scores, `top`: alpha is what l and O must still be multiplied by,
// `shift_log2` what is subtracted in the exponents. kMayBeEmpty: `top` may be -inf, the row has then seen no key.
template <bool kLazy, bool kMayBeEmpty>
__device__ __forceinline__ void move_to(float top, float& m, float& alpha, float& shift_log2, float scale_log2) {
  if (kLazy && !((top - m) * scale_log2 > 8.f)) top = m;  // p <= 2^8 is harmless, and alpha stays 1
  const float shift = kMayBeEmpty && top == kNegInf ? 0.f : top;  // (-inf) - (-inf) would be NaN, without a mask too
  alpha = ex2_approx_ftz((m - shift) * scale_log2);
  shift_log2 = shift * scale_log2;
  m = top;
}

// Takes m over to the maximum of m and the scores of each row, over the four lanes that share it. It is taken on the
// bits as integers, two new scores per instruction: right if it comes out >= 0, and NaN if a score is a NaN of positive
// sign. If it is negative in any lane, the warp takes the maximum of floats. Only there can it be -inf.
template <bool kLazy, int kCount>
__device__ __forceinline__ void take_max(const float (&s)[kCount], Rows& m, Rows& alpha, Rows& shift_log2,
                                         float scale_log2) {
  int32_t top[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h][0] = max3_s32(float_as_s32(m[h]), float_as_s32(s[2 * h]), float_as_s32(s[2 * h + 4]));
    top[h][1] = max(float_as_s32(s[2 * h + 1]), float_as_s32(s[2 * h + 5]));
  }
#pragma unroll
  for (int i = 8; i < kCount; i += 8)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        top[h][e] = max3_s32(top[h][e], float_as_s32(s[i + 2 * h + e]), float_as_s32(s[i + 4 + 2 * h + e]));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h][0] = max(top[h][0], top[h][1]);
    top[h][0] = max(top[h][0], static_cast<int32_t>(shfl_xor_b32(top[h][0], 1)));
    top[h][0] = max(top[h][0], static_cast<int32_t>(shfl_xor_b32(top[h][0], 2)));
  }
  if (vote_any((top[0][0] | top[1][0]) < 0)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = m[h];
#pragma unroll
      for (int i = 0; i < kCount; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      most = fmaxf(most, shfl_xor(most, 1));
      most = fmaxf(most, shfl_xor(most, 2));
      move_to<kLazy, true>(most, m[h], alpha[h], shift_log2[h], scale_log2);
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      move_to<kLazy, false>(s32_as_float(top[h][0]), m[h], alpha[h], shift_log2[h], scale_log2);
  }
}

// Takes m and l over to the new maximum and turns S into P. alpha is what O must still be multiplied by. l sums P
// before it is rounded to 16 bits, a partial sum in each of the four lanes of a row; they are added after the last tile.
template <bool kLazy, int kCount>
__device__ __forceinline__ void softmax(float (&s)[kCount], Rows& m, Rows& l, Rows& alpha, float scale_log2) {
  Rows shift_log2, sum = {0.f, 0.f};
  take_max<kLazy>(s, m, alpha, shift_log2, scale_log2);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int h = i / 2 % 2;
    s[i] = ex2_approx_ftz(fmaf(s[i], scale_log2, -shift_log2[h]));
    sum[h] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) l[h] = fmaf(l[h], alpha[h], sum[h]);
}

// Takes O over to the new maximum.
template <bool kLazy, int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], const Rows& alpha) {
  if (kLazy && !vote_any(alpha[0] != 1.f || alpha[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= alpha[i / 2 % 2];
}

}  // namespace
