// hopper_forward_d128.cu: persistent attention forward, d = 128, bf16, P through shared memory, overlapped products.
//
// The producer warpgroup takes tiles from a counter in global memory, hands each to the consumers through shared
// memory, and loads its Q, K and V. A consumer warpgroup owns 64 query rows: S = Q K^T of the next keys is issued
// before O += P V of the last ones, so that the softmax runs while PV does. O has its own buffer, which a TMA store
// reads while the next tile starts.
// Source: FlashAttention-3 (arXiv:2407.08608), Algorithm 2; hand-over of tiles as in its persistent scheduler.
// Always: every buffer has a full and an empty barrier, whose phases producer and consumers count alike.
#include "hopper_softmax.cuh"

namespace hopper {
namespace {

constexpr int kD = 128, kBr = 64, kBc = 64, kStages = 2, kThreads = 256;
constexpr uint32_t kPanelBytes = 64 * kRowBytes, kTileBytes = 2 * kPanelBytes;  // 64 rows x 128
constexpr uint32_t kQ = 0, kK = kQ + kTileBytes, kV = kK + kStages * kTileBytes, kP = kV + kStages * kTileBytes;
constexpr uint32_t kO = kP + kPanelBytes, kTile = kO + kTileBytes;
constexpr uint32_t kFullTile = kTile + 8, kEmptyTile = kFullTile + 8, kFullQ = kEmptyTile + 8, kEmptyQ = kFullQ + 8;
constexpr uint32_t kFullK = kEmptyQ + 8, kEmptyK = kFullK + 8 * kStages, kFullV = kEmptyK + 8 * kStages;
constexpr uint32_t kEmptyV = kFullV + 8 * kStages, kSharedBytes = kEmptyV + 8 * kStages;

struct Params {
  float* lse;
  uint32_t* counter;  // next tile; 0 before the launch
  int nq, nk, row_tiles, tiles;
  float scale_log2;
};

// Two boxes of 64 columns make a tile.
__device__ __forceinline__ void load_tile(uint32_t dst, const CUtensorMap* map, uint32_t bar, int row, int head) {
  mbarrier_arrive_expect_tx(bar, kTileBytes);
  tma_load_3d(dst, map, bar, 0, row, head);
  tma_load_3d(dst + kPanelBytes, map, bar, 64, row, head);
}

// S = Q K^T, both K-major: four steps of 16 in each panel.
__device__ __forceinline__ void issue_qk(float (&x)[32], uint32_t q_tile, uint32_t k_tile) {
  const uint64_t q = descriptor(q_tile), k = descriptor(k_tile);
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const uint32_t offset = step / 4 * (kPanelBytes >> 4) + step % 4 * kStepK;
    wgmma_m64n64k16_bf16_ss<0, 0>(x, q + offset, k + offset, step != 0);
  }
  wgmma_commit();
}

// O += P V: P K-major in one panel, V with its keys along K, so N-major over two panels.
__device__ __forceinline__ void issue_pv(float (&o)[64], uint32_t p_tile, uint32_t v_tile) {
  const uint64_t p = descriptor(p_tile), v = descriptor(v_tile, kPanelBytes);
#pragma unroll
  for (int step = 0; step < kBc / 16; ++step) {
    wgmma_m64n128k16_bf16_ss<0, 1>(o, p + step * kStepK, v + step * kStepMN, 1);
  }
  wgmma_commit();
}

template <bool kCausal>
__global__ void __launch_bounds__(kThreads, 1)
    forward_d128(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                 const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_o, const Params p) {
  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    mbarrier_init(smem + kFullTile, 1);
    mbarrier_init(smem + kEmptyTile, 4);
    mbarrier_init(smem + kFullQ, 1);
    mbarrier_init(smem + kEmptyQ, 4);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(smem + kFullK + 8 * s, 1);
      mbarrier_init(smem + kEmptyK + 8 * s, 4);
      mbarrier_init(smem + kFullV + 8 * s, 1);
      mbarrier_init(smem + kEmptyV + 8 * s, 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warp < 4) {  // producer
    setmaxnreg_dec<56>();
    if (threadIdx.x == 0) {
      Ring<kStages> ring(1);
      Ring<1> hand_over(1);
      for (;; hand_over.advance()) {
        const uint32_t tile = atomic_add_global_u32(p.counter, 1);
        mbarrier_wait(smem + kEmptyTile, hand_over.parity);
        st_shared_b32(smem + kTile, tile);
        mbarrier_arrive(smem + kFullTile);
        if (tile >= uint32_t(p.tiles)) break;
        const int head = tile / p.row_tiles, row0 = tile % p.row_tiles * kBr;
        const int count = tile_count<kCausal>(row0, kBr, p.nq, p.nk, kBc);
        mbarrier_wait(smem + kEmptyQ, hand_over.parity);
        load_tile(smem + kQ, &map_q, smem + kFullQ, row0, head);
        for (int j = 0; j < count; ++j, ring.advance()) {
          const uint32_t s = ring.stage;
          mbarrier_wait(smem + kEmptyK + 8 * s, ring.parity);
          load_tile(smem + kK + s * kTileBytes, &map_k, smem + kFullK + 8 * s, j * kBc, head);
          mbarrier_wait(smem + kEmptyV + 8 * s, ring.parity);
          load_tile(smem + kV + s * kTileBytes, &map_v, smem + kFullV + 8 * s, j * kBc, head);
        }
      }
    }
    return;
  }

  setmaxnreg_inc<256>();
  Ring<kStages> k_ring(0), v_ring(0);
  Ring<1> hand_over(0);
  const uint32_t own_row = 16 * (warp % 4) + lane % 16;  // whose address this lane gives to stmatrix
  const auto store_address = [&](uint32_t panel, uint32_t chunk) {
    return panel + own_row * kRowBytes + (((chunk + lane / 16) ^ (own_row % 8)) << 4);
  };
  for (;; hand_over.advance()) {
    mbarrier_wait(smem + kFullTile, hand_over.parity);
    const uint32_t tile = ld_shared_b32(smem + kTile);
    __syncwarp();  // all lanes have read the tile before lane 0 gives the place back
    if (lane == 0) mbarrier_arrive(smem + kEmptyTile);
    if (tile >= uint32_t(p.tiles)) break;
    const int head = tile / p.row_tiles, row0 = tile % p.row_tiles * kBr;
    const int row = row0 + 16 * (warp % 4) + lane / 4, shift = p.nk - p.nq;
    const int count = tile_count<kCausal>(row0, kBr, p.nq, p.nk, kBc);
    float o[64] = {};
    float x[32];
    Softmax softmax;

    float alpha[2];
    const auto release = [&](uint32_t empty, Ring<kStages>& ring) {
      if (lane == 0) mbarrier_arrive(smem + empty + 8 * ring.stage);
      ring.advance();
    };
    const auto weigh = [&](int j) {
      release(kEmptyK, k_ring);
      if ((j + 1) * kBc > p.nk || (kCausal && (j + 1) * kBc - 1 > row0 + shift)) {
        mask<kCausal>(x, row, j * kBc + 2 * (lane % 4), p.nk, shift);
      }
      softmax.weigh(x, alpha, p.scale_log2);
    };
    const auto pack_weights = [&] {
      uint32_t a[4][4];
      pack(a, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) stmatrix_x4(store_address(smem + kP, 2 * i), a[i]);
      fence_proxy_async();
      __syncwarp();  // each warp's wgmma reads only the 16 rows of P that the warp itself wrote
    };

    mbarrier_wait(smem + kFullQ, hand_over.parity);
    mbarrier_wait(smem + kFullK + 8 * k_ring.stage, k_ring.parity);
    wgmma_fence();
    issue_qk(x, smem + kQ, smem + kK + k_ring.stage * kTileBytes);
    wgmma_wait<0>();
    pin(x);
    weigh(0);
    pack_weights();
    for (int j = 1; j < count; ++j) {  // scores of tile j, output of tile j - 1
      mbarrier_wait(smem + kFullK + 8 * k_ring.stage, k_ring.parity);
      mbarrier_wait(smem + kFullV + 8 * v_ring.stage, v_ring.parity);
      pin(o);
      wgmma_fence();
      issue_qk(x, smem + kQ, smem + kK + k_ring.stage * kTileBytes);
      issue_pv(o, smem + kP, smem + kV + v_ring.stage * kTileBytes);
      wgmma_wait<1>();  // the scores; PV goes on
      pin(x);
      weigh(j);
      wgmma_wait<0>();
      pin(o);
      release(kEmptyV, v_ring);
      rescale(o, alpha);
      pack_weights();
    }
    mbarrier_wait(smem + kFullV + 8 * v_ring.stage, v_ring.parity);
    pin(o);
    wgmma_fence();
    issue_pv(o, smem + kP, smem + kV + v_ring.stage * kTileBytes);
    wgmma_wait<0>();
    pin(o);
    release(kEmptyV, v_ring);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kEmptyQ);

    float inverse[2];
    softmax.finish(inverse, p.lse + size_t(head) * p.nq, row, p.nq, p.scale_log2);
    if (threadIdx.x == 128) bulk_wait_read<0>();  // the store of the tile before has read the buffer
    bar_sync(1, 128);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const uint32_t r[4] = {cvt_rn_bf16x2(o[8 * i] * inverse[0], o[8 * i + 1] * inverse[0]),
                             cvt_rn_bf16x2(o[8 * i + 2] * inverse[1], o[8 * i + 3] * inverse[1]),
                             cvt_rn_bf16x2(o[8 * i + 4] * inverse[0], o[8 * i + 5] * inverse[0]),
                             cvt_rn_bf16x2(o[8 * i + 6] * inverse[1], o[8 * i + 7] * inverse[1])};
      stmatrix_x4(store_address(smem + kO + i / 4 * kPanelBytes, 2 * i % 8), r);
    }
    fence_proxy_async();
    bar_sync(1, 128);
    if (threadIdx.x == 128) {
      tma_store_3d(&map_o, smem + kO, 0, row0, head);
      tma_store_3d(&map_o, smem + kO + kPanelBytes, 64, row0, head);
      bulk_commit();
    }
  }
  if (threadIdx.x == 128) bulk_wait<0>();
}

}  // namespace
}  // namespace hopper

extern "C" int hopper_forward_d128(const void* q, const void* k, const void* v, void* o, void* lse, void* counter,
                                   int heads, int nq, int nk, float scale, int causal, int blocks, void* stream) {
  using namespace hopper;
  CUtensorMap map_q, map_k, map_v, map_o;
  if (make_panel_map(&map_q, q, heads, nq, kD, kBr) || make_panel_map(&map_k, k, heads, nk, kD, kBc) ||
      make_panel_map(&map_v, v, heads, nk, kD, kBc) || make_panel_map(&map_o, o, heads, nq, kD, kBr)) {
    return cudaErrorInvalidValue;
  }
  const int row_tiles = (nq + kBr - 1) / kBr;
  const Params p{
      static_cast<float*>(lse), static_cast<uint32_t*>(counter), nq, nk, row_tiles, row_tiles * heads, scale * kLog2e};
  auto kernel = causal ? forward_d128<true> : forward_d128<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, map_q, map_k, map_v, map_o, p);
}
