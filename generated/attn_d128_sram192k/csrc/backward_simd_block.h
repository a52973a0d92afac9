// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// v4 float32: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 float32: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// baseline float32: Br=24 Bc=96, 178496 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9216, dS panels 9216, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// v4 float64: Br=24 Bc=24, 181824 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 4608, dS panels 4608, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 float64: Br=12 Bc=48, 169280 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 4608, dS panels 4608, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// baseline float64: Br=12 Bc=48, 169280 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 4608, dS panels 4608, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// amx bf16: Br=64 Bc=64, 188928 bytes of fast memory (Q panels 32768, dO panels 32768, dQ panels 32768, P panels 8192, dS panels 8192, S panel 8192, dP panel 8192, K block 32768, V block 16384, rows to pack 8192, row statistics 512)
// v4 bf16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 bf16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// baseline bf16: Br=24 Bc=104, 188224 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9984, dS panels 9984, Q rows 12288, dO rows 12288, K block 53248, V block 53248)
// v4 fp16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 fp16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// baseline fp16: Br=24 Bc=104, 188224 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9984, dS panels 9984, Q rows 12288, dO rows 12288, K block 53248, V block 53248)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 63d5b67e7a8cc65b
//
// One block of keys against one panel of query rows, backward: the body of FlashAttention-2's Algorithm 2
// (arXiv:2307.08691) without the sums over rows, which `backward_simd_sums.h` makes for all panels of a tile.
//
// As in the forward pass, everything is held transposed, so that a vector lane is a query row:
//     S^T[key][row]   = K Q^T        P^T  = exp(scale S^T - LSE)
//     dP^T[key][row]  = V dO^T       dS^T = P^T o (dP^T - D)
//     dQ^T[t][row]   += K^T dS^T     one element of K, V broadcast at a time, as they lie
// P and dS are selected to 0 where a row does not see a key, whatever the key, value and row hold.
#pragma once

#include <cstdint>

#include "backward_tasks.h"
#include "simd.h"

namespace {

constexpr int kD = 128;    // width of a query and of a key
constexpr int kDv = 128;  // width of a value

// 2^(s scale - shift): with FMA one rounding before that of the result. +inf where that is beyond the format, so that a
// LSE that does not belong to the scores is no quiet mistake; s = -inf or shift = inf give exactly 0; a NaN stays.
template <class Scalar, int kLanes>
ALWAYS_INLINE typename Simd<Scalar, kLanes>::Vector exp2_shifted(typename Simd<Scalar, kLanes>::Vector s, Scalar scale,
                                                                 typename Simd<Scalar, kLanes>::Vector shift) {
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  using Index = typename Simd<Scalar, kLanes>::Index;
  using E = Exponent<Scalar>;
  const Vector most = broadcast<Vector>(E::kRound + (3 - E::kLeast));  // n = 128 (1024): 2^n is infinite
  const Vector t = s * scale - shift;
  Vector n = t + E::kRound;
  n = n > most ? most : n;
  const Vector r = t - (n - E::kRound);
  const Vector power = (Vector)((Index)n << E::kFractionBits);
  return n < E::kRound + E::kLeast ? Vector{} : exp2_polynomial(r, Scalar()) * power;
}

// A panel has kRows = kVectors * kLanes rows. The accumulators, kVectors by kKeys in S^T and dP^T and kVectors by
// kColumns in dQ^T, fill the registers.
template <class Scalar_, int kLanes_, int kVectors, int kKeys, int kColumns>
struct BackwardBlock {
  using Scalar = Scalar_;
  static constexpr int kLanes = kLanes_;
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  using Index = typename Simd<Scalar, kLanes>::Index;
  using Integer = decltype(Index{}[0] + 0);
  using Element = typename Loose<Scalar>::Type;
  static constexpr int kRows = kVectors * kLanes;
  using Row = Scalar[kRows];
  static_assert(kD % kColumns == 0, "whole groups of columns");

  struct Panel {
    const Row* q;          // [kD]
    const Row* dout;       // [kDv]
    Row* dq;               // [kD] not yet times the scale
    const Scalar* shift;   // [kRows] LSE log2(e); +inf in a row without a visible key
    const Scalar* d;       // [kRows] D = rowsum(dO o O) - dLSE
    const Integer* limit;  // [kRows] keys that a row sees beyond those that all rows see
  };

  struct Keys {
    const Element *k, *v;
    int64_t k_pitch, v_pitch;  // elements from one key to the next
    int64_t count;             // keys that some row sees
    int64_t shared;            // the first so many are seen by all rows; at most `count`, maybe negative
    bool k_is_finite;
  };

  template <bool kMasked>
  static ALWAYS_INLINE Vector select(const Panel& panel, int64_t key, int n, Vector visible, Scalar hidden) {
    if constexpr (!kMasked) return visible;
    const Index sees = *(const Index*)&panel.limit[n * kLanes] > (Integer)key;
    return sees ? visible : broadcast<Vector>(hidden);
  }

  // kGroup rows of A times a panel: A B^T, one chain over kWidth per element.
  template <int kWidth, int kGroup>
  static ALWAYS_INLINE void product(const Element* a, int64_t pitch, const Row* b, Vector (&acc)[kGroup][kVectors]) {
#pragma GCC unroll 2
    for (int t = 0; t < kWidth; t++) {
      Vector column[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) column[n] = *(const Vector*)&b[t][n * kLanes];
#pragma GCC unroll 16
      for (int g = 0; g < kGroup; g++) {
        const Vector element = broadcast<Vector>((Scalar)a[g * pitch + t]);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) acc[g][n] += column[n] * element;
      }
    }
  }

  struct Scores {  // S^T into p
    template <int kGroup, bool kMasked>
    static ALWAYS_INLINE void group(const Panel& panel, const Keys& keys, int64_t j, Row* p, Row*) {
      Vector acc[kGroup][kVectors] = {};
      product<kD, kGroup>(keys.k + j * keys.k_pitch, keys.k_pitch, panel.q, acc);
#pragma GCC unroll 16
      for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) {
          const Scalar hidden = -(Scalar)__builtin_inf();
          *(Vector*)&p[j + g][n * kLanes] = select<kMasked>(panel, j + g - keys.shared, n, acc[g][n], hidden);
        }
      }
    }
  };

  struct ScoreGradients {  // dS^T into ds, from P^T in p
    template <int kGroup, bool kMasked>
    static ALWAYS_INLINE void group(const Panel& panel, const Keys& keys, int64_t j, Row* p, Row* ds) {
      Vector acc[kGroup][kVectors] = {};
      product<kDv, kGroup>(keys.v + j * keys.v_pitch, keys.v_pitch, panel.dout, acc);
#pragma GCC unroll 16
      for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) {
          const Vector away = acc[g][n] - *(const Vector*)&panel.d[n * kLanes];
          const Vector gradient = *(const Vector*)&p[j + g][n * kLanes] * away;
          *(Vector*)&ds[j + g][n * kLanes] = select<kMasked>(panel, j + g - keys.shared, n, gradient, 0);
        }
      }
    }
  };

  template <class Step>
  static ALWAYS_INLINE void for_groups(const Panel& panel, const Keys& keys, Row* p, Row* ds) {
    if (keys.count >= kKeys) {
      int64_t j = 0;
      for (; j + kKeys <= keys.shared; j += kKeys) Step::template group<kKeys, false>(panel, keys, j, p, ds);
      // The last group may overlap the one before it: the same values are computed again.
      for (; j < keys.count; j += kKeys) {
        const int64_t last = keys.count - kKeys;
        Step::template group<kKeys, true>(panel, keys, j < last ? j : last, p, ds);
      }
    } else {
      for (int64_t j = 0; j < keys.count; j++) Step::template group<1, true>(panel, keys, j, p, ds);
    }
  }

  // dQ^T += K^T dS^T for kColumns columns. The block is summed on its own, so that rounding errors grow with the size
  // of a block plus the number of blocks. An infinite k gives its row a NaN, or a score of -inf: an absent pair. Then
  // dS = 0, and the product must be 0 as well.
  template <bool kFinite>
  static ALWAYS_INLINE void add_to_dq(const Keys& keys, int column, const Row* ds, Row* dq) {
    const Element* k = keys.k + column;
    Vector acc[kColumns][kVectors] = {};
#pragma GCC unroll 2
    for (int64_t j = 0; j < keys.count; j++) {
      Vector gradient[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) gradient[n] = *(const Vector*)&ds[j][n * kLanes];
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; c++) {
        Scalar scalar = k[j * keys.k_pitch + c];
        if constexpr (!kFinite) scalar = scalar - scalar == 0 ? scalar : 0;
        const Vector element = broadcast<Vector>(scalar);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) acc[c][n] += gradient[n] * element;
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; c++) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) *(Vector*)&dq[column + c][n * kLanes] += acc[c][n];
    }
  }

  // P^T and dS^T of the block (dS^T unless only dV is wanted), and its part of dQ^T.
  static __attribute__((noinline)) void step(const Panel& panel, const Keys& keys, Row* p, Row* ds, Scalar scale_log2,
                                             int wanted) {
    for_groups<Scores>(panel, keys, p, ds);
    for (int64_t j = 0; j < keys.count; j++) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) {
        Vector& score = *(Vector*)&p[j][n * kLanes];
        score = exp2_shifted<Scalar, kLanes>(score, scale_log2, *(const Vector*)&panel.shift[n * kLanes]);
      }
    }
    if (!(wanted & (kDQ | kDK))) return;
    for_groups<ScoreGradients>(panel, keys, p, ds);
    if (!(wanted & kDQ)) return;
    for (int column = 0; column < kD; column += kColumns) {
      if (keys.k_is_finite) {
        add_to_dq<true>(keys, column, ds, panel.dq);
      } else {
        add_to_dq<false>(keys, column, ds, panel.dq);
      }
    }
  }
};

}  // namespace
