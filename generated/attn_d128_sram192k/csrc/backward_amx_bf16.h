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
// Templates: sha256 b733754d2e394444
//
// Exact attention, backward, in bf16 on AMX. Br = 64 (2 panels of 32 rows), Bc = 64.
//
// Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2, with rows outside and keys inside. A lane is a query row in
// S, dP and dQ, and a column in dK and dV. A tile instruction takes A (16 x 32) and B (32 x 16, two of the 32 per
// word):
//   S^T[key][row]    = K Q^T        A: rows of K            B: Q^T, two dims per word
//   dP^T[key][row]   = V dO^T       A: rows of V            B: dO^T, two columns per word
//   dQ^T[dim][row]  += K^T dS^T     A: K^T                  B: dS^T, two keys per word, in place of S^T
//   dV[key][col]    += P^T dO       A: P^T, rows of a key   B: dO, two rows per word
//   dK[key][dim]    += dS^T Q       A: dS^T, rows of a key  B: Q, two rows per word
// P and dS are rounded to bf16, to nearest even. `backward_tasks.h` says how tiles share dK and dV.
#pragma once

#include "backward_tasks.h"
#include "forward_amx.h"

namespace {
namespace bf16 {

constexpr int kBr = 64;
constexpr int kBc = 64;
constexpr int kPanels = kBr / 32;
constexpr int kVDTiles = kVTiles / 2;  // tiles of 32 columns
constexpr double kLog2e = 0x1.71547652b82fep+0, kLog2eTail = 0x1.777d0ffda0d24p-56;  // log2(e), and what it lacks

using Output = uint16_t;
using Tile16 = uint16_t[16][32];  // an operand: A [row][32], or B [pair of the 32][column, which of the pair]
using Tasks = BackwardTasks<float, Output, false, kBr, kBc, kD, kDv, 32 * kDTiles, 32 * kVDTiles>;
using Call = Tasks::Call;
using Task = Tasks::Tile;

// 32 keys.
struct alignas(64) Chunk {
  Tile16 k[kDTiles][2];       // A: [dim tile][key half][key]
  Tile16 v[kVDTiles][2];      // A: [column tile][key half][key]
  Tile16 k_columns[2 * kDTiles];  // A: K^T, [tile of 16 dims][dim][key]; an infinite k is 0 here
};

struct alignas(64) Panel {
  Tile16 q[kDTiles][2];               // B: [dim tile][row half]
  Tile16 dout[kVDTiles][2];           // B: [column tile][row half]
  Tile16 q_pairs[2 * kDTiles];        // B: [tile of 16 dims][pair of rows]; an infinite q is 0 here
  Tile16 dout_pairs[2 * kVDTiles];    // B: [tile of 16 columns][pair of rows]
  ScoreTile dq[2 * kDTiles][2];       // dQ^T: [tile of 16 dims][row half][dim][row], not yet times the scale
  Tile16 p[kBc / 32][2];              // A: [chunk][key half][key][row]
  Tile16 ds[kBc / 32][2];             // A: likewise
  float shift[32];                    // LSE log2(e); +inf in a row without a visible key
  float d[32];                        // D = rowsum(dO o O) - dLSE
};

constexpr int kWidest = kDTiles > kVDTiles ? kDTiles : kVDTiles;

struct Scratch {
  Panel panel[kPanels];
  Chunk chunk[kBc / 32];
  ScoreTile s[kBc / 16][2];   // S^T: [key tile][row half][key][row]; dS^T of keys 32 b .. 32 b + 31 replaces s[2 b]
  ScoreTile dp[kBc / 16][2];  // dP^T
  alignas(64) uint16_t rows[32][32 * kWidest];  // 32 rows or keys on their way into tiles
};
static_assert(sizeof(Scratch) == 188928, "the memory that the plan states");

template <int T>
ALWAYS_INLINE void tile_store_rows(void* p, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}

// A row of bf16 at any distance between its elements, with zeros up to a whole number of tiles.
template <int kWidth, int kTiles>
ALWAYS_INLINE void load_row(const uint16_t* from, int64_t step, uint16_t* to) {
  constexpr uint32_t kRest = kWidth % 32 ? (1u << kWidth % 32) - 1 : 0xffffffff;
  if (step == 1) {
    for (int t = 0; t < kTiles; ++t)
      _mm512_store_si512(to + 32 * t, _mm512_maskz_loadu_epi16(t == kTiles - 1 ? kRest : 0xffffffff, from + 32 * t));
  } else {
    memset(to, 0, 64 * kTiles);
    for (int t = 0; t < kWidth; ++t) to[t] = from[t * step];
  }
}

template <int kTiles>
ALWAYS_INLINE void clear_row(uint16_t* to) {
  memset(to, 0, 64 * kTiles);
}

// Infinities and NaN as zeros.
ALWAYS_INLINE __m512i only_finite(__m512i x) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(x, exponent), exponent), x);
}

// Words of element i of `even` and element i of `odd`: i = 0 .. 15 and 16 .. 31.
ALWAYS_INLINE void interleave(__m512i even, __m512i odd, __m512i& low, __m512i& high) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  low = _mm512_permutex2var_epi16(even, first, odd);
  high = _mm512_permutex2var_epi16(even, _mm512_add_epi16(first, _mm512_set1_epi16(16)), odd);
}

// B tiles that sum over columns: [column tile][row half], two columns per word.
template <int kTiles>
void pack_columns(const uint16_t (*rows)[32 * kWidest], Tile16 (*out)[2]) {
  for (int t = 0; t < kTiles; ++t)
    for (int h = 0; h < 2; ++h) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(rows[16 * h + i] + 32 * t);
      transpose16(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out[t][h][i], r[i]);
    }
}

// B tiles that sum over rows: [tile of 16 columns], two rows per word. kTranspose: A tiles, [column][row], instead.
template <int kTiles, bool kFinite, bool kTranspose>
void pack_pairs(const uint16_t (*rows)[32 * kWidest], Tile16* out) {
  for (int t = 0; t < kTiles; ++t) {
    __m512i low[16], high[16];
    for (int i = 0; i < 16; ++i) {
      __m512i even = _mm512_load_si512(rows[2 * i] + 32 * t), odd = _mm512_load_si512(rows[2 * i + 1] + 32 * t);
      if constexpr (kFinite) {
        even = only_finite(even);
        odd = only_finite(odd);
      }
      interleave(even, odd, low[i], high[i]);
    }
    if constexpr (kTranspose) {
      transpose16(low);
      transpose16(high);
    }
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(out[2 * t][i], low[i]);
      _mm512_store_si512(out[2 * t + 1][i], high[i]);
    }
  }
}

// A tiles that sum over columns: [column tile][row half], as the rows lie.
template <int kTiles>
void pack_rows(const uint16_t (*rows)[32 * kWidest], Tile16 (*out)[2]) {
  for (int t = 0; t < kTiles; ++t)
    for (int i = 0; i < 32; ++i)
      _mm512_store_si512(out[t][i / 16][i % 16], _mm512_load_si512(rows[i] + 32 * t));
}

// 32 keys, with zeros for those that are not there.
template <int kWidth, int kTiles>
void load_keys(const uint16_t* from, int64_t stride, int64_t keys, uint16_t (*rows)[32 * kWidest]) {
  for (int j = 0; j < 32; ++j) {
    if (j < keys) {
      load_row<kWidth, kTiles>(from + j * stride, 1, rows[j]);
    } else {
      clear_row<kTiles>(rows[j]);
    }
  }
}

void load_chunk(const uint16_t* k, int64_t k_stride, const uint16_t* v, int64_t v_stride, int64_t keys, Scratch& w,
                Chunk& out) {
  load_keys<kD, kDTiles>(k, k_stride, keys, w.rows);
  pack_rows<kDTiles>(w.rows, out.k);
  pack_pairs<kDTiles, true, true>(w.rows, out.k_columns);
  load_keys<kDv, kVDTiles>(v, v_stride, keys, w.rows);
  pack_rows<kVDTiles>(w.rows, out.v);
}

ALWAYS_INLINE float canonical(float x) { return x == x ? x : __builtin_nanf(""); }

// D of a row, in float32, any order.
ALWAYS_INLINE float row_sum(const uint16_t* dout, const uint16_t* o) {
  alignas(64) uint16_t values[32 * kVDTiles];
  load_row<kDv, kVDTiles>(o, 1, values);
  __m512 sum = _mm512_setzero_ps();
  for (int t = 0; t < 32 * kVDTiles; t += 16) {
    const __m512i a = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i*)(dout + t))), 16);
    const __m512i b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i*)(values + t))), 16);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// Rows of a panel. One without a visible key, and a spare one, is 0 and has weights 0.
void load_panel(const Call& c, const Task& task, int64_t first, Scratch& w, Panel& p) {
  const BackwardArgs& a = c.a;
  for (int r = 0; r < 32; ++r) {
    const int64_t row = task.row + first + r;
    p.shift[r] = kInf;
    p.d[r] = 0;
    clear_row<kVDTiles>(w.rows[r]);
    if (first + r >= task.rows) continue;
    const float lse = *element<const Tasks::Sum>(a.lse, a.lse_stride, task.batch, task.head, row);
    if (lse == -kInf) continue;
    const float shift = __builtin_fma((double)lse, kLog2e, lse * kLog2eTail);
    p.shift[r] = shift == kInf ? __builtin_nanf("") : canonical(shift);  // +inf marks rows without a visible key
    const int64_t at = task.batch * a.dout_stride[0] + task.head * a.dout_stride[1] + row * a.dout_stride[2];
    load_row<kDv, kVDTiles>((const uint16_t*)a.dout + at, a.dout_stride[3], w.rows[r]);
    float d = row_sum(w.rows[r], element<const uint16_t>(a.o, a.o_stride, task.batch, task.head, row));
    if (a.dlse) d -= *element<const Tasks::Sum>(a.dlse, a.dlse_stride, task.batch, task.head, row);
    p.d[r] = canonical(d);
  }
  pack_columns<kVDTiles>(w.rows, p.dout);
  pack_pairs<kVDTiles, false, false>(w.rows, p.dout_pairs);
  for (int r = 0; r < 32; ++r) {
    const int64_t row = task.row + first + r;
    if (p.shift[r] == kInf) {
      clear_row<kDTiles>(w.rows[r]);
    } else {
      load_row<kD, kDTiles>(element<const uint16_t>(a.q, a.q_stride, task.batch, task.head, row), 1, w.rows[r]);
    }
  }
  pack_columns<kDTiles>(w.rows, p.q);
  pack_pairs<kDTiles, true, false>(w.rows, p.q_pairs);
  memset(p.dq, 0, sizeof p.dq);
}

// C = sum over kTiles of A B for 2 x 2 tiles of C.
template <int kTiles>
ALWAYS_INLINE void product(const Tile16 (*a)[2], const Tile16 (*b)[2], ScoreTile (*out)[2]) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    tile_load<4>(a[t][0], 64);
    tile_load<6>(b[t][0], 64);
    tile_dp_bf16<0, 4, 6>();
    tile_load<7>(b[t][1], 64);
    tile_dp_bf16<1, 4, 7>();
    tile_load<5>(a[t][1], 64);
    tile_dp_bf16<2, 5, 6>();
    tile_dp_bf16<3, 5, 7>();
  }
  tile_store<0>(out[0][0]);
  tile_store<1>(out[0][1]);
  tile_store<2>(out[1][0]);
  tile_store<3>(out[1][1]);
}

// P^T and dS^T of `chunks` chunks from S^T and dP^T, as A tiles; dS^T also as B tiles in place of S^T. A pair whose
// score is -inf, masked or not, is exactly 0 in both.
void weights(Panel& p, Scratch& w, int chunks, float scale_log2) {
  const __m512 c = _mm512_set1_ps(scale_log2), none = _mm512_set1_ps(-kInf);
  __m512 shift[2], d[2];
  __mmask16 alive[2];
  for (int h = 0; h < 2; ++h) {
    shift[h] = _mm512_load_ps(p.shift + 16 * h);
    d[h] = _mm512_load_ps(p.d + 16 * h);
    alive[h] = _mm512_cmp_ps_mask(shift[h], _mm512_set1_ps(kInf), _CMP_NEQ_UQ);
  }
  for (int b = 0; b < chunks; ++b)
#pragma GCC unroll 1
    for (int i = 0; i < 16; ++i) {
      __m512i gradient[2];
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const int tile = 2 * b + i / 8, key = 2 * i % 16 + odd;
        __m512 weight[2], ds[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const __m512 s = _mm512_load_ps(w.s[tile][h][key]);
          const __mmask16 present = _mm512_mask_cmp_ps_mask(alive[h], s, none, _CMP_NEQ_UQ);
          weight[h] = _mm512_maskz_mov_ps(present, exp2_degree4(_mm512_fmsub_ps(s, c, shift[h])));
          ds[h] = _mm512_maskz_mul_ps(present, weight[h], _mm512_sub_ps(_mm512_load_ps(w.dp[tile][h][key]), d[h]));
        }
        gradient[odd] = (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]);
        _mm512_store_si512(p.ds[b][i / 8][key], gradient[odd]);
        _mm512_store_si512(p.p[b][i / 8][key], (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));
      }
      __m512i low, high;
      interleave(gradient[0], gradient[1], low, high);
      _mm512_store_si512(w.s[2 * b][0][i], low);
      _mm512_store_si512(w.s[2 * b][1][i], high);
    }
}

// dQ^T += K^T dS^T, 32 dims at a time.
void add_to_dq(Panel& p, const Scratch& w, int chunks) {
  for (int g = 0; g < 2 * kDTiles; g += 2) {
    tile_load<0>(p.dq[g][0], 64);
    tile_load<1>(p.dq[g][1], 64);
    tile_load<2>(p.dq[g + 1][0], 64);
    tile_load<3>(p.dq[g + 1][1], 64);
    for (int b = 0; b < chunks; ++b) {
      tile_load<4>(w.chunk[b].k_columns[g], 64);
      tile_load<6>(w.s[2 * b][0], 64);
      tile_dp_bf16<0, 4, 6>();
      tile_load<7>(w.s[2 * b][1], 64);
      tile_dp_bf16<1, 4, 7>();
      tile_load<5>(w.chunk[b].k_columns[g + 1], 64);
      tile_dp_bf16<2, 5, 6>();
      tile_dp_bf16<3, 5, 7>();
    }
    tile_store<0>(p.dq[g][0]);
    tile_store<1>(p.dq[g][1]);
    tile_store<2>(p.dq[g + 1][0]);
    tile_store<3>(p.dq[g + 1][1]);
  }
}

// One panel against the block: row r sees the keys up to `diagonal` + r, every row the first `full` of `keys`.
[[gnu::noinline]] void step(Panel& p, Scratch& w, int keys, int full, int diagonal, float scale_log2, bool wants_dq) {
  const int chunks = (keys + 31) / 32;
  for (int b = 0; b < chunks; ++b) {
    product<kDTiles>(w.chunk[b].k, p.q, w.s + 2 * b);
    product<kVDTiles>(w.chunk[b].v, p.dout, w.dp + 2 * b);
  }
  hide(w.s, full, keys, diagonal);
  weights(p, w, chunks, scale_log2);
  if (wants_dq) add_to_dq(p, w, chunks);
}

// out[key][column] += weights x over the rows of `panels` panels from `first` on, for 32 keys.
template <int kTiles>
ALWAYS_INLINE void add_rows(const Panel* panel, int first, int panels, const Tile16 (Panel::*weight)[kBc / 32][2],
                            const Tile16 (Panel::*x)[2 * kTiles], int b, Tasks::Sum* out) {
  constexpr int64_t kPitch = 32 * kTiles * sizeof(float);
  for (int g = 0; g < 2 * kTiles; g += 2) {
    Tasks::Sum *top = out + 16 * g, *bottom = top + 16 * 32 * kTiles;
    tile_load<0>(top, kPitch);
    tile_load<1>(top + 16, kPitch);
    tile_load<2>(bottom, kPitch);
    tile_load<3>(bottom + 16, kPitch);
    for (int p = first; p < panels; ++p) {
      tile_load<4>((panel[p].*weight)[b][0], 64);
      tile_load<6>((panel[p].*x)[g], 64);
      tile_dp_bf16<0, 4, 6>();
      tile_load<7>((panel[p].*x)[g + 1], 64);
      tile_dp_bf16<1, 4, 7>();
      tile_load<5>((panel[p].*weight)[b][1], 64);
      tile_dp_bf16<2, 5, 6>();
      tile_dp_bf16<3, 5, 7>();
    }
    tile_store_rows<0>(top, kPitch);
    tile_store_rows<1>(top + 16, kPitch);
    tile_store_rows<2>(bottom, kPitch);
    tile_store_rows<3>(bottom + 16, kPitch);
  }
}

ALWAYS_INLINE void store16(Output* to, __mmask16 columns, __m512 x) {
  _mm256_mask_storeu_epi16(to, columns, (__m256i)_mm512_cvtneps_pbh(x));
}

// The last tile has added to the block.
template <int kWidth, int kTiles>
void finish(const Tasks::Sum* sums, float factor, Output* to, int64_t stride, int64_t keys) {
  for (int64_t j = 0; j < keys; ++j)
    for (int t = 0; t < kWidth; t += 16)
      store16(to + j * stride + t, first_lanes(kWidth - t),
              _mm512_mul_ps(_mm512_loadu_ps(sums + j * 32 * kTiles + t), _mm512_set1_ps(factor)));
}

// dK and dV of the block of keys from `key` on: adds the tile in its turn.
void add_to_block(const Call& c, const Task& task, int64_t key, int64_t count, int panels, const Scratch& w) {
  const BackwardArgs& a = c.a;
  const Tasks::Turn turn = Tasks::turn_of(c, task, key);
  const int64_t width = smaller(kBc, a.Nk - key);
  int64_t pitch;
  Tasks::Sum* dk = a.dk ? c.dk_sums(task.pair, key, &pitch) : nullptr;
  Tasks::Sum* dv = a.dv ? c.dv_sums(task.pair, key, &pitch) : nullptr;
  Tasks::wait(turn);
  if (turn.is_first) {
    if (dk) memset(dk, 0, kBc * 32 * kDTiles * sizeof(float));
    if (dv) memset(dv, 0, kBc * 32 * kVDTiles * sizeof(float));
  }
  for (int b = 0; b < (count + 31) / 32; ++b) {
    int first = 0;  // panels before it see none of the 32 keys
    while (task.sees[32 * first + 31] <= key + 32 * b) ++first;
    if (dv) add_rows<kVDTiles>(w.panel, first, panels, &Panel::p, &Panel::dout_pairs, b, dv + 32 * b * 32 * kVDTiles);
    if (dk) add_rows<kDTiles>(w.panel, first, panels, &Panel::ds, &Panel::q_pairs, b, dk + 32 * b * 32 * kDTiles);
  }
  if (turn.is_last) {
    Output* to_k = element<Output>(a.dk, a.dk_stride, task.batch, task.kv_head, key);
    Output* to_v = element<Output>(a.dv, a.dv_stride, task.batch, task.kv_head, key);
    if (dk) finish<kD, kDTiles>(dk, a.scale, to_k, a.dk_stride[2], width);
    if (dv) finish<kDv, kVDTiles>(dv, 1, to_v, a.dv_stride[2], width);
  }
  Tasks::pass_on(turn);
}

void store_dq(const Call& c, const Task& task, int64_t first, const Panel& p) {
  const BackwardArgs& a = c.a;
  const __m512 scale = _mm512_set1_ps(a.scale);
  for (int t = 0; t < 2 * kDTiles && 16 * t < kD; ++t)
    for (int h = 0; h < 2; ++h) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(p.dq[t][h][i]);
      transpose16(r);
      for (int i = 0; i < 16 && first + 16 * h + i < task.rows; ++i) {
        Output* to = element<Output>(a.dq, a.dq_stride, task.batch, task.head, task.row + first + 16 * h + i);
        store16(to + 16 * t, first_lanes(kD - 16 * t), _mm512_mul_ps(_mm512_castsi512_ps(r[i]), scale));
      }
    }
}

struct Kernel {
  using Scratch = bf16::Scratch;

  static void run_tile(const Call& c, const Task& task, Scratch& w) {
    const BackwardArgs& a = c.a;
    const int panels = (task.rows + 31) / 32;
    const float product = __builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail);
    // Below the normal range the smallest normal number has the same effect: all weights are equal.
    const float scale_log2 = product < 0x1p-126f ? 0x1p-126f : product;
    for (int p = 0; p < panels; ++p) load_panel(c, task, 32 * p, w, w.panel[p]);
    const uint16_t* k = element<const uint16_t>(a.k, a.k_stride, task.batch, task.kv_head, 0);
    const uint16_t* v = element<const uint16_t>(a.v, a.v_stride, task.batch, task.kv_head, 0);
    const int64_t end = task.sees[task.rows - 1];
    for (int64_t key = 0; key < end; key += kBc) {
      const int64_t count = smaller(end - key, kBc);
      for (int b = 0; b < (count + 31) / 32; ++b) {
        const int64_t at = key + 32 * b;
        load_chunk(k + at * a.k_stride[2], a.k_stride[2], v + at * a.v_stride[2], a.v_stride[2],
                   smaller(end - at, 32), w, w.chunk[b]);
      }
      for (int p = 0; p < panels; ++p) {
        const int64_t keys = smaller(task.sees[32 * p + 31] - key, count);
        if (keys <= 0) continue;
        const int64_t full = larger(smaller(task.sees[32 * p] - key, keys), 0);
        const int64_t last = task.row + 32 * p + c.causal_shift() - key;  // that its row 0 sees
        const int64_t diagonal = a.causal == kFull ? kBc : smaller(last, kBc);
        step(w.panel[p], w, keys, full, diagonal, scale_log2, a.dq);
      }
      if (a.dk || a.dv) add_to_block(c, task, key, count, panels, w);
    }
    if (a.dq)
      for (int p = 0; p < panels; ++p) store_dq(c, task, 32 * p, w.panel[p]);
  }
};

int run(const BackwardArgs* a, void* shared, int64_t* next) {
  Scratch* scratch = Tasks::allocate<Scratch>();
  if (!scratch) return ENOMEM;
  configure_tiles();
  Tasks::run_heads<Kernel>(Call(*a, shared), next, *scratch);
  release_tiles();
  free(scratch);
  return 0;
}

constexpr BackwardKernel kKernel = {Tasks::shared_bytes, Tasks::begin, run};

}  // namespace bf16
}  // namespace
