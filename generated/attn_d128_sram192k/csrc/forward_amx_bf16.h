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
// Templates: sha256 d3c17774ef63ecfb
//
// forward_amx_bf16.h: forward attention in bf16 on AMX. Br = 128 (4 panels), Bc = 96.
//
//   for each tile of Br queries: one task
//     for each block of 96 keys: K and V^T are packed as A tiles and stay in L2 for all panels
//       for each panel: Q and O stay in L1
//         for each tile of Bc keys: S, reference, P in place of S, O
//
// P is the weights rounded to bf16 (half away from zero). l sums the weights before rounding, for the LSE; l_rounded
// sums them after, and divides O: the error of P then moves O only as far as V varies, and one visible key gives v.
#pragma once

#include "forward_amx.h"

namespace {
namespace bf16 {

constexpr int kBr = 128;
constexpr int kBc = 96;
constexpr int kPanels = kBr / 32;
constexpr int64_t kL2Keys = 96;
constexpr int64_t kL2Chunks = kL2Keys / 32;
// Sum of a row's weights over one tile above which the reference moves; at a fresh reference it is 2 Bc at most.
constexpr float kMostWeight = 384;

using KChunk = uint16_t[kDTiles][2][16][32];  // 32 keys as A tiles: [dim tile][key half][key][dim]
using VChunk = uint16_t[kVTiles][16][32];     // V^T of 32 keys as A tiles: [column tile][column][key]

struct Panel {
  alignas(64) uint16_t q[kDTiles][2][16][32];  // Q^T as B tiles: [dim tile][row half][pair of dims][row, dim]
  State state;
  alignas(64) float l_rounded[32];             // sum of the weights as P holds them
};

struct Work {
  Panel panel[kPanels];
  alignas(64) ScoreTile s[kBc / 16][2];  // S^T: [key tile][row half]; P^T of keys 32 b .. 32 b + 31 replaces s[2 b]
};
static_assert(sizeof(Work) == 112640, "what the plan counts per worker, K and V blocks apart");

// 32 columns of a row from column 16 g on; zeros for columns and rows that are not there.
ALWAYS_INLINE __m512i load_columns(const uint16_t* row, bool present, int g) {
  return _mm512_maskz_loadu_epi16(present ? 0xffffffff : 0, row + 16 * g);
}

// V^T of `keys` <= 32 keys; the absent ones are zeros. Word j of a row: keys 2 j and 2 j + 1 of one column.
void pack_v(const uint16_t* v, int64_t stride, int keys, VChunk& out) {
  for (int g = 0; g < kVTiles; g += 2) {
    __m512i low[16], high[16];  // columns 0-3, 8-11, 16-19, 24-27 of the 32, and those 4 further on
    for (int j = 0; j < 16; ++j) {
      const __m512i even = load_columns(v + 2 * j * stride, 2 * j < keys, g);
      const __m512i odd = load_columns(v + (2 * j + 1) * stride, 2 * j + 1 < keys, g);
      low[j] = _mm512_unpacklo_epi16(even, odd);
      high[j] = _mm512_unpackhi_epi16(even, odd);
    }
    transpose16(low);
    transpose16(high);
    for (int i = 0; i < 16; ++i) {
      const int column = i / 4 * 8 + i % 4;
      _mm512_store_si512(out[g + column / 16][column % 16], low[i]);
      _mm512_store_si512(out[g + column / 16][column % 16 + 4], high[i]);
    }
  }
}

// 32 dims of a row from dim 32 t on.
ALWAYS_INLINE __m512i load_dims(const uint16_t* row, int t) {
  return _mm512_loadu_si512(row + 32 * t);
}

// `keys` <= 32 keys; the absent ones are zeros.
void pack_k(const uint16_t* k, int64_t stride, int keys, KChunk& out) {
  for (int j = 0; j < 32; ++j)
    for (int t = 0; t < kDTiles; ++t)
      _mm512_store_si512(out[t][j / 16][j % 16], j < keys ? load_dims(k + j * stride, t) : _mm512_setzero_si512());
}

// Rows row0 .. row0 + 31 of Q as pairs; beyond the last row it is repeated, and never stored.
void load_q(const uint16_t* q, int64_t stride, int64_t row0, int64_t rows, Panel& p) {
  for (int t = 0; t < kDTiles; ++t)
    for (int h = 0; h < 2; ++h) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_dims(q + min64(row0 + 16 * h + i, rows - 1) * stride, t);
      transpose16(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(p.q[t][h][i], r[i]);
    }
}

// S^T of 32 keys, unscaled.
ALWAYS_INLINE void scores(const KChunk& k, const Panel& p, ScoreTile (*s)[2]) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
#pragma GCC unroll 4
  for (int t = 0; t < kDTiles; ++t) {
    tile_load<4>(k[t][0], 64);
    tile_load<6>(p.q[t][0], 64);
    tile_dp_bf16<0, 4, 6>();
    tile_load<7>(p.q[t][1], 64);
    tile_dp_bf16<1, 4, 7>();
    tile_load<5>(k[t][1], 64);
    tile_dp_bf16<2, 5, 6>();
    tile_dp_bf16<3, 5, 7>();
  }
  tile_store<0>(s[0][0]);
  tile_store<1>(s[0][1]);
  tile_store<2>(s[1][0]);
  tile_store<3>(s[1][1]);
}

// Two keys of 16 rows as words of bf16, nearest with ties away from zero. A NaN stays one: its low bits are 0 here.
ALWAYS_INLINE __m512i pair_bf16(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i high_to_low = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(_mm512_add_epi32(_mm512_castps_si512(odd), half), 0x3333333333333333,
                                  _mm512_add_epi32(_mm512_castps_si512(even), half), high_to_low);
}

// P^T = 2^(c S^T - m) in place of S^T, and its row sums. Returns false, and leaves the sums alone, if one is above
// kMostWeight, unless `accept`. Fetches the V^T of the chunk on the way.
template <bool kLongReference>
ALWAYS_INLINE bool weights(Panel& p, ScoreTile (*s)[2], int chunks, __m512 c, const VChunk* v, bool accept) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);  // 1.0 in bf16
  const __m512 m[2] = {reference(p.state, 0), reference(p.state, 1)};
  const __m512 m_low[2] = {_mm512_load_ps(p.state.m_low), _mm512_load_ps(p.state.m_low + 16)};
  __m512 even_sum[2], odd_sum[2], rounded_sum[2];
  for (int h = 0; h < 2; ++h) even_sum[h] = odd_sum[h] = rounded_sum[h] = _mm512_setzero_ps();
  for (int b = 0; b < chunks; ++b)
#pragma GCC unroll 1
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 8
      for (int z = 0; z < kVTiles; ++z) __builtin_prefetch(v[b][z][i]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const float* keys = s[2 * b + i / 8][h][2 * i % 16];
        __m512 even = _mm512_fmsub_ps(_mm512_load_ps(keys), c, m[h]);
        __m512 odd = _mm512_fmsub_ps(_mm512_load_ps(keys + 16), c, m[h]);
        if constexpr (kLongReference) {
          even = _mm512_sub_ps(even, m_low[h]);
          odd = _mm512_sub_ps(odd, m_low[h]);
        }
        even = exp2_degree4(even);
        odd = exp2_degree4(odd);
        const __m512i pair = pair_bf16(even, odd);
        even_sum[h] = _mm512_add_ps(even_sum[h], even);
        odd_sum[h] = _mm512_add_ps(odd_sum[h], odd);
        rounded_sum[h] = _mm512_dpbf16_ps(rounded_sum[h], (__m512bh)pair, ones);
        _mm512_store_si512(s[2 * b][h][i], pair);
      }
    }
  const __m512 most = _mm512_set1_ps(kMostWeight);
  const __m512 sum[2] = {_mm512_add_ps(even_sum[0], odd_sum[0]), _mm512_add_ps(even_sum[1], odd_sum[1])};
  const int above = _mm512_cmp_ps_mask(sum[0], most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(sum[1], most, _CMP_GT_OQ);
  if (__builtin_expect(above && !accept, 0)) return false;
  for (int h = 0; h < 2; ++h) {
    _mm512_store_ps(p.state.l + 16 * h, _mm512_add_ps(_mm512_load_ps(p.state.l + 16 * h), sum[h]));
    _mm512_store_ps(p.l_rounded + 16 * h, _mm512_add_ps(_mm512_load_ps(p.l_rounded + 16 * h), rounded_sum[h]));
  }
  return true;
}

// O^T += V^T P^T, 32 columns at a time.
ALWAYS_INLINE void values(Panel& p, const ScoreTile (*s)[2], int chunks, const VChunk* v) {
  for (int g = 0; g < kVTiles; g += 2) {
    ScoreTile* o0 = p.state.o[g];
    ScoreTile* o1 = p.state.o[g + 1];
    tile_load<0>(o0[0], 64);
    tile_load<1>(o0[1], 64);
    tile_load<2>(o1[0], 64);
    tile_load<3>(o1[1], 64);
    for (int b = 0; b < chunks; ++b) {
      tile_load<4>(v[b][g], 64);
      tile_load<6>(s[2 * b][0], 64);
      tile_dp_bf16<0, 4, 6>();
      tile_load<7>(s[2 * b][1], 64);
      tile_dp_bf16<1, 4, 7>();
      tile_load<5>(v[b][g + 1], 64);
      tile_dp_bf16<2, 5, 6>();
      tile_dp_bf16<3, 5, 7>();
    }
    tile_store<0>(o0[0]);
    tile_store<1>(o0[1]);
    tile_store<2>(o1[0]);
    tile_store<3>(o1[1]);
  }
}

// One panel against the `keys` <= kBc keys of the chunks from k[0], v[0] on. Every row sees the first `full` of them,
// row r those up to `diagonal` + r. The phases follow each other: overlapping the weights with the products of neighbouring
// tiles gained nothing, because with a product in flight the weights take 1.4 times as long.
[[gnu::noinline]] void attend(Panel& p, Work& w, const KChunk* k, const VChunk* v, int keys, int full, int diagonal,
                              float scale_log2) {
  const int chunks = (keys + 31) / 32;
  const __m512 c = _mm512_set1_ps(scale_log2);
  ScoreTile(*s)[2] = w.s;
  for (bool raise = lacks_reference(p.state);; raise = true) {
    for (int b = 0; b < chunks; ++b) scores(k[b], p, s + 2 * b);
    hide(s, full, keys, diagonal);
    if (__builtin_expect(raise, 0)) {
      __m512 alpha[2];
      raise_reference(p.state, s, chunks, c, alpha);
      for (int h = 0; h < 2; ++h)
        _mm512_store_ps(p.l_rounded + 16 * h, _mm512_mul_ps(_mm512_load_ps(p.l_rounded + 16 * h), alpha[h]));
    }
    const bool fits = __builtin_expect(has_long_reference(p.state), 0) ? weights<true>(p, s, chunks, c, v, raise)
                                                                       : weights<false>(p, s, chunks, c, v, raise);
    if (fits) break;
  }
  values(p, s, chunks, v);
}

// How far an L2 block of one head has been packed, in chunks of 32 keys.
struct Progress {
  int32_t claimed, packed;
};

// Memory that the workers share.
struct Packed {
  int64_t chunks, blocks;  // of one head
  VChunk* v;
  KChunk* k;
  Progress* progress;
};

Packed packed(const ForwardArgs& a, void* shared) {
  const int64_t heads = a.B * a.Hkv, chunks = (a.Nk + 31) / 32;
  VChunk* v = static_cast<VChunk*>(shared);
  KChunk* k = reinterpret_cast<KChunk*>(v + heads * chunks);
  return {chunks, (chunks + kL2Chunks - 1) / kL2Chunks, v, k, reinterpret_cast<Progress*>(k + heads * chunks)};
}

int64_t shared_bytes(const ForwardArgs* a) {
  const int64_t chunks = (a->Nk + 31) / 32, blocks = (chunks + kL2Chunks - 1) / kL2Chunks;
  return a->B * a->Hkv * (chunks * int64_t(sizeof(VChunk) + sizeof(KChunk)) + blocks * int64_t(sizeof(Progress)));
}

// Before the workers start: nothing is packed.
void prepare(const ForwardArgs* args, void* shared, int64_t* next) {
  const Packed packs = packed(*args, shared);
  const int64_t total = args->B * args->Hkv * packs.blocks, share = 4096;
  for (int64_t x; (x = __atomic_fetch_add(next, share, __ATOMIC_RELAXED)) < total;)
    memset(packs.progress + x, 0, min64(share, total - x) * sizeof(Progress));
}

// Returns when the L2 block is packed: the workers that need it share its chunks, and the last to finish is waited for.
// A worker waits only while it holds no chunk itself. Keys at and beyond the key length nk are not read.
void pack_block(const ForwardArgs& a, const Packed& packs, int64_t b, int64_t h, int64_t nk, int64_t block) {
  const int64_t head = b * a.Hkv + h, chunk0 = block * kL2Chunks;
  const int32_t total = int32_t(min64(kL2Chunks, (nk + 31) / 32 - chunk0));
  Progress& progress = packs.progress[head * packs.blocks + block];
  if (__atomic_load_n(&progress.packed, __ATOMIC_ACQUIRE) == total) return;
  for (int32_t c; (c = __atomic_fetch_add(&progress.claimed, 1, __ATOMIC_RELAXED)) < total;) {
    const int64_t chunk = chunk0 + c, j0 = 32 * chunk;
    const int keys = int(min64(32, nk - j0));
    const uint16_t* k = static_cast<const uint16_t*>(a.k) + b * a.k_stride[0] + h * a.k_stride[1] + j0 * a.k_stride[2];
    const uint16_t* v = static_cast<const uint16_t*>(a.v) + b * a.v_stride[0] + h * a.v_stride[1] + j0 * a.v_stride[2];
    pack_k(k, a.k_stride[2], keys, packs.k[head * packs.chunks + chunk]);
    pack_v(v, a.v_stride[2], keys, packs.v[head * packs.chunks + chunk]);
    __atomic_fetch_add(&progress.packed, 1, __ATOMIC_RELEASE);
  }
  for (int spins = 0; __atomic_load_n(&progress.packed, __ATOMIC_ACQUIRE) < total; ++spins)
    if (spins < 1000) _mm_pause();
    else sched_yield();
}

// Word r: column 2 i and column 2 i + 1 of row r, rounded to nearest even.
ALWAYS_INLINE __m512i output_pair(__m512 even, __m512 odd) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// `count` rows of O.
void store_o(const Panel& p, uint16_t* o, int64_t stride, int count) {
  for (int h = 0; h < 2; ++h) {
    const __m512 scale = inverse(p.state, h, p.l_rounded + 16 * h);
    for (int v = 0; v < kVTiles; v += 2) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i) {
        const float* columns = p.state.o[v + i / 8][h][2 * i % 16];
        const __m512 even = _mm512_mul_ps(_mm512_load_ps(columns), scale);
        const __m512 odd = _mm512_mul_ps(_mm512_load_ps(columns + 16), scale);
        rows[i] = output_pair(even, odd);
      }
      transpose16(rows);
      for (int i = 0; i < 16 && 16 * h + i < count; ++i)
        _mm512_storeu_si512(o + (16 * h + i) * stride + 16 * v, rows[i]);
    }
  }
}


// Queries i0 .. i0 + kBr - 1 of one head.
void query_tile(const ForwardArgs& a, const Packed& packs, int64_t b, int64_t h, int64_t i0, Work& w) {
  const int64_t hkv = h / (a.Hq / a.Hkv), head = b * a.Hkv + hkv, nk = key_length(a, b), offset = causal_offset(a);
  const int64_t rows = min64(kBr, a.Nq - i0);
  const int panels = int((rows + 31) / 32);
  // Not below 2^-126: 0 times a masked -inf is NaN. The scores of finite inputs then differ by less than rounding does.
  const float scale_log2 = __builtin_fmaxf(float(a.scale * 1.44269504088896340736), 0x1p-126f);
  const KChunk* k = packs.k + head * packs.chunks;
  const VChunk* v = packs.v + head * packs.chunks;
  const uint16_t* q = static_cast<const uint16_t*>(a.q) + b * a.q_stride[0] + h * a.q_stride[1];
  for (int p = 0; p < panels; ++p) {
    load_q(q, a.q_stride[2], i0 + 32 * p, a.Nq, w.panel[p]);
    clear(w.panel[p].state);
    memset(w.panel[p].l_rounded, 0, sizeof w.panel[p].l_rounded);
  }

  const int64_t end = a.causal ? min64(nk, i0 + rows + offset) : nk;  // keys that the last row sees
  for (int64_t k0 = 0; k0 < end; k0 += kL2Keys) {
    pack_block(a, packs, b, hkv, nk, k0 / kL2Keys);
    for (int p = 0; p < panels; ++p) {
      const int64_t row0 = i0 + 32 * p;
      const int64_t seen = a.causal ? min64(nk, min64(row0 + 32, a.Nq) + offset) : nk;
      for (int64_t j0 = k0; j0 < min64(seen, k0 + kL2Keys); j0 += kBc) {
        const int keys = int(min64(kBc, seen - j0));
        const int diagonal = a.causal ? int(min64(kBc, row0 + offset - j0)) : kBc;  // last key of the first row
        const int full = int(max64(0, min64(keys, diagonal + 1)));
        attend(w.panel[p], w, k + j0 / 32, v + j0 / 32, keys, full, diagonal, scale_log2);
      }
    }
  }

  for (int p = 0; p < panels; ++p) {
    const int64_t row0 = i0 + 32 * p;
    const int count = int(min64(32, a.Nq - row0));
    auto* o = static_cast<uint16_t*>(a.o) + b * a.o_stride[0] + h * a.o_stride[1] + row0 * a.o_stride[2];
    store_o(w.panel[p], o, a.o_stride[2], count);
    store_lse(w.panel[p].state, static_cast<float*>(a.lse) + (b * a.Hq + h) * a.Nq + row0, count);
  }
}

int run(const ForwardArgs* args, void* shared, int64_t* next) {
  const ForwardArgs& a = *args;
  Work* w = static_cast<Work*>(aligned_alloc(4096, (sizeof(Work) + 4095) / 4096 * 4096));
  if (!w) return ENOMEM;
  const Packed packs = packed(a, shared);
  const int64_t tiles = (a.Nq + kBr - 1) / kBr, total = a.B * a.Hq * tiles;
  configure_tiles();
  for (int64_t x; (x = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < total;) {
    const int64_t bh = x / tiles, i0 = (tiles - 1 - x % tiles) * kBr;  // the longest causal tile of a head first
    query_tile(a, packs, bh / a.Hq, bh % a.Hq, i0, *w);
  }
  release_tiles();
  free(w);
  return 0;
}

constexpr ForwardKernel kKernel = {shared_bytes, prepare, run};

}  // namespace bf16
}  // namespace
