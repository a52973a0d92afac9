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
// Templates: sha256 6765f997b981e830
//
// dK and dV of one block of keys: the products of a backward pass that sum over query rows,
//     dV[key][column] += P^T dO      dK[key][column] += dS^T Q
// P^T and dS^T hold a row in each lane, so here a lane is a column: one weight broadcast, vectors of row-major dO or Q.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

// The rows of a tile: weights of panel p in weights[p], kPerPanel rows each, and what is summed, kWidth columns a row.
template <class Scalar_, int kBc, int kPerPanel, int kWidth>
struct RowSums {
  using Scalar = Scalar_;
  using Weights = Scalar[kBc][kPerPanel];
  typedef typename Loose<Scalar>::Type Element;

  const Weights* weights;
  const Scalar (*x)[kWidth];
  int64_t rows, keys;
  int64_t first;  // row that is the first to see key 0: row first + j sees key j. At most 0: all rows see all keys
  Element* out;
  int64_t out_pitch;

  // kVectors vectors of columns from `column` on, for all keys.
  template <int kLanes, int kVectors, int kKeys>
  __attribute__((noinline)) void columns(int column) const {
    int64_t key = 0;
    for (; key + kKeys <= keys; key += kKeys) group<kLanes, kVectors, kKeys>(key, column);
    for (; key < keys; key++) group<kLanes, kVectors, 1>(key, column);
  }

  // The same for kKeys keys. The tile is summed on its own, then added: rounding errors
  // grow with the size of a tile plus the number of tiles.
  template <int kLanes, int kVectors, int kKeys>
  ALWAYS_INLINE void group(int64_t key, int column) const {
    using Vector = typename Simd<Scalar, kLanes>::Vector;
    Vector acc[kKeys][kVectors] = {};
    for (int64_t from = first + key > 0 ? first + key : 0; from < rows;) {
      const int64_t panel = from / kPerPanel, before = panel * kPerPanel;
      const int64_t end = rows - before < kPerPanel ? rows - before : kPerPanel;
      const Scalar(*weight)[kPerPanel] = &weights[panel][key];
#pragma GCC unroll 2
      for (int64_t r = from - before; r < end; r++) {
        Vector row[kVectors];
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; n++) row[n] = load_vector<Vector>(&x[before + r][column + n * kLanes]);
#pragma GCC unroll 16
        for (int g = 0; g < kKeys; g++) {
          const Vector element = broadcast<Vector>(weight[g][r]);
#pragma GCC unroll 16
          for (int n = 0; n < kVectors; n++) acc[g][n] += row[n] * element;
        }
      }
      from = before + end;
    }
#pragma GCC unroll 16
    for (int g = 0; g < kKeys; g++) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; n++) {
        Element* at = out + (key + g) * out_pitch + column + n * kLanes;
        store_vector(at, load_vector<Vector>(at) + acc[g][n]);
      }
    }
  }
};

}  // namespace
