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
// Templates: sha256 db59568d99b79575
//
// Exact attention, backward, on the vector unit of a CPU: P is made again from Q, K and LSE.
//
// Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, with rows outside and keys inside. A K/V head has a
// sequence of tiles of Br query rows, through all of its query heads in turn:
//     Q^T, dO^T of all panels; D = rowsum(dO o O) - dLSE; dQ^T = 0
//     for each block of Bc keys that some row sees
//       for each panel that sees one of them
//         BackwardBlock::step                     S, P, dP, dS, dQ += dS K
//       RowSums                                   dV += P^T dO, dK += dS^T Q
//     dQ = scale dQ
// `backward_tasks.h` says how tiles share dK and dV.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "backward_simd_block.h"
#include "backward_simd_sums.h"
#include "backward_tasks.h"
#include "storage_simd.h"

namespace {

// Rows at this distance, or a multiple, fall into so few sets of the L1 cache that they push each other out.
constexpr int64_t kCollidingBytes = 2048;
constexpr double kLog2e = 0x1.71547652b82fep+0, kLog2eTail = 0x1.777d0ffda0d24p-56;  // log2(e), and what it lacks

// Scalars of a vector that any row is whole vectors of. The same with vectors of 32 and of 64 bytes, and so are the
// bits.
template <class Scalar, int kLanes>
constexpr int kPartLanes = (kLanes * sizeof(Scalar) < 32 ? 16 : 32) / sizeof(Scalar);

// Whether no element of the rows is infinite or NaN.
template <int kWidth, int kLanes, class Scalar>
ALWAYS_INLINE bool all_finite(const typename Loose<Scalar>::Type* rows, int64_t pitch, int64_t count) {
  constexpr int kPart = kPartLanes<Scalar, kLanes>;
  using Part = typename Simd<Scalar, kPart>::Vector;
  Part sum = {};  // stays 0: x * 0 is NaN for the others
  for (int64_t i = 0; i < count; i++)
    for (int t = 0; t < kWidth; t += kPart) sum += load_vector<Part>(rows + i * pitch + t) * (Scalar)0;
  bool finite = true;
  for (int n = 0; n < kPart; n++) finite &= sum[n] == 0;
  return finite;
}

// rows[r][t] -> columns[t][r] for the rows of one panel. Compiled once for all plans with these numbers.
template <class Scalar, int kLanes, int kRows, int kWidth>
COMPILED_ONCE void transpose_rows(const Scalar (*rows)[kWidth], Scalar (*columns)[kRows]) {
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  if constexpr (kWidth < kLanes) {
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kWidth; t++) columns[t][r] = rows[r][t];
  } else {
    for (int r = 0; r < kRows; r += kLanes) {
      for (int t = 0; t < kWidth; t += kLanes) {
        const int at = smaller(t, kWidth - kLanes);
        Vector square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) square[i] = load_vector<Vector>(&rows[r + i][at]);
        transpose<Scalar, kLanes>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) *(Vector*)&columns[at + i][r] = square[i];
      }
    }
  }
}

// The kernel of one dtype. Plan: Element (as stored), Block (a BackwardBlock), kBr, kBc, the pitches of the key block
// in scratch, kFastMemoryBytes, and how the registers share the columns of dK (k_columns) and dV (v_columns).
template <class Plan>
struct Backward {
  using Element = typename Plan::Element;
  using Block = typename Plan::Block;
  using Scalar = typename Block::Scalar;
  using Vector = typename Block::Vector;
  using Integer = typename Block::Integer;
  typedef typename Loose<Scalar>::Type Lse;
  using Output = Element;
  static constexpr int kLanes = Block::kLanes;
  static constexpr int kRows = Block::kRows;
  static constexpr int kPanels = Plan::kBr / kRows;
  static constexpr bool kInPlace = Storage<Output>::kAsComputed;  // dK and dV are summed where they are stored
  static_assert(Plan::kBr % kRows == 0, "whole panels");
  using Tasks = BackwardTasks<Scalar, Output, kInPlace, Plan::kBr, Plan::kBc, kD, kDv>;
  using Call = typename Tasks::Call;
  using Tile = typename Tasks::Tile;

  // What a worker keeps in its caches.
  struct alignas(64) Scratch {
    Scalar q[kPanels][kD][kRows];
    Scalar dout[kPanels][kDv][kRows];
    Scalar dq[kPanels][kD][kRows];
    Scalar shift[kPanels][kRows];
    Scalar d[kPanels][kRows];
    Integer limit[kPanels][kRows];
    Scalar p[kPanels][Plan::kBc][kRows];
    Scalar ds[kPanels][Plan::kBc][kRows];
    Scalar q_rows[Plan::kBr][kD];
    Scalar dout_rows[Plan::kBr][kDv];
    Scalar k[Plan::kBc][Plan::kKPitch];
    Scalar v[Plan::kBc][Plan::kVPitch];
  };
  static constexpr size_t kScratchBytes = sizeof(Scratch);

  // One row of dO, whatever the distance between its elements.
  static ALWAYS_INLINE void load_dout(const BackwardArgs& a, const Element* from, Scalar* to) {
    if (a.dout_stride[3] == 1) {
      load_row<kDv, kLanes>(from, to);
      return;
    }
    constexpr int kStep = kDv < kLanes ? 8 : kLanes;
    for (int t = 0; t < kDv; t += kStep) {
      const int at = t + kStep <= kDv ? t : kDv - kStep;
      Element together[kStep];
      for (int n = 0; n < kStep; n++) together[n] = from[(at + n) * a.dout_stride[3]];
      store_vector(to + at, Storage<Element>::template load<kStep>(together));
    }
  }

  // sum over dO o O of a row, in any order.
  static ALWAYS_INLINE Scalar row_sum(const Scalar* dout, const Element* o) {
    constexpr int kPart = kPartLanes<Scalar, kLanes>;
    using Part = typename Simd<Scalar, kPart>::Vector;
    Scalar values[kDv];
    load_row<kDv, kLanes>(o, values);
    Part sum = {};
    for (int t = 0; t < kDv; t += kPart) sum += load_vector<Part>(dout + t) * load_vector<Part>(values + t);
    Scalar total = 0;
    for (int n = 0; n < kPart; n++) total += sum[n];
    return total;
  }

  // Rows of a tile as they are summed over. A row without a visible key, and a spare one, is 0 and has weights 0.
  static void load_rows(const Call& c, const Tile& tile, Scratch& w) {
    const BackwardArgs& a = c.a;
    for (int r = 0; r < Plan::kBr; r++) {
      Scalar& shift = w.shift[r / kRows][r % kRows];
      Scalar& d = w.d[r / kRows][r % kRows];
      const int64_t row = tile.row + r;
      const bool spare = r >= tile.rows;
      const Scalar lse = spare ? 0 : *element<const Lse>(a.lse, a.lse_stride, tile.batch, tile.head, row);
      if (spare || lse == -(Scalar)__builtin_inf()) {
        memset(w.q_rows[r], 0, sizeof w.q_rows[r]);
        memset(w.dout_rows[r], 0, sizeof w.dout_rows[r]);
        shift = __builtin_inf();
        d = 0;
        continue;
      }
      load_row<kD, kLanes>(element<const Element>(a.q, a.q_stride, tile.batch, tile.head, row), w.q_rows[r]);
      const int64_t at = tile.batch * a.dout_stride[0] + tile.head * a.dout_stride[1] + row * a.dout_stride[2];
      load_dout(a, (const Element*)a.dout + at, w.dout_rows[r]);
      shift = __builtin_fma((double)lse, kLog2e, lse * kLog2eTail);
      if (shift == (Scalar)__builtin_inf()) shift = __builtin_nan("");  // +inf marks rows without a visible key
      d = row_sum(w.dout_rows[r], element<const Element>(a.o, a.o_stride, tile.batch, tile.head, row));
      if (a.dlse) d -= *element<const Lse>(a.dlse, a.dlse_stride, tile.batch, tile.head, row);
    }
  }

  // An infinite q gives its row a NaN, or scores of -inf: absent pairs. There dS = 0, and dS q must be 0 as well.
  static void drop_infinities(Scratch& w) {
    if (all_finite<kD, kLanes, Scalar>(w.q_rows[0], kD, Plan::kBr)) return;
    for (int r = 0; r < Plan::kBr; r++)
      for (int t = 0; t < kD; t++)
        if (w.q_rows[r][t] - w.q_rows[r][t] != 0) w.q_rows[r][t] = 0;
  }

  static void store_dq(const Call& c, const Tile& tile, int panel, const Scalar (*dq)[kRows]) {
    constexpr int kStep = kD < kLanes ? 8 : kLanes;
    const BackwardArgs& a = c.a;
    const int64_t first = panel * kRows, rows = smaller(kRows, tile.rows - first);
    const Scalar scale = a.scale;
    for (int64_t r = 0; r < rows; r += kLanes) {
      for (int t = 0; t < kD; t += kStep) {
        const int at = t + kStep <= kD ? t : kD - kStep;
        Vector square[kLanes] = {};
#pragma GCC unroll 16
        for (int i = 0; i < kStep; i++) square[i] = *(const Vector*)&dq[at + i][r] * scale;
        transpose<Scalar, kLanes>(square);
        for (int64_t i = 0; i < smaller(kLanes, rows - r); i++) {
          Output* to = element<Output>(a.dq, a.dq_stride, tile.batch, tile.head, tile.row + first + r + i);
          const auto columns = load_vector<typename Simd<Scalar, kStep>::Vector>(&square[i]);
          Storage<Output>::template store<kStep>(to + at, columns);
        }
      }
    }
  }

  // Rows of K or V for the panels of a tile: in place where they are scalars at a harmless distance, else a copy.
  template <int kWidth, int kPitch>
  static ALWAYS_INLINE void place(const Element* from, int64_t stride, int64_t count, Scalar (*copy)[kPitch],
                                  const Lse*& at, int64_t& pitch) {
    if constexpr (Storage<Element>::kAsComputed) {
      if (stride * (int64_t)sizeof(Element) < kCollidingBytes) {
        at = from;
        pitch = stride;
        return;
      }
    }
    for (int64_t j = 0; j < count; j++) load_row<kWidth, kLanes>(from + j * stride, copy[j]);
    at = copy[0];
    pitch = kPitch;
  }

  // The last tile has added to the block: dK times scale, and both to where they belong.
  template <int kWidth>
  static void finish(const Lse* sums, int64_t pitch, Scalar factor, Output* to, int64_t to_pitch, int64_t count) {
    constexpr int kStep = kWidth < kLanes ? 8 : kLanes;
    using Part = typename Simd<Scalar, kStep>::Vector;
    for (int64_t j = 0; j < count; j++) {
      Scalar row[kWidth];  // an overlapping last vector must not be scaled twice
      memcpy(row, sums + j * pitch, sizeof row);
      for (int t = 0; t < kWidth; t += kStep) {
        const int at = t + kStep <= kWidth ? t : kWidth - kStep;
        Storage<Output>::template store<kStep>(to + j * to_pitch + at, load_vector<Part>(row + at) * factor);
      }
    }
  }

  // dK and dV of the block of keys from `key` on: adds the tile in its turn. `count` keys are seen by some row of it.
  static void add_to_block(const Call& c, const Tile& tile, int64_t key, int64_t count, const Scratch& w) {
    const BackwardArgs& a = c.a;
    const typename Tasks::Turn turn = Tasks::turn_of(c, tile, key);
    const int64_t width = smaller(Plan::kBc, a.Nk - key);
    int64_t dk_pitch = 0, dv_pitch = 0;
    Lse* dk = a.dk ? c.dk_sums(tile.pair, key, &dk_pitch) : nullptr;
    Lse* dv = a.dv ? c.dv_sums(tile.pair, key, &dv_pitch) : nullptr;
    Tasks::wait(turn);
    if (turn.is_first) {
      for (int64_t j = 0; j < width; j++) {
        if (dk) memset(dk + j * dk_pitch, 0, kD * sizeof(Scalar));
        if (dv) memset(dv + j * dv_pitch, 0, kDv * sizeof(Scalar));
      }
    }
    const int64_t first = a.causal == kFull ? -a.Nk : key - c.causal_shift() - tile.row;
    using DK = RowSums<Scalar, Plan::kBc, kRows, kD>;
    using DV = RowSums<Scalar, Plan::kBc, kRows, kDv>;
    if (dv) Plan::v_columns(DV{w.p, w.dout_rows, tile.rows, count, first, dv, dv_pitch});
    if (dk) Plan::k_columns(DK{w.ds, w.q_rows, tile.rows, count, first, dk, dk_pitch});
    if (turn.is_last) {
      if (dk) {
        Output* to = element<Output>(a.dk, a.dk_stride, tile.batch, tile.kv_head, key);
        finish<kD>(dk, dk_pitch, a.scale, to, a.dk_stride[2], width);
      }
      if (dv && !kInPlace) {
        Output* to = element<Output>(a.dv, a.dv_stride, tile.batch, tile.kv_head, key);
        finish<kDv>(dv, dv_pitch, 1, to, a.dv_stride[2], width);
      }
    }
    Tasks::pass_on(turn);
  }

  static void run_tile(const Call& c, const Tile& tile, Scratch& w) {
    const BackwardArgs& a = c.a;
    const int panels = (tile.rows + kRows - 1) / kRows;
    const Scalar product = __builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail);
    // Below the normal range the smallest normal number has the same effect: all weights are equal.
    const Scalar scale_log2 = product < Exponent<Scalar>::kTiny ? Exponent<Scalar>::kTiny : product;
    load_rows(c, tile, w);
    int64_t shared[kPanels] = {};  // keys that all rows of a panel see; an empty row sees none, whatever the mask says
    for (int p = 0; p < panels; p++) {
      const int64_t* sees = tile.sees + p * kRows;
      transpose_rows<Scalar, kLanes, kRows, kD>(w.q_rows + p * kRows, w.q[p]);
      transpose_rows<Scalar, kLanes, kRows, kDv>(w.dout_rows + p * kRows, w.dout[p]);
      memset(w.dq[p], 0, sizeof w.dq[p]);
      shared[p] = sees[0];
      for (int r = 0; r < kRows; r++)
        if (w.shift[p][r] == (Scalar)__builtin_inf() && p * kRows + r < tile.rows) shared[p] = 0;
      for (int r = 0; r < kRows; r++)
        w.limit[p][r] = w.shift[p][r] == (Scalar)__builtin_inf() ? 0 : sees[r] - shared[p];
    }
    drop_infinities(w);

    const Element* k = element<const Element>(a.k, a.k_stride, tile.batch, tile.kv_head, 0);
    const Element* v = element<const Element>(a.v, a.v_stride, tile.batch, tile.kv_head, 0);
    const int64_t end = tile.sees[tile.rows - 1];
    typename Block::Keys keys = {};
    for (int64_t key = 0; key < end; key += Plan::kBc) {
      const int64_t count = smaller(end - key, Plan::kBc);
      place<kD>(k + key * a.k_stride[2], a.k_stride[2], count, w.k, keys.k, keys.k_pitch);
      place<kDv>(v + key * a.v_stride[2], a.v_stride[2], count, w.v, keys.v, keys.v_pitch);
      keys.k_is_finite = all_finite<kD, kLanes, Scalar>(keys.k, keys.k_pitch, count);
      for (int p = 0; p < panels; p++) {
        keys.count = smaller(tile.sees[(p + 1) * kRows - 1] - key, count);
        keys.shared = smaller(shared[p] - key, keys.count);
        if (keys.count <= 0) continue;
        Block::step({w.q[p], w.dout[p], w.dq[p], w.shift[p], w.d[p], w.limit[p]}, keys, w.p[p], w.ds[p], scale_log2,
                    c.wanted);
        if (keys.count < count) {  // keys that only later panels see
          memset(w.p[p][keys.count], 0, (count - keys.count) * sizeof w.p[p][0]);
          memset(w.ds[p][keys.count], 0, (count - keys.count) * sizeof w.ds[p][0]);
        }
      }
      if (a.dk || a.dv) add_to_block(c, tile, key, count, w);
    }
    if (a.dq)
      for (int p = 0; p < panels; p++) store_dq(c, tile, p, w.dq[p]);
  }

  // One worker. Returns 0, or ENOMEM.
  static int work(const BackwardArgs& a, void* shared, int64_t* next) {
    Scratch* scratch = Tasks::template allocate<Scratch>();
    if (!scratch) return ENOMEM;
    Tasks::template run_heads<Backward>(Call(a, shared), next, *scratch);
    free(scratch);
    return 0;
  }
};

template <class Plan>
int backward(const BackwardArgs* a, void* shared, int64_t* next) {
  static_assert(Backward<Plan>::kScratchBytes == Plan::kFastMemoryBytes, "the memory that the plan states");
  return Backward<Plan>::work(*a, shared, next);
}

}  // namespace
