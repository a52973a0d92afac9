// Attention forward on mma.sync: 128 query rows x 192 keys per tile, d = 128, dv = 128.
//
// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// sm80 bf16: Br=128 Bc=192, 131072 bytes of fast memory (Q tile 32768, K tile 49152, V tile 49152)
// sm80 fp16: Br=128 Bc=192, 131072 bytes of fast memory (Q tile 32768, K tile 49152, V tile 49152)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 2a28298f7f678bea
//
// Source: Dao, "FlashAttention-2" (arXiv:2307.08691), Algorithm 1, with its names: a block owns one tile Qi of kBr
// rows and runs over the key tiles Kj, Vj. S = Qi Kj^T and P live in registers; O is divided by l once, at the end.
// Scores stay raw, and exp is taken in base 2: c = scale * log2(e), p = exp2(c s - c m). `_log2` marks base-2 units.
//
// Holds after every key tile, for each row (m, l and O are registers of the warp that owns the row):
//   m is the largest raw score of the keys seen, -inf if there was none; it never decreases.
//   l = sum of p and O = sum of p v over the keys seen. m = -inf and l = 0 iff no key was seen (-inf counts as unseen).
//   A NaN score makes l and O NaN although the maximum drops it: emptiness is decided by l, never by m.
#include "forward.h"

#include "ptx_sm80.cuh"

namespace {

constexpr int kD = 128, kDv = 128;  // columns in memory
constexpr int kDPad = 128, kDvPad = 128;  // columns in shared memory: whole k16 steps, zero beyond kD and kDv
constexpr int kBr = 128, kBc = 192;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kM = 1, kWarpRows = 16 * kM;  // m16 tiles, and rows, of a warp: kBr = kWarpRows * kWarps
constexpr int kPanelD = 64, kPanelDv = 64;  // columns of one shared-memory panel
constexpr int kStepsAtOnce = 4;  // k16 steps in one pass of Qi Kj^T, of kDPad / 16 in all

// Shared memory, offsets in bytes. O takes the place of Q, K and V after the last key tile.
constexpr uint32_t kQAt = 0;  // Q tile: 32768 bytes
constexpr uint32_t kKAt = 32768;  // K tile: 49152 bytes
constexpr uint32_t kVAt = 81920;  // V tile: 49152 bytes
constexpr int kSharedBytes = 131072;

constexpr int64_t kMaxGrid = 2147483647;  // blocks of one launch
constexpr int64_t kMaxRows = 2147483647 - 2 * (kBr + kBc);  // rows and keys are counted in int
constexpr int64_t kSectionBytes = 16777216;  // K and V of the heads that run side by side: should stay in L2
constexpr float kNegInf = -__builtin_huge_valf();
constexpr float kLeastSum = 0x1p-9f;  // inside the domain of the error bound l is at least 2^-8 on a row that saw a key

struct Params {
  const char *q, *k, *v;
  char* o;
  float* lse;
  const int64_t* key_lengths;
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // bytes: batch, head, row
  int64_t k_step, v_step, k_tile, v_tile;                      // bytes: to a thread's next row, to the next key tile
  int hq, group;                                               // query heads; query heads per key head
  int nq, nk;
  int causal, delta;   // causal: row i sees key j iff j <= i + delta
  int tiles;           // query tiles per head
  int heads, section;  // batch * hq; how many of them run side by side
  float scale, scale_log2;
};

struct BFloat16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_bf16(d, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return cvt_rn_bf16x2(low, high); }
};

struct Float16 {
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_f16(d, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return cvt_rn_f16x2(low, high); }
};

using Scores = float[kM][kBc / 8][4];      // S, then P: this lane's share of kWarpRows x kBc, as mma accumulators
using Outputs = float[kM][kDvPad / 8][4];  // O
using Rows = float[kM][2];                 // one number per row of this lane: rows g and g + 8 of each m16 tile

// ---- Tiles in shared memory: panels of kPanel columns, row by row, the 16-byte chunks of a row permuted so that the
// 8 rows of an ldmatrix matrix, and the 8 lanes of one phase of a store, fall into 8 different groups of 4 banks.

template <int kRows, int kPanel>
constexpr uint32_t kPanelBytes = 2 * kRows * kPanel;

template <int kPanel>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  constexpr uint32_t kChunks = kPanel / 8, kRowsPerLine = 8 / kChunks;  // a line is 128 bytes, all 32 banks
  return 2 * kPanel * row + ((chunk ^ (row / kRowsPerLine % kChunks)) << 4);
}

// What this lane adds to the address of a 16 x 16 block for ldmatrix.x4. Matrix q covers rows 8 * (q % 2).. and columns
// 8 * (q / 2).. of the block; with kRowsLast the other way round. The two registers of a B operand are neighbours, so
// Kj is read rows last, Vj (transposed on the way) rows first; A wants Qi rows first. A step to the next 16 columns of
// the panel flips address bits that only the chunk occupies, hence the xor.
template <int kPanel, bool kRowsLast>
__device__ __forceinline__ void lane_offsets(uint32_t (&lane)[kPanel / 16]) {
  const uint32_t row = threadIdx.x % 8, q0 = threadIdx.x / 8 % 2, q1 = threadIdx.x / 16 % 2;
#pragma unroll
  for (int c = 0; c < kPanel / 16; ++c)
    lane[c] = swizzled<kPanel>(row + 8 * (kRowsLast ? q1 : q0), kRowsLast ? q0 : q1) ^ (32 * c);
}

// Address for this lane of block (r, c) of a tile with kRows rows, both counted in 16s.
template <int kRows, int kPanel>
__device__ __forceinline__ uint32_t block_at(uint32_t tile, const uint32_t (&lane)[kPanel / 16], int r, int c) {
  return tile + c / (kPanel / 16) * kPanelBytes<kRows, kPanel> + 32 * kPanel * r + lane[c % (kPanel / 16)];
}

// Rows between two copies of one thread: kPanel / 8 threads share a row.
template <int kPanel>
constexpr int kStep = kThreads / (kPanel / 8);

// The first 16 bytes of a tile in memory that this thread copies; rows are `row_bytes` apart.
template <int kPanel>
__device__ __forceinline__ const char* first_chunk(const char* tile, int64_t row_bytes) {
  return tile + threadIdx.x / (kPanel / 8) * row_bytes + threadIdx.x % (kPanel / 8) * 16;
}

// Starts the copy of a (kRows, kCols) tile, `src` being its first_chunk. Rows from `rows_left` on, and columns from
// kCols on, become zero and are not read: whatever lies there must not meet a P of 0, as 0 * NaN is NaN.
template <int kRows, int kCols, int kPanel>
__device__ __forceinline__ void load_tile(uint32_t tile, const char* src, int64_t step_bytes, int rows_left) {
  constexpr int kLanes = kPanel / 8, kRowStep = kStep<kPanel>;
  const int row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
  rows_left -= row;
#pragma unroll 8  // all passes but for blocks of few warps
  for (int r = 0; r < kRows; r += kRowStep, src += step_bytes) {
    if (kRows % kRowStep != 0 && row + r >= kRows) break;
    const uint32_t dst = tile + swizzled<kPanel>(row + r, chunk);
#pragma unroll
    for (int c = 0; c < kCols; c += kPanel) {
      const bool exists = r < rows_left && (kCols % 16 == 0 || c + 8 * chunk < kCols);
      cp_async_16_zfill(dst + c / kPanel * kPanelBytes<kRows, kPanel>, src + 2 * c, exists ? 16 : 0);
    }
  }
}

// ---- One key tile

// S = Qi Kj^T for the 16 kM rows of this warp  # (16 kM, kBc)
template <typename Element>
__device__ __forceinline__ void scores(Scores& s, uint32_t q, uint32_t k, const uint32_t (&lane_q)[kPanelD / 16],
                                       const uint32_t (&lane_k)[kPanelD / 16]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] = 0.f;
#pragma unroll 1  // fully unrolled, ptxas loads fragments so early that others spill
  for (int pass = 0; pass < kDPad / 16; pass += kStepsAtOnce) {
#pragma unroll
    for (int step = 0; step < kStepsAtOnce; ++step) {
      const uint32_t q_pass = q + pass / (kPanelD / 16) * kPanelBytes<kBr, kPanelD>;
      const uint32_t k_pass = k + pass / (kPanelD / 16) * kPanelBytes<kBc, kPanelD>;
      uint32_t a[kM][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) ldmatrix_x4(a[i], block_at<kBr, kPanelD>(q_pass, lane_q, i, step));
#pragma unroll
      for (int n = 0; n < kBc / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, block_at<kBc, kPanelD>(k_pass, lane_k, n, step));
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          Element::mma(s[i][2 * n], a[i], b[0], b[1]);
          Element::mma(s[i][2 * n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
}

// Keys from left[i][h] on, counted from this lane's first key, do not exist for row (i, h).
__device__ __forceinline__ void mask(Scores& s, const int (&left)[kM][2]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * n + e % 2 >= left[i][e / 2]) s[i][n][e] = kNegInf;
}

// Takes m, l and O over to the new maximum and turns S into P. l sums P before it is rounded to 16 bits, a partial sum
// in each of the four lanes of a row; they are added after the last tile.
__device__ __forceinline__ void softmax(Scores& s, Outputs& o, Rows& m, Rows& l, float scale_log2) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m_new = m[i][h];
#pragma unroll
      for (int n = 0; n < kBc / 8; ++n) m_new = fmaxf(m_new, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
      m_new = fmaxf(m_new, shfl_xor(m_new, 1));
      m_new = fmaxf(m_new, shfl_xor(m_new, 2));
      const float shift = m_new == kNegInf ? 0.f : m_new;  // (-inf) - (-inf) would be NaN
      const float alpha = ex2_approx_ftz((m[i][h] - shift) * scale_log2), shift_log2 = shift * scale_log2;
      m[i][h] = m_new;
#pragma unroll
      for (int n = 0; n < kDvPad / 8; ++n) {
        o[i][n][2 * h] *= alpha;
        o[i][n][2 * h + 1] *= alpha;
      }
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          s[i][n][e] = ex2_approx_ftz(fmaf(s[i][n][e], scale_log2, -shift_log2));
          sum += s[i][n][e];
        }
      l[i][h] = fmaf(l[i][h], alpha, sum);
    }
  }
}

// O += P Vj. Two n8 accumulators of S are one k16 operand: no data moves between lanes.  # (16 kM, kDvPad)
template <typename Element>
__device__ __forceinline__ void accumulate(Outputs& o, const Scores& p, uint32_t v,
                                           const uint32_t (&lane_v)[kPanelDv / 16]) {
#pragma unroll
  for (int c = 0; c < kBc / 16; ++c) {
    uint32_t a[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        a[i][e] = Element::pack(p[i][2 * c + e / 2][2 * (e % 2)], p[i][2 * c + e / 2][2 * (e % 2) + 1]);
#pragma unroll
    for (int n = 0; n < kDvPad / 16; ++n) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, block_at<kBc, kPanelDv>(v, lane_v, c, n));
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        Element::mma(o[i][2 * n], a[i], b[0], b[1]);
        Element::mma(o[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// ---- One block: one tile of query rows

struct Tile {
  int bh, batch, head, row0;  // bh = batch * hq + head
};

// Heads run in sections; inside a section tile by tile, its heads side by side, the last rows (the longest ones under
// a causal mask) first. Called again where a value is needed late, so that it does not occupy a register meanwhile.
__device__ __forceinline__ Tile locate(const Params& p) {
  const int block = ctaid_x(), rank = block % (p.section * p.tiles), first = block / (p.section * p.tiles) * p.section;
  const int together = min(p.section, p.heads - first), bh = first + rank % together;
  return {bh, bh / p.hq, bh % p.hq, (p.tiles - 1 - rank / together) * kBr};
}

__device__ __forceinline__ float row_sum(float partial) {
  partial += shfl_xor(partial, 1);
  return partial + shfl_xor(partial, 2);
}

// Divides by l and writes O and LSE. l = 0: the row saw no key, O = 0 and LSE = -inf. NaN is not 0 and stays NaN.
template <typename Element>
__device__ __forceinline__ void finish(const Params& p, uint32_t smem, const Outputs& o, const Rows& m, const Rows& l) {
  const Tile tile = locate(p);
  const int rows = min(kBr, p.nq - tile.row0), warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  char* out = p.o + tile.batch * p.o_stride[0] + tile.head * p.o_stride[1] + tile.row0 * p.o_stride[2];
  float* lse = p.lse + static_cast<int64_t>(tile.bh) * p.nq + tile.row0;
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = kWarpRows * warp + 16 * i + 8 * h + g;
      // With logits beyond 2^27 the rounding of m c can push every weight of a row below what P holds: NaN, not "no key".
      const float sum = row_sum(l[i][h]), l_row = sum < kLeastSum && m[i][h] != kNegInf ? __builtin_nanf("") : sum;
      const float inverse = l_row == 0.f ? 0.f : 1.f / l_row;
      if (t == 0 && row < rows)
        st_global_f32(lse + row, l_row == 0.f ? kNegInf : fmaf(m[i][h], p.scale, logf(l_row)));
#pragma unroll
      for (int n = 0; n < kDvPad / 8; ++n)
        st_shared_b32(smem + 8 * n / kPanelDv * kPanelBytes<kBr, kPanelDv> +
                          swizzled<kPanelDv>(row, n % (kPanelDv / 8)) + 4 * t,
                      Element::pack(o[i][n][2 * h] * inverse, o[i][n][2 * h + 1] * inverse));
    }
  __syncthreads();
  constexpr int kLanes = kPanelDv / 8;  // 16 bytes per thread, as in load_tile
  const int chunk = threadIdx.x % kLanes;
  for (int row = threadIdx.x / kLanes; row < rows; row += kThreads / kLanes)
#pragma unroll
    for (int c = 0; c < kDv; c += kPanelDv)
      if (kDv % 16 == 0 || c + 8 * chunk < kDv) {
        uint32_t r[4];
        ld_shared_b128(r, smem + c / kPanelDv * kPanelBytes<kBr, kPanelDv> + swizzled<kPanelDv>(row, chunk));
        st_global_b128(out + row * p.o_stride[2] + 2 * c + 16 * chunk, r);
      }
}

// One block per SM as the second bound: without it ptxas may choose a higher occupancy, and spill to get there.
template <typename Element>
__global__ void __launch_bounds__(kThreads, 1) attention_forward_d128_dv128_128x192(const __grid_constant__ Params p) {
  const Tile tile = locate(p);
  const int row0 = redux_max_s32(tile.row0), end = min(row0 + kBr, p.nq);  // rows of this block: row0 <= i < end

  // A length outside [0, nk] reads no key and gives NaN rows: l starts as NaN.
  const int64_t length = p.key_lengths ? ld_global_s64(p.key_lengths + tile.batch) : p.nk;
  const bool valid = 0 <= length && length <= p.nk;
  const int keys = redux_max_s32(valid ? static_cast<int>(length) : 0);
  const int seen_by_one = p.causal ? max(min(keys, end + p.delta), 0) : keys;       // the last row sees the most keys
  const int seen_by_all = p.causal ? max(min(keys, row0 + 1 + p.delta), 0) : keys;  // the first row sees the fewest
  const int key_tiles = redux_max_s32((seen_by_one + kBc - 1) / kBc);               // tiles j < key_tiles matter,
  const int whole_tiles = redux_max_s32(seen_by_all / kBc);                         // those below this need no mask

  const int64_t kv_head = tile.head / p.group;
  const char* q_tile = p.q + tile.batch * p.q_stride[0] + tile.head * p.q_stride[1] + row0 * p.q_stride[2];
  const char* q = first_chunk<kPanelD>(q_tile, p.q_stride[2]);
  const char* k = first_chunk<kPanelD>(p.k + tile.batch * p.k_stride[0] + kv_head * p.k_stride[1], p.k_stride[2]);
  const char* v = first_chunk<kPanelDv>(p.v + tile.batch * p.v_stride[0] + kv_head * p.v_stride[1], p.v_stride[2]);

  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t lane_q[kPanelD / 16], lane_k[kPanelD / 16], lane_v[kPanelDv / 16];
  lane_offsets<kPanelD, false>(lane_q);
  lane_offsets<kPanelD, true>(lane_k);
  lane_offsets<kPanelDv, false>(lane_v);

  Outputs o;
  Rows m, l;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[i][h] = kNegInf, l[i][h] = valid ? 0.f : __builtin_nanf("");
#pragma unroll
    for (int n = 0; n < kDvPad / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][n][e] = 0.f;
  }

  if (key_tiles > 0) {
    load_tile<kBr, kD, kPanelD>(smem + kQAt, q, kStep<kPanelD> * p.q_stride[2], p.nq - row0);
    load_tile<kBc, kD, kPanelD>(smem + kKAt, k, p.k_step, keys);
    cp_async_commit();
  }
  // K and V have one buffer each: Vj arrives during Qi Kj^T, the next K after it.
#pragma unroll 1
  for (int j = 0; j < key_tiles; ++j) {
    cp_async_wait<0>();
    __syncthreads();  // Kj is there (and Qi, for j = 0); nobody reads the old V any more
    load_tile<kBc, kDv, kPanelDv>(smem + kVAt, v, p.v_step, keys - j * kBc);
    cp_async_commit();
    v += p.v_tile;

    Scores s;
    scores<Element>(s, smem + kQAt + 2 * kPanelD * kWarpRows * warp, smem + kKAt, lane_q, lane_k);

    cp_async_wait<0>();
    __syncthreads();  // Vj is there; nobody reads Kj any more
    if (j + 1 < key_tiles) {
      k += p.k_tile;
      load_tile<kBc, kD, kPanelD>(smem + kKAt, k, p.k_step, keys - (j + 1) * kBc);
      cp_async_commit();
    }
    if (j >= whole_tiles) {  // the same for the whole block
      int left[kM][2];
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + kWarpRows * warp + 16 * i + 8 * h + g;
          left[i][h] = (p.causal ? min(keys, row + 1 + p.delta) : keys) - j * kBc - 2 * t;
        }
      mask(s, left);
    }
    softmax(s, o, m, l, p.scale_log2);
    accumulate<Element>(o, s, smem + kVAt, lane_v);
  }

  __syncthreads();  // nobody reads Q, K or V any more
  finish<Element>(p, smem, o, m, l);
}

// ---- Host

// A grid holds at most kMaxGrid blocks; what does not fit waits for the next launch, in whole batches.
template <typename Element>
cudaError_t launch(const ForwardArgs& args, Params p, cudaStream_t stream) {
  auto kernel = attention_forward_d128_dv128_128x192<Element>;
  const int64_t at_once = kMaxGrid / (args.Hq * p.tiles);
  if (at_once == 0) return cudaErrorInvalidValue;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  for (int64_t batch = 0; error == cudaSuccess && batch < args.B; batch += at_once) {
    const int64_t batches = args.B - batch < at_once ? args.B - batch : at_once;
    p.heads = static_cast<int>(batches * args.Hq);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(p.heads * p.tiles));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, p);
    p.q += batches * p.q_stride[0];
    p.k += batches * p.k_stride[0];
    p.v += batches * p.v_stride[0];
    p.o += batches * p.o_stride[0];
    p.lse += batches * args.Hq * args.Nq;
    if (p.key_lengths) p.key_lengths += batches;
  }
  return error;
}

}  // namespace

// Starts the kernel for `dtype` (kBFloat16 or kFloat16) on `stream`. Returns a cudaError_t: cudaErrorInvalidValue for
// another dtype, for more rows or keys than kMaxRows, and for one batch that fills more than a grid.
extern "C" int attention_forward_sm80(const ForwardArgs* args, int dtype, void* stream) {
  if (args->Nq > kMaxRows || args->Nk > kMaxRows) return cudaErrorInvalidValue;
  Params p = {};
  p.q = static_cast<const char*>(args->q);
  p.k = static_cast<const char*>(args->k);
  p.v = static_cast<const char*>(args->v);
  p.o = static_cast<char*>(args->o);
  p.lse = static_cast<float*>(args->lse);
  p.key_lengths = args->key_lengths;
  for (int i = 0; i < 3; ++i) {
    p.q_stride[i] = 2 * args->q_stride[i];
    p.k_stride[i] = 2 * args->k_stride[i];
    p.v_stride[i] = 2 * args->v_stride[i];
    p.o_stride[i] = 2 * args->o_stride[i];
  }
  p.k_step = kStep<kPanelD> * p.k_stride[2];
  p.v_step = kStep<kPanelDv> * p.v_stride[2];
  p.k_tile = kBc * p.k_stride[2];
  p.v_tile = kBc * p.v_stride[2];
  p.hq = static_cast<int>(args->Hq);
  p.group = static_cast<int>(args->Hq / args->Hkv);
  p.nq = static_cast<int>(args->Nq);
  p.nk = static_cast<int>(args->Nk);
  p.causal = args->causal != kFull;
  p.delta = args->causal == kBottomRight ? p.nk - p.nq : 0;
  p.tiles = (p.nq + kBr - 1) / kBr;
  p.scale = static_cast<float>(args->scale);
  p.scale_log2 = static_cast<float>(args->scale * 1.4426950408889634);
  // Without a causal mask all tiles are equally long, and one head after the other reads K and V from L2 best.
  const int64_t head_bytes = 2 * args->Nk * (kD + kDv) / p.group + 1, most = kMaxGrid / p.tiles;
  const int64_t section = p.causal ? kSectionBytes / head_bytes : 1;
  p.section = static_cast<int>(section < 1 ? 1 : section < most ? section : most);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (dtype == kBFloat16) return launch<BFloat16>(*args, p, on);
  if (dtype == kFloat16) return launch<Float16>(*args, p, on);
  return cudaErrorInvalidValue;
}
