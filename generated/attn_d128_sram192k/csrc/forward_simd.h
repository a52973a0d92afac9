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
// Templates: sha256 0847b29fe41b7608
//
// Exact attention, forward, on the vector unit of a CPU.
//
// Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1, with the L2 cache in the place of shared memory. A task is
// a tile of Br query rows, cut into panels of as many rows as the registers hold:
//     Q^T of all panels; O^T = 0, m = -inf, l = 0           lines 4, 5
//     for each block of Bc keys that some row sees          line 6; K, V stay in L2 for all panels
//       for each panel that sees one of them                its Q, O and S take turns in L1
//         BlockKernel::step                                 lines 8 to 10
//     O = O / l, LSE = scale m + ln l                       lines 12 to 15
// Causal tiles skip per panel and per group of keys, so about half a panel of keys per row is computed in vain.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "block_simd.h"
#include "forward.h"
#include "storage_simd.h"

namespace {

// Rows at this distance, or a multiple, fall into so few sets of the L1 cache that they push each other out.
constexpr int64_t kCollidingBytes = 2048;
constexpr size_t kPage = 4096;
constexpr double kLog2e = 0x1.71547652b82fep+0, kLog2eTail = 0x1.777d0ffda0d24p-56;  // log2(e), and what is missing from it

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Tile {
  int64_t batch, kv_head;
  int64_t head, row;  // of its first row
  int64_t rows;       // they go on in the next head after the last row of one
};

// The next three know no plan, so that a unit compiles them once for all kernels of an element type and vector.

// Where the rows of a panel come from and go to: elements from the start of Q, O and LSE. Spare rows of the last panel
// repeat the last row: never stored.
template <int kRows>
struct Rows {
  int64_t q[kRows];
  int64_t o[kRows];
  int64_t lse[kRows];
  int64_t sees[kRows];  // number of visible keys
  int count;            // rows that are not spare
};

template <int kRows>
COMPILED_ONCE void find_rows(const ForwardArgs& a, const Tile& tile, int panel, Rows<kRows>& rows) {
  const int64_t length = a.key_lengths ? a.key_lengths[tile.batch] : a.Nk;
  const int64_t shift = a.causal == kBottomRight ? a.Nk - a.Nq : 0;
  const int64_t first = tile.row + panel * kRows;
  int64_t head = tile.head + first / a.Nq, i = first % a.Nq;
  rows.count = smaller(tile.rows - panel * kRows, kRows);
  for (int r = 0; r < kRows; r++) {
    rows.q[r] = tile.batch * a.q_stride[0] + head * a.q_stride[1] + i * a.q_stride[2];
    rows.o[r] = tile.batch * a.o_stride[0] + head * a.o_stride[1] + i * a.o_stride[2];
    rows.lse[r] = (tile.batch * a.Hq + head) * a.Nq + i;
    rows.sees[r] = a.causal == kFull ? length : smaller(length, i + shift + 1);
    if (r + 1 < rows.count && ++i == a.Nq) {
      i = 0;
      head++;
    }
  }
}

// Q^T of `count` rows, whole vectors of them, `pitch` scalars from one dim to the next.
template <class Element, class Scalar, int kLanes>
COMPILED_ONCE void load_q(const Element* from, const int64_t* rows, int count, Scalar* q, int pitch) {
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  if constexpr (kD < kLanes) {
    for (int r = 0; r < count; r++) {
      Scalar row[kD];
      load_row<kD, kLanes>(from + rows[r], row);
      for (int t = 0; t < kD; t++) q[t * pitch + r] = row[t];
    }
  } else {
    for (int r = 0; r < count; r += kLanes) {
      for (int t = 0; t < kD; t += kLanes) {
        const int at = smaller(t, kD - kLanes);
        Vector square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = Storage<Element>::template load<kLanes>(from + rows[r + i] + at);
        transpose<Scalar, kLanes>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) *(Vector*)&q[(at + i) * pitch + r] = square[i];
      }
    }
  }
}

// O = O / l and LSE of `count` rows; a row is empty (O = 0, LSE = -inf) where l = 0, and nowhere else: a NaN must stay.
template <class Output, class Scalar, int kLanes>
COMPILED_ONCE void store_o(const ForwardArgs& a, const int64_t* o_rows, const int64_t* lse_rows, int count,
                           const Scalar* o, int pitch, const Scalar* m, const Scalar* l) {
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  typedef typename Loose<Scalar>::Type Lse;
  for (int r = 0; r < count; r++) {
    const double lse = m[r] * a.scale + __builtin_log((double)l[r]);
    ((Lse*)a.lse)[lse_rows[r]] = l[r] == 0 ? -__builtin_inf() : lse;
  }
  constexpr int kStep = kDv < kLanes ? 8 : kLanes;
  for (int r = 0; r < count; r += kLanes) {
    const Vector sum = *(const Vector*)&l[r];
    const Vector inverse = 1 / sum;
    for (int t = 0; t < kDv; t += kStep) {
      const int at = t + kStep <= kDv ? t : kDv - kStep;
      Vector square[kLanes] = {};
#pragma GCC unroll 16
      for (int i = 0; i < kStep; i++) {
        square[i] = *(const Vector*)&o[(at + i) * pitch + r] * inverse;
        square[i] = sum == 0 ? Vector{} : square[i];
      }
      transpose<Scalar, kLanes>(square);
      for (int i = 0; i < smaller(kLanes, count - r); i++) {
        const auto columns = load_vector<typename Simd<Scalar, kStep>::Vector>(&square[i]);
        Storage<Output>::template store<kStep>((Output*)a.o + o_rows[r + i] + at, columns);
      }
    }
  }
}

// The kernel of one dtype. Plan: Element (as stored), Block (a BlockKernel), kBr, kBc, the pitches of the key block in
// scratch, and kFastMemoryBytes.
template <class Plan>
struct Forward {
  using Element = typename Plan::Element;
  using Block = typename Plan::Block;
  using Scalar = typename Block::Scalar;
  using Vector = typename Block::Vector;
  using Integer = typename Block::Integer;
  using Output = Element;
  static constexpr int kLanes = Block::kLanes;
  static constexpr int kRows = Block::kRows;
  static constexpr int kPanels = Plan::kBr / kRows;
  static_assert(Plan::kBr % kRows == 0, "whole panels");

  // What a worker keeps in its caches.
  struct alignas(64) Scratch {
    Scalar q[kPanels][kD][kRows];
    Scalar o[kPanels][kDv][kRows];
    Scalar m[kPanels][kRows];
    Scalar l[kPanels][kRows];
    Integer limit[kPanels][kRows];
    Scalar s[Plan::kBc][kRows];
    Scalar k[Plan::kBc][Plan::kKPitch];
    Scalar v[Plan::kBc][Plan::kVPitch];
  };
  static constexpr size_t kScratchBytes = sizeof(Scratch);

  // How a call is cut into tasks. Where a panel has room for several heads of a group, they lie in it side by side.
  struct Tasks {
    int64_t group;       // query heads per K/V head
    int64_t heads;       // query heads per tile
    int64_t head_tiles;  // per K/V head
    int64_t row_tiles;   // per query head
    int64_t count;
  };

  static Tasks tasks_of(const ForwardArgs& a) {
    Tasks t;
    t.group = a.Hq / a.Hkv;
    t.heads = 2 * a.Nq <= kRows ? smaller(t.group, kRows / a.Nq) : 1;
    t.head_tiles = (t.group + t.heads - 1) / t.heads;
    t.row_tiles = t.heads > 1 ? 1 : (a.Nq + Plan::kBr - 1) / Plan::kBr;
    t.count = a.B * a.Hkv * t.head_tiles * t.row_tiles;
    return t;
  }

  // Head by head, because K and V stay in the cache; within a head the longest causal tile first.
  static Tile tile_of(const ForwardArgs& a, const Tasks& t, int64_t task) {
    Tile tile;
    tile.row = (t.row_tiles - 1 - task % t.row_tiles) * Plan::kBr;
    const int64_t first = task / t.row_tiles % t.head_tiles * t.heads;
    const int64_t kv = task / t.row_tiles / t.head_tiles;
    tile.batch = kv / a.Hkv;
    tile.kv_head = kv % a.Hkv;
    tile.head = tile.kv_head * t.group + first;
    tile.rows = t.heads > 1 ? smaller(t.heads, t.group - first) * a.Nq : smaller(Plan::kBr, a.Nq - tile.row);
    return tile;
  }

  // Rows of K or V for the panels of a tile: in place where they are scalars at a harmless distance, else a copy.
  template <int kWidth, int kPitch>
  static ALWAYS_INLINE void place(const Element* from, int64_t stride, int64_t count, int panels,
                                  Scalar (*copy)[kPitch], const typename Loose<Scalar>::Type*& at, int64_t& pitch) {
    if constexpr (Storage<Element>::kAsComputed) {
      if (panels == 1 || stride * (int64_t)sizeof(Element) < kCollidingBytes) {
        at = from;
        pitch = stride;
        return;
      }
    }
    for (int64_t j = 0; j < count; j++) load_row<kWidth, kLanes>(from + j * stride, copy[j]);
    at = copy[0];
    pitch = kPitch;
  }

  static void run_tile(const ForwardArgs& a, const Tile& tile, Scratch& w) {
    const int panels = (tile.rows + kRows - 1) / kRows;
    const Scalar product = __builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail);
    // Below the normal range the smallest normal number has the same effect: all weights are 1.
    const Scalar scale_log2 = product < Exponent<Scalar>::kTiny ? Exponent<Scalar>::kTiny : product;
    int64_t shared[kPanels] = {}, most[kPanels] = {}, end = 0;  // keys that all rows of a panel see; that some row sees
    Rows<kRows> rows;
    for (int p = 0; p < panels; p++) {
      find_rows(a, tile, p, rows);
      load_q<Element, Scalar, kLanes>((const Element*)a.q, rows.q, kRows, w.q[p][0], kRows);
      memset(w.o[p], 0, sizeof w.o[p]);
      shared[p] = most[p] = rows.sees[0];
      for (int r = 1; r < kRows; r++) {
        shared[p] = smaller(shared[p], rows.sees[r]);
        most[p] = larger(most[p], rows.sees[r]);
      }
      for (int r = 0; r < kRows; r++) {
        w.m[p][r] = -(Scalar)__builtin_inf();
        w.l[p][r] = 0;
        w.limit[p][r] = rows.sees[r] - shared[p];
      }
      end = larger(end, most[p]);
    }

    const Element* k = (const Element*)a.k + tile.batch * a.k_stride[0] + tile.kv_head * a.k_stride[1];
    const Element* v = (const Element*)a.v + tile.batch * a.v_stride[0] + tile.kv_head * a.v_stride[1];
    typename Block::Keys keys = {};
    for (int64_t key = 0; key < end; key += Plan::kBc) {
      const int64_t count = smaller(end - key, Plan::kBc);
      place<kD>(k + key * a.k_stride[2], a.k_stride[2], count, panels, w.k, keys.k, keys.k_pitch);
      place<kDv>(v + key * a.v_stride[2], a.v_stride[2], count, panels, w.v, keys.v, keys.v_pitch);
      for (int p = 0; p < panels; p++) {
        keys.count = smaller(most[p] - key, count);
        keys.shared = smaller(shared[p] - key, count);
        if (keys.count <= 0) continue;
        Block::step({w.q[p], w.o[p], w.m[p], w.l[p], w.limit[p]}, keys, w.s, scale_log2);
      }
    }

    for (int p = 0; p < panels; p++) {
      find_rows(a, tile, p, rows);
      store_o<Output, Scalar, kLanes>(a, rows.o, rows.lse, rows.count, w.o[p][0], kRows, w.m[p], w.l[p]);
    }
  }

  // One worker: takes tasks until none is left. Returns 0, or ENOMEM.
  static int work(const ForwardArgs& a, int64_t* next) {
    const Tasks tasks = tasks_of(a);
    Scratch* scratch = nullptr;
    for (;;) {
      const int64_t task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (task >= tasks.count) break;
      if (!scratch) scratch = (Scratch*)aligned_alloc(kPage, (sizeof(Scratch) + kPage - 1) / kPage * kPage);
      if (!scratch) return ENOMEM;
      run_tile(a, tile_of(a, tasks, task), *scratch);
    }
    free(scratch);
    return 0;
  }
};

// The same kernel for tiles of one vector of rows: with fewer query rows than that, a whole panel is mostly spare rows.
template <class Plan>
struct OneVector : Plan {
  using Block = typename Plan::OneVectorBlock;
  static constexpr int kBr = Block::kRows;
};

template <class Plan>
int forward(const ForwardArgs* a, void*, int64_t* next) {
  static_assert(Forward<Plan>::kScratchBytes == Plan::kFastMemoryBytes, "the memory that the plan states");
  if (a->Nq <= OneVector<Plan>::kBr) return Forward<OneVector<Plan>>::work(*a, next);
  return Forward<Plan>::work(*a, next);
}

}  // namespace
