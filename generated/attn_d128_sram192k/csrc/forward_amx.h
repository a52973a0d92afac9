// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// amx bf16: Br=128 Bc=96, 161792 bytes of fast memory (Q panels 32768, O panels 65536, row statistics 2048, S panel 12288, K block 24576, V block 24576)
// amx fp16: Br=96 Bc=64, 181376 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 8192, P panel 8192, K block 32768, V block 32768)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 a0ede81b801975e5
//
// forward_amx.h: what the AMX kernels share: tile instructions, transposes, 2^t, the running sums of a panel.
//
// A panel is 32 query rows, and everything is held transposed: a vector lane is a query row, so the row
// statistics are plain vectors.
//   S^T[key][row] = K Q^T     A: 16 keys x 32 dims of K;      B: Q^T, two dims per 32-bit word
//   O^T[col][row] += V^T P^T  A: 16 columns x 32 keys of V^T; B: P^T, two keys per word
// The reference m that weights 2^(s - m) are taken against is a whole number in log2 units: floor of the row maximum
// when it was set, and left there until the weights of a tile of keys sum to more than 4 Bc in some row. So most tiles
// need no maximum, and every rescale of l and O is by a power of two: exact, whenever it happens.
//
// Everything is in an unnamed namespace and uses no standard template: a weak symbol compiled for AVX-512
// must never be handed to code that runs on a machine without it.
#pragma once

// The intrinsics of GCC 12 start from an undefined vector on purpose, and then warn about it (GCC PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <errno.h>
#include <immintrin.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "forward.h"

#define ALWAYS_INLINE [[gnu::always_inline]] inline

namespace {

constexpr int kD = 128;        // width of a query or key row
constexpr int kDv = 128;       // width of a value row
constexpr int kDTiles = 4;     // tiles of 32 dims
constexpr int kVTiles = 8;     // tiles of 16 columns, an even number

constexpr float kInf = __builtin_inff();

ALWAYS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- Tile instructions. Own wrappers: the _tile_loadd of GCC 12 declares no memory input, so a store of P could
// sink below it. Intel SDM volume 2, TILELOADD, TILESTORED, TDPBF16PS.

template <int T>
ALWAYS_INLINE void tile_load(const void* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}

template <int T>
ALWAYS_INLINE void tile_store(void* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t(64)), "i"(T) : "memory");
}

template <int T>
ALWAYS_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// C += A B, A 16 x 32 and B 32 x 16 in bf16, C in float32.
template <int C, int A, int B>
ALWAYS_INLINE void tile_dp_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// All eight tiles: 16 rows of 64 bytes. The state belongs to the thread.
inline void configure_tiles() {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { asm volatile("tilerelease" ::); }

// ---- Vectors of 16 floats.

ALWAYS_INLINE __mmask16 first_lanes(int count) { return count <= 0 ? 0 : count >= 16 ? 0xffff : (1 << count) - 1; }

// Transposes 16 x 16 words of 32 bits.
ALWAYS_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: column c of each 4 x 4 block
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even_top = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);
    const __m512i odd_top = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd);
    const __m512i even_low = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even_top, even_low, 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(odd_top, odd_low, 0x88);
    t[c + 8] = _mm512_shuffle_i32x4(even_top, even_low, 0xdd);
    t[c + 12] = _mm512_shuffle_i32x4(odd_top, odd_low, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 2^t: a polynomial of degree 4 in t - floor(t), times 2^floor(t); scalef takes the floor of its exponent itself.
// Relative error below 3.0e-6 (every float32 in (-1, 1) tried); 2^0 = 1, 2^-inf = 0, NaN for NaN.
ALWAYS_INLINE __m512 exp2_degree4(__m512 t) {
  const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0x1.b7f730p-7f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.abf868p-5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ee2450p-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62d6c6p-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, t);
}

// 2^t: a polynomial of degree 5 in t - floor(t), times 2^floor(t); scalef takes the floor of its exponent itself.
// Relative error below 1.9e-7 (every float32 in (-1, 1) tried); 2^0 = 1, 2^-inf = 0, NaN for NaN.
ALWAYS_INLINE __m512 exp2_degree5(__m512 t) {
  const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0x1.e974fap-10f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.277856p-7f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.c91ce6p-5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ebdb56p-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62e4bap-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, t);
}

// (m + m_low) ln 2 + ln l for whole m: l = 2^e f with f in [0.75, 1.5), ln f = 2 artanh(s) with s = (f - 1) / (f + 1)
// up to the term in s^9 (|s| <= 0.2: 9e-9 relative).
inline __m512 log_sum(__m512 m, __m512 m_low, __m512 l) {
  const __m512 f = _mm512_getmant_ps(l, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __m512 e = _mm512_sub_ps(_mm512_getexp_ps(l), _mm512_getexp_ps(f));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 s = _mm512_div_ps(_mm512_sub_ps(f, one), _mm512_add_ps(f, one));
  const __m512 s2 = _mm512_mul_ps(s, s);
  __m512 p = _mm512_set1_ps(2.0f / 9.0f);
  p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(2.0f / 7.0f));
  p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(2.0f / 5.0f));
  p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(2.0f / 3.0f));
  p = _mm512_fmadd_ps(p, s2, _mm512_set1_ps(2.0f));
  const __m512 ln2 = _mm512_set1_ps(0x1.62e43p-1f), ln2_low = _mm512_set1_ps(-0x1.05c61p-29f);
  const __m512 more = _mm512_add_ps(m_low, e), exponent = _mm512_add_ps(m, more);
  const __m512 lost = _mm512_sub_ps(more, _mm512_sub_ps(exponent, m));  // 0 for |m| < 2^24
  const __m512 low = _mm512_fmadd_ps(exponent, ln2_low, _mm512_fmadd_ps(p, s, _mm512_mul_ps(lost, ln2)));
  return _mm512_fmadd_ps(exponent, ln2, low);
}

// ---- The running state of a panel.

using ScoreTile = float[16][16];  // [key][row]; of O^T [column][row]

struct alignas(64) State {
  ScoreTile o[kVTiles][2];      // O^T before division by the row sum: [column tile][row half]
  float m[32];                  // reference of each row in log2 units, a whole number; -inf: no key seen
  float m_low[32];              // what m lacks to it where that has more than 24 bits, else 0
  float l[32];                  // sum of 2^(s - m)
};

inline void clear(State& state) {
  memset(&state, 0, sizeof state);
  for (int r = 0; r < 32; r += 16) _mm512_store_ps(state.m + r, _mm512_set1_ps(-kInf));
}

// Sets S to -inf where a key is absent: key j of the block when j >= keys, or when j > diagonal + row.
inline void hide(ScoreTile (*s)[2], int full, int keys, int diagonal) {
  for (int j = full; j < (keys + 31) / 32 * 32; ++j)
    for (int h = 0; h < 2; ++h) {
      const __mmask16 blind = first_lanes(j >= keys ? 16 : j - diagonal - 16 * h);  // rows that do not see key j
      _mm512_mask_store_ps(s[j / 16][h][j % 16], blind, _mm512_set1_ps(-kInf));
    }
}

// Whether a row has no reference yet: none of its keys was visible, or all its scores were -inf or NaN.
ALWAYS_INLINE bool lacks_reference(const State& state) {
  const __m512 none = _mm512_set1_ps(-kInf);
  return _mm512_cmpeq_ps_mask(_mm512_load_ps(state.m), none) | _mm512_cmpeq_ps_mask(_mm512_load_ps(state.m + 16), none);
}

// The reference as the exponent needs it: 0 for a row that has seen no key, so that its -inf scores give weight 0.
ALWAYS_INLINE __m512 reference(const State& state, int h) {
  const __m512 m = _mm512_load_ps(state.m + 16 * h);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(m, _mm512_set1_ps(-kInf), _CMP_NEQ_UQ), m);
}

// Moves the reference of each row up to floor(maximum of the block), and rescales what was summed by
// alpha = 2^(old - new). max drops NaN: a row with one keeps a usable reference and gets its NaN from 2^t.
inline void raise_reference(State& state, const ScoreTile (*s)[2], int chunks, __m512 c, __m512 (&alpha)[2]) {
  for (int h = 0; h < 2; ++h) {
    __m512 top = _mm512_set1_ps(-kInf);
    for (int j = 0; j < 32 * chunks; ++j) top = _mm512_max_ps(_mm512_load_ps(s[j / 16][h][j % 16]), top);
    // floor(top c) without error, as m + low: m = fl(top c) alone is off by 2^(e - 24) where top c is about 2^e.
    const __m512 near = _mm512_floor_ps(_mm512_mul_ps(top, c));
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(near), _mm512_set1_ps(kInf), _CMP_LT_OQ);
    const __m512 rest = _mm512_maskz_mov_ps(finite, _mm512_floor_ps(_mm512_fmsub_ps(top, c, near)));
    __m512 m = _mm512_add_ps(near, rest);
    __m512 low = _mm512_maskz_sub_ps(finite, rest, _mm512_sub_ps(m, near));

    const __m512 old = _mm512_load_ps(state.m + 16 * h), old_low = _mm512_load_ps(state.m_low + 16 * h);
    const __mmask16 above = _mm512_cmp_ps_mask(m, old, _CMP_GT_OQ) |
                            _mm512_mask_cmp_ps_mask(_mm512_cmpeq_ps_mask(m, old), low, old_low, _CMP_GT_OQ);
    m = _mm512_mask_mov_ps(old, above, m);
    low = _mm512_mask_mov_ps(old_low, above, low);
    _mm512_store_ps(state.m + 16 * h, m);
    _mm512_store_ps(state.m_low + 16 * h, low);
    const __m512 down = _mm512_add_ps(_mm512_sub_ps(old, reference(state, h)), _mm512_sub_ps(old_low, low));
    alpha[h] = _mm512_scalef_ps(_mm512_set1_ps(1.0f), down);
    _mm512_store_ps(state.l + 16 * h, _mm512_mul_ps(_mm512_load_ps(state.l + 16 * h), alpha[h]));
    for (int v = 0; v < kVTiles; ++v)
      for (int i = 0; i < 16; ++i) {
        float* o = state.o[v][h][i];
        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), alpha[h]));
      }
  }
}

// Whether a reference needs its m_low, |m| >= 2^24.
ALWAYS_INLINE bool has_long_reference(const State& state) {
  const __m512 zero = _mm512_setzero_ps();
  return _mm512_cmpneq_ps_mask(_mm512_load_ps(state.m_low), zero) |
         _mm512_cmpneq_ps_mask(_mm512_load_ps(state.m_low + 16), zero);
}

// Rows that saw no key: l = 0 and no reference yet. A NaN in l stays; so does a row whose scores overflowed, m = inf.
ALWAYS_INLINE __mmask16 empty(const State& state, int h) {
  const __mmask16 no_sum = _mm512_cmp_ps_mask(_mm512_load_ps(state.l + 16 * h), _mm512_setzero_ps(), _CMP_EQ_OQ);
  return no_sum & _mm512_cmpeq_ps_mask(_mm512_load_ps(state.m + 16 * h), _mm512_set1_ps(-kInf));
}

// 1 / sum, and 0 where no key was visible.
ALWAYS_INLINE __m512 inverse(const State& state, int h, const float* sum) {
  return _mm512_maskz_div_ps(~empty(state, h), _mm512_set1_ps(1.0f), _mm512_load_ps(sum));
}

// LSE of the panel's first `count` rows.
inline void store_lse(const State& state, float* lse, int count) {
  for (int h = 0; h < 2; ++h) {
    const __m512 value = log_sum(_mm512_load_ps(state.m + 16 * h), _mm512_load_ps(state.m_low + 16 * h),
                                 _mm512_load_ps(state.l + 16 * h));
    _mm512_mask_storeu_ps(lse + 16 * h, first_lanes(count - 16 * h),
                          _mm512_mask_mov_ps(value, empty(state, h), _mm512_set1_ps(-kInf)));
  }
}

// ---- What a call asks for.

ALWAYS_INLINE int64_t key_length(const ForwardArgs& a, int64_t b) { return a.key_lengths ? a.key_lengths[b] : a.Nk; }

// Row i sees the keys j <= i + causal_offset.
ALWAYS_INLINE int64_t causal_offset(const ForwardArgs& a) { return a.causal == kBottomRight ? a.Nk - a.Nq : 0; }

}  // namespace
