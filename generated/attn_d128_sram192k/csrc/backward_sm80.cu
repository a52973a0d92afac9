// Attention backward on mma.sync: 64 query rows x 128 keys per tile, d = 128, dv = 128.
//
// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// sm80 bf16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// sm80 fp16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 0aaea1d2f8395d96
//
// Source: Dao, "FlashAttention-2" (arXiv:2307.08691), Algorithm 2, with its names. P is computed again from the LSE of
// the forward pass; scores stay raw and exp is taken in base 2, `_log2` marks base-2 units. Per row of Q
//   D = rowsum(dO o O) - dLSE      P = exp2(c s - LSE log2 e), c = scale log2 e      dS = P o (dO V^T - D)
//   dV = P^T dO      dK = scale dS^T Q      dQ = scale dS K
//
// Kernels, one after the other:
//   prepare    writes LSE log2 e and D of every row to `rows`, and zeroes `sums`, the float32 dQ / scale
//   key_tiles  a block owns Kj and Vj and runs over the tiles Qi, dOi of all query heads that share them: dK and dV
//              stay in registers, dS K of every tile is added to `sums`; the order differs from run to run
//   finish_dq  dQ = scale sums
// Where equal calls must give equal bits, and where dQ alone is wanted:
//   prepare, key_tiles (both without `sums`; if dK or dV is wanted), and
//   query_tiles  a block owns Qi and dOi and runs over Kj, Vj: dQ stays in registers
//
// Holds always: a pair that the mask hides adds exactly 0; an empty row (LSE = -inf) has dQ = 0 and adds nothing; a key
// length outside [0, nk] makes all gradients of its batch NaN.
#include "backward_params_sm80.cuh"
#include "backward_query_sm80.cuh"
#include "backward_tiles_sm80.cuh"

namespace {

// ---- LSE log2 e and D of every row, 8 lanes per row. LSE = -inf becomes +inf: then every P of the row is 0.

template <typename Element, bool kSums>
__global__ void __launch_bounds__(128) prepare(const __grid_constant__ Params p) {
  const int block = ctaid_x(), bh = block / p.row_tiles, first = block % p.row_tiles * kBr;
  const int batch = bh / p.hq, head = bh % p.hq, lane = threadIdx.x % 8;
  const char* o = p.o + batch * p.o_stride[0] + head * p.o_stride[1];
  const char* dout = p.dout + batch * p.dout_stride[0] + head * p.dout_stride[1];
  for (int r = threadIdx.x / 8; r < kBr; r += 16) {
    const int i = first + r;
    float sum = 0.f;
    if (i < p.nq)
      for (int chunk = lane; chunk < kDv / 8; chunk += 8) {
        uint32_t x[4], y[4];
        ld_global_b128(x, o + i * p.o_stride[2] + 16 * chunk);
        ld_global_b128(y, dout + i * p.dout_stride[2] + 16 * chunk);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum = fmaf(Element::widen(x[e] & 0xffff), Element::widen(y[e] & 0xffff), sum);
          sum = fmaf(Element::widen(x[e] >> 16), Element::widen(y[e] >> 16), sum);
        }
      }
    for (int step = 1; step < 8; step *= 2) sum += shfl_xor(sum, step);
    if (lane == 0) {
      float lse = -kInf;
      if (i < p.nq) {
        lse = ld_global_f32(p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1] + i * p.lse_stride[2]);
        if (p.dlse)
          sum -= ld_global_f32(p.dlse + batch * p.dlse_stride[0] + head * p.dlse_stride[1] + i * p.dlse_stride[2]);
      }
      const bool empty = lse == -kInf;
      float* row = p.rows + 2 * (static_cast<int64_t>(block) * kBr + r);
      st_global_f32(row, empty ? kInf : lse == kInf ? __builtin_nanf("") : lse * 1.44269504f);
      st_global_f32(row + 1, empty ? 0.f : sum);
    }
  }
  if (kSums) {
    const uint32_t zero[4] = {0, 0, 0, 0};
    for (int x = 4 * threadIdx.x; x < kTileSums; x += 4 * 128)
      st_global_b128(p.sums + static_cast<int64_t>(block) * kTileSums + x, zero);
  }
}

// ---- dK and dV of one key tile, and what it adds to dQ

using Scores = float[kM][kRows / 8][4];  // S^T, then P^T; dP^T, then dS^T

// Turns S^T into P^T and dP^T into dS^T; `rows` holds LSE log2 e and D of this lane's first rows.
__device__ __forceinline__ void weights(Scores& s, Scores& dp, uint32_t rows, float scale_log2) {
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
    uint32_t r[4];  // of rows 8 n + 2 t and 8 n + 2 t + 1
    ld_shared_b128(r, rows + 64 * n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float lse_log2 = s32_as_float(r[2 * (e % 2)]), d = s32_as_float(r[2 * (e % 2) + 1]);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        s[i][n][e] = ex2_approx_ftz(fmaf(s[i][n][e], scale_log2, -lse_log2));
        dp[i][n][e] = s[i][n][e] * (dp[i][n][e] - d);
      }
    }
  }
}

// Makes P and dS of the pairs that do not exist 0; key and row are this lane's first ones.
__device__ __forceinline__ void mask(const Params& p, Scores& s, Scores& dp, int key, int row, int keys) {
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int left = limit_of(p, row + 8 * n + e % 2, keys) - key;
#pragma unroll
      for (int i = 0; i < kM; ++i)
        if (16 * i + 8 * (e / 2) >= left) s[i][n][e] = 0.f, dp[i][n][e] = 0.f;
    }
}

// A rounded P^T or dS^T of this warp to its place in a tile of kBc keys x kBr rows.
__device__ __forceinline__ void share(uint32_t tile, const uint32_t (&x)[kM][kRows / 8][2], int key, int row) {
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = row + 8 * n;
        st_shared_b32(tile + column / kPanelP * kPanelBytes<kBc, kPanelP> +
                          swizzled<kPanelP>(key + 16 * i + 8 * h, column % kPanelP / 8) + threadIdx.x % 4 * 4,
                      x[i][n][h]);
      }
}

template <typename Element, bool kSums>
__global__ void __launch_bounds__(kThreads, 1) key_tiles(const __grid_constant__ Params p) {
  const Place place = place_of(p);  // under a causal mask the first keys have the most rows, and start first
  const int key0 = redux_max_s32(place.tile * kBc), batch = place.bh / p.hkv, kv_head = place.bh % p.hkv;
  const Keys seen = keys_of(p, batch);
  const int keys = seen.count, first_row = p.causal ? max(key0 - p.delta, 0) : 0;  // rows before see none of the keys
  const int first_tile = redux_max_s32(key0 < keys ? min(first_row / kBr, p.row_tiles) : p.row_tiles);
  const int steps = redux_max_s32((p.row_tiles - first_tile) * p.group);

  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int part = warp % kRowWarps;  // of the rows, and of the columns of dK and dV
  const int warp_key = warp / kRowWarps * kKeys, warp_row = part * kRows, key = warp_key / 16, row = warp_row / 16;
  const int columns_d = columns_of<kDPad / 16, kRowWarps>(part), columns_v = columns_of<kDvPad / 16, kRowWarps>(part);
  const Tile<kBc, kPanelD> k(smem + kKAt);
  const Tile<kBc, kPanelDv> v(smem + kVAt);
  const Tile<kBc, kPanelP> p_shared(smem + kPAt);
  const Tile<kBc, kPanelP> ds_shared(smem + kDsAt);

  auto load = [&](int stage, int head, int tile) {  // head: of all query heads
    const int row0 = tile * kBr;
    load_tile<kThreads, kBr, kD, kPanelD>(
        smem + kQAt + stage * kQStage, p.q + batch * p.q_stride[0] + head * p.q_stride[1] + row0 * p.q_stride[2],
        p.q_stride[2], first_row - row0, p.nq - row0);
    load_tile<kThreads, kBr, kDv, kPanelDv>(
        smem + kDoAt + stage * kDoStage,
        p.dout + batch * p.dout_stride[0] + head * p.dout_stride[1] + row0 * p.dout_stride[2], p.dout_stride[2],
        first_row - row0, p.nq - row0);
    if (threadIdx.x < kBr / 2)  // 16 bytes: two rows
      cp_async_16(smem + kRowsAt + stage * kRowsStage + 16 * threadIdx.x,
                  p.rows + 2 * ((static_cast<int64_t>(batch * p.hq + head) * p.row_tiles + tile) * kBr) +
                      4 * threadIdx.x);
    cp_async_commit();
  };

  float dk[kM][2 * kNd][4], dv[kM][2 * kNv][4];
  clear(dk);
  clear(dv);
  if (steps > 0) {
    load_tile<kThreads, kBc, kD, kPanelD>(
        smem + kKAt, p.k + batch * p.k_stride[0] + kv_head * p.k_stride[1] + key0 * p.k_stride[2], p.k_stride[2], 0,
        keys - key0);
    load_tile<kThreads, kBc, kDv, kPanelDv>(
        smem + kVAt, p.v + batch * p.v_stride[0] + kv_head * p.v_stride[1] + key0 * p.v_stride[2], p.v_stride[2], 0,
        keys - key0);
    load(0, kv_head * p.group, first_tile);
  }
  int head = kv_head * p.group, tile = first_tile;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages, row0 = tile * kBr;
    const int next_tile = tile + 1 < p.row_tiles ? tile + 1 : first_tile, next_head = head + (tile + 1 == p.row_tiles);
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles are there; nobody reads those of the step before any more
    if (kStages > 1 && step + 1 < steps) load((step + 1) % kStages, next_head, next_tile);
    const Tile<kBr, kPanelD> q(smem + kQAt + stage * kQStage);
    const Tile<kBr, kPanelDv> dout(smem + kDoAt + stage * kDoStage);

    Scores s, dp;  // S^T = Kj Qi^T and dP^T = Vj dOi^T  # (kKeys, kRows)
    clear(s);
    multiply<Element, kDPad / 16, kStepsAtOnce>(
        s, kRows / 16, [&](auto& r, int i, int c) { k.a(r, key + i, c); },
        [&](auto& r, int n, int c) { q.bt(r, row + n, c); });
    clear(dp);
    multiply<Element, kDvPad / 16, kStepsAtOnce>(
        dp, kRows / 16, [&](auto& r, int i, int c) { v.a(r, key + i, c); },
        [&](auto& r, int n, int c) { dout.bt(r, row + n, c); });
    weights(s, dp, smem + kRowsAt + stage * kRowsStage + 8 * warp_row + 16 * t, p.scale_log2);
    if (row0 + kBr > p.nq || limit_of(p, row0, keys) < key0 + kBc)  // the same for the whole block
      mask(p, s, dp, key0 + warp_key + g, row0 + warp_row + 2 * t, keys);

    uint32_t p16[kM][kRows / 8][2], ds16[kM][kRows / 8][2];
    round_to<Element>(p16, s);
    round_to<Element>(ds16, dp);
    share(smem + kPAt, p16, warp_key + g, warp_row);
    if (kRowWarps > 1 || kSums) share(smem + kDsAt, ds16, warp_key + g, warp_row);

    // dV += P^T dO and dK += dS^T Q, over the rows of this warp.
    multiply<Element, kRows / 16, kRows / 16>(
        dv, columns_v, own(p16), [&](auto& r, int n, int c) { dout.b(r, part + kRowWarps * n, row + c); });
    multiply<Element, kRows / 16, kRows / 16>(
        dk, columns_d, own(ds16), [&](auto& r, int n, int c) { q.b(r, part + kRowWarps * n, row + c); });
    if (kRowWarps > 1 || kSums) __syncthreads();  // P and dS are there
#pragma unroll 1
    for (int other = 1; other < kRowWarps; ++other) {  // and over those of the warps that share its keys
      const int from = (part + other) % kRowWarps * (kRows / 16);
      multiply<Element, kRows / 16>(
          dv, columns_v, [&](auto& r, int i, int c) { p_shared.a(r, key + i, from + c); },
          [&](auto& r, int n, int c) { dout.b(r, part + kRowWarps * n, from + c); });
      multiply<Element, kRows / 16>(
          dk, columns_d, [&](auto& r, int i, int c) { ds_shared.a(r, key + i, from + c); },
          [&](auto& r, int n, int c) { q.b(r, part + kRowWarps * n, from + c); });
    }
    if (kSums) {
      const int dq_row = warp / kDqColumnWarps * kDqM, column = column_of_dq(warp), columns = columns_of_dq(column);
      float* sums = p.sums + threadIdx.x +
                    (static_cast<int64_t>(batch * p.hq + head) * p.row_tiles + tile) * kTileSums;
#pragma unroll 1
      for (int first = 0; first < kDqPasses * kDqN; first += kDqN) {
        float dq[kDqM][2 * kDqN][4];  // dS Kj
        clear(dq);
        multiply<Element, kBc / 16>(
            dq, columns - first, [&](auto& r, int i, int c) { ds_shared.at(r, dq_row + i, c); },
            [&](auto& r, int n, int c) { k.b(r, column + kDqColumnWarps * (first + n), c); });
#pragma unroll
        for (int n = 0; n < kDqN; ++n)
#pragma unroll
          for (int i = 0; i < kDqM; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e)
              if (n < columns - first) red_add_f32(sums + sum_at(first + n, i, e), dq[i][2 * n + e / 4][e % 4]);
      }
    }
    if (kStages == 1 && step + 1 < steps) {
      __syncthreads();  // nobody reads the tiles any more
      load(0, next_head, next_tile);
    }
    head = next_head, tile = next_tile;
  }

  __syncthreads();  // nobody reads K or V any more
  const int end = min(kBc, p.nk - key0);
  const float fill = seen.valid ? 0.f : __builtin_nanf("");
  const auto exists = [&](int key) { return key < keys - key0; };
  if (p.dk)
    finish<Element, kThreads, kBc, kD, kPanelD, kRowWarps>(
        p.dk + batch * p.dk_stride[0] + kv_head * p.dk_stride[1] + key0 * p.dk_stride[2], p.dk_stride[2], smem + kKAt,
        dk, warp_key, part, end, p.scale, fill, exists);
  if (p.dv)
    finish<Element, kThreads, kBc, kDv, kPanelDv, kRowWarps>(
        p.dv + batch * p.dv_stride[0] + kv_head * p.dv_stride[1] + key0 * p.dv_stride[2], p.dv_stride[2], smem + kVAt,
        dv, warp_key, part, end, 1.f, fill, exists);
}

// dQ = scale sums: a block per tile of rows, its threads as in key_tiles.
template <typename Element>
__global__ void __launch_bounds__(kThreads, 1) finish_dq(const __grid_constant__ Params p) {
  const int block = ctaid_x(), bh = block / p.row_tiles, row0 = block % p.row_tiles * kBr;
  const int batch = bh / p.hq, head = bh % p.hq, warp = threadIdx.x / 32;
  const bool valid = keys_of(p, batch).valid;
  const int columns = columns_of_dq(column_of_dq(warp));
  const float* sums = p.sums + static_cast<int64_t>(block) * kTileSums + threadIdx.x;
  const float* rows = p.rows + 2 * static_cast<int64_t>(block) * kBr;
  float dq[kDqM][2 * kDqPasses * kDqN][4];
  clear(dq);
#pragma unroll
  for (int n = 0; n < kDqPasses * kDqN; ++n)
#pragma unroll
    for (int i = 0; i < kDqM; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (n < columns) dq[i][2 * n + e / 4][e % 4] = ld_global_f32(sums + sum_at(n, i, e));
  finish<Element, kThreads, kBr, kD, kPanelD, kDqColumnWarps>(
      p.dq + batch * p.dq_stride[0] + head * p.dq_stride[1] + row0 * p.dq_stride[2], p.dq_stride[2], dynamic_smem(), dq,
      warp / kDqColumnWarps * 16 * kDqM, column_of_dq(warp), min(kBr, p.nq - row0), p.scale,
      valid ? 0.f : __builtin_nanf(""), [&](int row) { return valid && ld_global_f32(rows + 2 * row) != kInf; });
}

// ---- Host

// Starts a kernel of `tiles` blocks for each of `heads` heads. `bytes`: of the tensors that the blocks of a head read
// over and over. Under a causal mask, where the longest tiles come first, as many heads run side by side as L2 has
// room for; otherwise all tiles are equally long, and one head after the other reads best.
template <typename Kernel>
cudaError_t start(Kernel kernel, int64_t tiles, int64_t heads, int64_t bytes, int threads, int shared_bytes, Params p,
                  cudaStream_t stream) {
  if (tiles == 0 || heads == 0) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int64_t section = p.causal ? kSectionBytes / (bytes + 1) : 1, most = kMaxGrid / tiles;
  p.tiles = static_cast<int>(tiles);
  p.heads = static_cast<int>(heads);
  p.section = static_cast<int>(section < 1 ? 1 : section < most ? section : most);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles * heads));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// What a call asks for. dQ is summed in memory beside dK and dV unless that must not depend on the order.
struct Choice {
  bool key_tiles, sums, query_tiles;
  int64_t row_tiles, rows_bytes, sums_bytes;  // tiles per head; scratch of all heads
};
Choice choice_of(const BackwardArgs& a) {
  Choice c = {};
  c.key_tiles = a.dk || a.dv;
  c.query_tiles = a.dq && (a.deterministic || !c.key_tiles);
  c.sums = a.dq && !c.query_tiles;
  c.row_tiles = (a.Nq + kBr - 1) / kBr;
  c.rows_bytes = 8 * a.B * a.Hq * c.row_tiles * kBr;  // whole tiles: a multiple of 16 bytes
  c.sums_bytes = c.sums ? 4 * a.B * a.Hq * c.row_tiles * kTileSums : 0;
  return c;
}

template <typename Element>
cudaError_t launch(const BackwardArgs& a, const Choice& c, Params p, cudaStream_t stream) {
  const int64_t key_tiles_ = c.key_tiles ? (a.Nk + kBc - 1) / kBc : 0;
  const int64_t query_tiles_ = c.query_tiles ? (a.Nq + kQueryBr - 1) / kQueryBr : 0;
  const int64_t row_bytes = 2 * (kD + kDv) + (c.sums ? 4 * kDPad : 0), key_bytes = 2 * (kD + kDv);
  int64_t most = 1;
  for (int64_t n : {a.Hq * c.row_tiles, a.Hkv * key_tiles_, a.Hq * query_tiles_}) most = n > most ? n : most;
  const int64_t at_once = kMaxGrid / most;  // batch entries
  if (at_once == 0) return cudaErrorInvalidValue;
  cudaError_t error = cudaSuccess;
  for (int64_t batch = 0; error == cudaSuccess && batch < a.B; batch += at_once) {
    const int64_t batches = a.B - batch < at_once ? a.B - batch : at_once;
    const int64_t heads = batches * a.Hq, key_heads = batches * a.Hkv;
    error = start(c.sums ? prepare<Element, true> : prepare<Element, false>, c.row_tiles, heads, 0, 128, 0, p, stream);
    if (error == cudaSuccess)
      error = start(c.sums ? key_tiles<Element, true> : key_tiles<Element, false>, key_tiles_, key_heads,
                    a.Nq * p.group * row_bytes, kThreads, kSharedBytes, p, stream);
    if (error == cudaSuccess && c.sums)
      error = start(finish_dq<Element>, c.row_tiles, heads, 0, kThreads, kQStage, p, stream);
    if (error == cudaSuccess)
      error = start(query_tiles<Element>, query_tiles_, heads, a.Nk * key_bytes / (p.group > 0 ? p.group : 1),
                    kQueryThreads, kQuerySharedBytes, p, stream);
    p.q += batches * p.q_stride[0];
    p.k += batches * p.k_stride[0];
    p.v += batches * p.v_stride[0];
    p.o += batches * p.o_stride[0];
    p.dout += batches * p.dout_stride[0];
    p.lse += batches * p.lse_stride[0];
    if (p.dlse) p.dlse += batches * p.dlse_stride[0];
    if (p.dq) p.dq += batches * p.dq_stride[0];
    if (p.dk) p.dk += batches * p.dk_stride[0];
    if (p.dv) p.dv += batches * p.dv_stride[0];
    p.rows += heads * c.row_tiles * kBr * 2;
    p.sums += heads * c.row_tiles * kTileSums;
    if (p.key_lengths) p.key_lengths += batches;
  }
  return error;
}

}  // namespace

// Bytes of device memory that a call needs, 256-byte aligned. It may hold anything, before and after.
extern "C" int64_t attention_backward_sm80_scratch(const BackwardArgs* args, int) {
  const Choice c = choice_of(*args);
  return (c.rows_bytes + c.sums_bytes + 255) / 256 * 256;
}

// Starts the kernels for `dtype` (kBFloat16 or kFloat16) on `stream`. Returns a cudaError_t: cudaErrorInvalidValue for
// another dtype, for more rows or keys than kMaxRows, and for one batch entry that fills more than a grid.
extern "C" int attention_backward_sm80(const BackwardArgs* args, int dtype, void* scratch, void* stream) {
  if (args->Nq > kMaxRows || args->Nk > kMaxRows) return cudaErrorInvalidValue;
  const Choice c = choice_of(*args);
  Params p = {};
  p.q = static_cast<const char*>(args->q);
  p.k = static_cast<const char*>(args->k);
  p.v = static_cast<const char*>(args->v);
  p.o = static_cast<const char*>(args->o);
  p.dout = static_cast<const char*>(args->dout);
  p.lse = static_cast<const float*>(args->lse);
  p.dlse = static_cast<const float*>(args->dlse);
  p.dq = static_cast<char*>(args->dq);
  p.dk = static_cast<char*>(args->dk);
  p.dv = static_cast<char*>(args->dv);
  p.rows = static_cast<float*>(scratch);
  p.sums = p.rows + c.rows_bytes / 4;
  p.key_lengths = args->key_lengths;
  for (int i = 0; i < 3; ++i) {
    p.q_stride[i] = 2 * args->q_stride[i];
    p.k_stride[i] = 2 * args->k_stride[i];
    p.v_stride[i] = 2 * args->v_stride[i];
    p.o_stride[i] = 2 * args->o_stride[i];
    p.dout_stride[i] = 2 * args->dout_stride[i];
    p.lse_stride[i] = args->lse_stride[i];
    p.dlse_stride[i] = args->dlse_stride[i];
    p.dq_stride[i] = 2 * args->dq_stride[i];
    p.dk_stride[i] = 2 * args->dk_stride[i];
    p.dv_stride[i] = 2 * args->dv_stride[i];
  }
  p.hq = static_cast<int>(args->Hq);
  p.hkv = static_cast<int>(args->Hkv);
  p.group = args->Hkv > 0 ? static_cast<int>(args->Hq / args->Hkv) : 0;
  p.nq = static_cast<int>(args->Nq);
  p.nk = static_cast<int>(args->Nk);
  p.row_tiles = static_cast<int>(c.row_tiles);
  p.causal = args->causal != kFull;
  p.delta = args->causal == kBottomRight ? p.nk - p.nq : 0;
  p.scale = static_cast<float>(args->scale);
  p.scale_log2 = static_cast<float>(args->scale * 1.4426950408889634);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (dtype == kBFloat16) return launch<BFloat16>(*args, c, p, on);
  if (dtype == kFloat16) return launch<Float16>(*args, c, p, on);
  return cudaErrorInvalidValue;
}
