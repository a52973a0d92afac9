// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// v4 float32: Br=96 Bc=72, 187008 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 13824, K block 36864, V block 36864)
// v3 float32: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// baseline float32: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// v4 float64: Br=32 Bc=48, 170752 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 6144, K block 49152, V block 49152)
// v3 float64: Br=32 Bc=48, 167680 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 3072, K block 49152, V block 49152)
// baseline float64: Br=32 Bc=48, 166144 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 1536, K block 49152, V block 49152)
// amx bf16: Br=128 Bc=96, 161792 bytes of fast memory (Q panels 32768, O panels 65536, row statistics 2048, S panel 12288, K block 24576, V block 24576)
// v4 bf16: Br=96 Bc=72, 187008 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 13824, K block 36864, V block 36864)
// v3 bf16: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// baseline bf16: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// amx fp16: Br=96 Bc=64, 181376 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 8192, P panel 8192, K block 32768, V block 32768)
// v4 fp16: Br=96 Bc=72, 187008 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 13824, K block 36864, V block 36864)
// v3 fp16: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// baseline fp16: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 9747b1e23a5a49b1
//
// One block of keys against one panel of query rows: the body of FlashAttention-2's inner loop (arXiv:2307.08691,
// Algorithm 1, lines 8 to 10).
//
// Everything is held transposed, so that a vector lane is a query row:
//     S^T[key][row]     = K Q^T          one element of K broadcast, vectors of Q^T
//     O^T[column][row] += V^T P^T        one element of V broadcast, vectors of P^T, which overwrites S^T
// K and V are read as they lie, whatever the distance between their rows. m, l and alpha are vectors over the rows:
// no maximum and no sum runs across lanes.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

constexpr int kD = 128;    // width of a query and of a key
constexpr int kDv = 128;  // width of a value

// A panel has kRows = kVectors * kLanes rows. The accumulators, kVectors by kKeys in S^T and kVectors by kColumns in
// O^T, fill the registers.
template <class Scalar_, int kLanes_, int kVectors, int kKeys, int kColumns>
struct BlockKernel {
  using Scalar = Scalar_;
  static constexpr int kLanes = kLanes_;
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  using Index = typename Simd<Scalar, kLanes>::Index;
  using Integer = decltype(Index{}[0] + 0);
  static constexpr int kRows = kVectors * kLanes;
  using Row = Scalar[kRows];
  static_assert(kDv % kColumns == 0, "whole groups of columns");

  struct Panel {
    Row* q;                // [kD]
    Row* o;                // [kDv] sum of p v, not yet divided by l
    Scalar* m;             // [kRows] maximum of q.k over the keys seen, without the scale
    Scalar* l;             // [kRows] sum of p = exp(scale (q.k - m))
    const Integer* limit;  // [kRows] keys that a row sees beyond those that all rows see
  };

  struct Keys {
    const typename Loose<Scalar>::Type *k, *v;
    int64_t k_pitch, v_pitch;  // elements from one key to the next
    int64_t count;             // keys that some row sees
    int64_t shared;            // the first so many are seen by all rows; at most `count`, maybe negative
  };

  // S^T of kGroup keys from `j` on; `max` takes them in.
  template <int kGroup, bool kMasked>
  static ALWAYS_INLINE void scores(const Panel& panel, const Keys& keys, int64_t j, Row* s, Vector (&max)[kVectors]) {
    const auto* k = keys.k + j * keys.k_pitch;
    Vector acc[kGroup][kVectors] = {};
#pragma GCC unroll 2
    for (int t = 0; t < kD; t++) {
      Vector q[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) q[n] = *(const Vector*)&panel.q[t][n * kLanes];
#pragma GCC unroll 16
      for (int g = 0; g < kGroup; g++) {
        const Vector element = broadcast<Vector>((Scalar)k[g * keys.k_pitch + t]);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) acc[g][n] += q[n] * element;
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < kGroup; g++) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) {
        if constexpr (kMasked) {
          const Index visible = *(const Index*)&panel.limit[n * kLanes] > (Integer)(j + g - keys.shared);
          acc[g][n] = visible ? acc[g][n] : broadcast<Vector>(-(Scalar)__builtin_inf());
        }
        max[n] = acc[g][n] > max[n] ? acc[g][n] : max[n];  // passes over a NaN, which comes back through p
        *(Vector*)&s[j + g][n * kLanes] = acc[g][n];
      }
    }
  }

  // O^T = O^T alpha + V^T P^T for kColumns columns. The block is summed on its own, so that rounding errors grow with
  // the size of a block plus the number of blocks, not with the number of keys.
  static ALWAYS_INLINE void values(const Keys& keys, int column, const Row* p, Row* o,
                                   const Vector (&alpha)[kVectors]) {
    const auto* v = keys.v + column;
    Vector acc[kColumns][kVectors] = {};
#pragma GCC unroll 2
    for (int64_t j = 0; j < keys.count; j++) {
      Vector weight[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) weight[n] = *(const Vector*)&p[j][n * kLanes];
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; c++) {
        const Vector element = broadcast<Vector>((Scalar)v[j * keys.v_pitch + c]);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) acc[c][n] += weight[n] * element;
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; c++) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) {
        Vector& sum = *(Vector*)&o[column + c][n * kLanes];
        sum = sum * alpha[n] + acc[c][n];
      }
    }
  }

  // `scale_log2` is the softmax scale times log2(e); s is scratch for keys.count rows.
  static __attribute__((noinline)) void step(const Panel& panel, const Keys& keys, Row* s, Scalar scale_log2) {
    Vector max[kVectors];
    for (int n = 0; n < kVectors; n++) max[n] = *(const Vector*)&panel.m[n * kLanes];
    if (keys.count >= kKeys) {
      int64_t j = 0;
      for (; j + kKeys <= keys.shared; j += kKeys) scores<kKeys, false>(panel, keys, j, s, max);
      // The last group may overlap the one before it: the same scores are computed again.
      for (; j < keys.count; j += kKeys) {
        const int64_t last = keys.count - kKeys;
        scores<kKeys, true>(panel, keys, j < last ? j : last, s, max);
      }
    } else {
      for (int64_t j = 0; j < keys.count; j++) scores<1, true>(panel, keys, j, s, max);
    }

    Vector base[kVectors], alpha[kVectors], sum[kVectors] = {};
    for (int n = 0; n < kVectors; n++) {
      Vector& m = *(Vector*)&panel.m[n * kLanes];
      // m = -inf in a row that has met no finite score: 0 in its place avoids (-inf) - (-inf).
      base[n] = max[n] == -(Scalar)__builtin_inf() ? Vector{} : max[n];
      alpha[n] = exp2_scaled<Scalar, kLanes>(m - base[n], scale_log2);
      m = max[n];
    }
    for (int64_t j = 0; j < keys.count; j++) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) {
        Vector& score = *(Vector*)&s[j][n * kLanes];
        const Vector p = exp2_scaled<Scalar, kLanes>(score - base[n], scale_log2);
        sum[n] += p;
        score = p;
      }
    }
    for (int n = 0; n < kVectors; n++) {
      Vector& l = *(Vector*)&panel.l[n * kLanes];
      l = l * alpha[n] + sum[n];
    }
    for (int column = 0; column < kDv; column += kColumns) values(keys, column, s, panel.o, alpha);
  }
};

}  // namespace
