// dQ of one tile of rows in a fixed order, for backward_sm80.cu: 256 query rows x 32 keys per tile.
//
// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// sm80 bf16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// sm80 fp16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 bc5e84ae6cdbd34c
//
// A block owns Qi and dOi and runs over Kj and Vj, as in the forward pass. A warp has its rows to itself: dS is rounded
// where it was made, and is an operand of the last product without passing through shared memory.
#pragma once
#include "backward_params_sm80.cuh"
#include "backward_tiles_sm80.cuh"

namespace {

template <typename Element>
__global__ void __launch_bounds__(kQueryThreads, 1) query_tiles(const __grid_constant__ Params p) {
  const Place place = place_of(p);  // under a causal mask the last rows see the most keys, and start first
  const int row0 = redux_max_s32((p.tiles - 1 - place.tile) * kQueryBr);
  const int batch = place.bh / p.hq, head = place.bh % p.hq, kv_head = head / p.group;
  const Keys seen = keys_of(p, batch);
  const int keys = seen.count;
  const int last_row = min(row0 + kQueryBr, p.nq) - 1;  // it sees the most keys
  const int key_tiles = redux_max_s32((max(limit_of(p, last_row, keys), 0) + kQueryBc - 1) / kQueryBc);
  const int whole_tiles = redux_max_s32(max(limit_of(p, row0, keys), 0) / kQueryBc);  // those below need no mask

  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int row = kQueryM * warp, warp_row = 16 * row;
  const Tile<kQueryBr, kPanelD> q(smem + kQueryQAt);
  const Tile<kQueryBr, kPanelDv> dout(smem + kQueryDoAt);
  auto load = [&](int j) {
    const int stage = j % kQueryStages, key0 = j * kQueryBc;
    load_tile<kQueryThreads, kQueryBc, kD, kPanelD>(
        smem + kQueryKAt + stage * kQueryKStage,
        p.k + batch * p.k_stride[0] + kv_head * p.k_stride[1] + key0 * p.k_stride[2], p.k_stride[2], 0, keys - key0);
    load_tile<kQueryThreads, kQueryBc, kDv, kPanelDv>(
        smem + kQueryVAt + stage * kQueryVStage,
        p.v + batch * p.v_stride[0] + kv_head * p.v_stride[1] + key0 * p.v_stride[2], p.v_stride[2], 0, keys - key0);
    cp_async_commit();
  };

  float dq[kQueryM][kDPad / 8][4], lse_log2[kQueryM][2], d[kQueryM][2];
  clear(dq);
  const float* rows = p.rows + 2 * (static_cast<int64_t>(place.bh) * p.row_tiles * kBr + row0);
#pragma unroll
  for (int i = 0; i < kQueryM; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = warp_row + 16 * i + 8 * h + g;
      lse_log2[i][h] = row0 + r < p.nq ? ld_global_f32(rows + 2 * r) : kInf;
      d[i][h] = row0 + r < p.nq ? ld_global_f32(rows + 2 * r + 1) : 0.f;
    }
  if (key_tiles > 0) {
    load_tile<kQueryThreads, kQueryBr, kD, kPanelD>(
        smem + kQueryQAt, p.q + batch * p.q_stride[0] + head * p.q_stride[1] + row0 * p.q_stride[2], p.q_stride[2], 0,
        p.nq - row0);
    load_tile<kQueryThreads, kQueryBr, kDv, kPanelDv>(
        smem + kQueryDoAt, p.dout + batch * p.dout_stride[0] + head * p.dout_stride[1] + row0 * p.dout_stride[2],
        p.dout_stride[2], 0, p.nq - row0);
    load(0);
  }
#pragma unroll 1
  for (int j = 0; j < key_tiles; ++j) {
    const int stage = j % kQueryStages;
    const Tile<kQueryBc, kPanelD> k(smem + kQueryKAt + stage * kQueryKStage);
    const Tile<kQueryBc, kPanelDv> v(smem + kQueryVAt + stage * kQueryVStage);
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles are there; nobody reads those of the step before any more
    if (kQueryStages > 1 && j + 1 < key_tiles) load(j + 1);

    float s[kQueryM][kQueryBc / 8][4], dp[kQueryM][kQueryBc / 8][4];  // S = Qi Kj^T and dP = dOi Vj^T
    clear(s);
    multiply<Element, kDPad / 16, kQueryStepsAtOnce>(
        s, kQueryBc / 16, [&](auto& r, int i, int c) { q.a(r, row + i, c); },
        [&](auto& r, int n, int c) { k.bt(r, n, c); });
    clear(dp);
    multiply<Element, kDvPad / 16, kQueryStepsAtOnce>(
        dp, kQueryBc / 16, [&](auto& r, int i, int c) { dout.a(r, row + i, c); },
        [&](auto& r, int n, int c) { v.bt(r, n, c); });
#pragma unroll
    for (int i = 0; i < kQueryM; ++i)
#pragma unroll
      for (int n = 0; n < kQueryBc / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          dp[i][n][e] =
              ex2_approx_ftz(fmaf(s[i][n][e], p.scale_log2, -lse_log2[i][e / 2])) * (dp[i][n][e] - d[i][e / 2]);
    if (j >= whole_tiles) {  // the same for the whole block
#pragma unroll
      for (int i = 0; i < kQueryM; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int left = limit_of(p, row0 + warp_row + 16 * i + 8 * h + g, keys) - j * kQueryBc - 2 * t;
#pragma unroll
          for (int n = 0; n < kQueryBc / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (8 * n + e >= left) dp[i][n][2 * h + e] = 0.f;
        }
    }
    uint32_t ds16[kQueryM][kQueryBc / 8][2];
    round_to<Element>(ds16, dp);
    multiply<Element, kQueryBc / 16, kQueryBc / 16>(  // dQ += dS Kj
        dq, kDPad / 16, own(ds16), [&](auto& r, int n, int c) { k.b(r, n, c); });
    if (kQueryStages == 1 && j + 1 < key_tiles) {
      __syncthreads();  // nobody reads the tiles any more
      load(j + 1);
    }
  }
  __syncthreads();  // nobody reads Q any more
  finish<Element, kQueryThreads, kQueryBr, kD, kPanelD, 1>(
      p.dq + batch * p.dq_stride[0] + head * p.dq_stride[1] + row0 * p.dq_stride[2], p.dq_stride[2], smem + kQueryQAt,
      dq, warp_row, 0, min(kQueryBr, p.nq - row0), p.scale, seen.valid ? 0.f : __builtin_nanf(""),
      [&](int r) { return seen.valid && row0 + r < p.nq && ld_global_f32(rows + 2 * r) != kInf; });
}

}  // namespace
