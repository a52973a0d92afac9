// hopper_forward_d64.cu: attention forward in the shape of FlashAttention-3, d = 64, bf16, P in registers.
//
// Warpgroup 0 produces: one thread loads Q, then K and V tiles into a ring. Warpgroups 1 and 2 consume, 64 query rows
// each: S = Q K^T from shared memory, softmax, O += P V with P in registers; O leaves through the Q tile by TMA.
// Source: FlashAttention-3 (arXiv:2407.08608), Algorithm 1 without the overlap of its section 3.2.
// Always: a K or V buffer is written only after every consumer warp released it, and read only after its full barrier.
#include "hopper_softmax.cuh"

namespace hopper {
namespace {

constexpr int kD = 64, kBr = 128, kBc = 64, kStages = 2, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr uint32_t kQBytes = 64 * kRowBytes, kTileBytes = kBc * kRowBytes;
constexpr uint32_t kQ = 0, kK = kQ + kConsumers * kQBytes, kV = kK + kStages * kTileBytes;
constexpr uint32_t kFullQ = kV + kStages * kTileBytes, kFullK = kFullQ + 8, kFullV = kFullK + 8 * kStages;
constexpr uint32_t kEmptyK = kFullV + 8 * kStages, kEmptyV = kEmptyK + 8 * kStages;
constexpr uint32_t kSharedBytes = kEmptyV + 8 * kStages;

struct Params {
  float* lse;
  int nq, nk;
  float scale_log2;
};

template <bool kCausal>
__global__ void __launch_bounds__(kThreads, 1)
    forward_d64(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_o, const Params p) {
  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
  const int head = blockIdx.y, row0 = blockIdx.x * kBr;
  const int tiles = tile_count<kCausal>(row0, kBr, p.nq, p.nk, kBc);

  if (threadIdx.x == 0) {
    mbarrier_init(smem + kFullQ, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(smem + kFullK + 8 * s, 1);
      mbarrier_init(smem + kFullV + 8 * s, 1);
      mbarrier_init(smem + kEmptyK + 8 * s, 4 * kConsumers);  // one arrival per consumer warp
      mbarrier_init(smem + kEmptyV + 8 * s, 4 * kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 0) {
      prefetch_tensormap(&map_k);
      mbarrier_arrive_expect_tx(smem + kFullQ, kConsumers * kQBytes);
      for (int w = 0; w < kConsumers; ++w) {
        tma_load_3d(smem + kQ + w * kQBytes, &map_q, smem + kFullQ, 0, row0 + 64 * w, head);
      }
      Ring<kStages> ring(1);
      for (int j = 0; j < tiles; ++j, ring.advance()) {
        const uint32_t s = ring.stage;
        mbarrier_wait(smem + kEmptyK + 8 * s, ring.parity);
        mbarrier_arrive_expect_tx(smem + kFullK + 8 * s, kTileBytes);
        tma_load_3d(smem + kK + s * kTileBytes, &map_k, smem + kFullK + 8 * s, 0, j * kBc, head);
        mbarrier_wait(smem + kEmptyV + 8 * s, ring.parity);
        mbarrier_arrive_expect_tx(smem + kFullV + 8 * s, kTileBytes);
        tma_load_3d(smem + kV + s * kTileBytes, &map_v, smem + kFullV + 8 * s, 0, j * kBc, head);
      }
    }
    return;
  }

  setmaxnreg_inc<240>();
  const int first = row0 + 64 * (warpgroup - 1);  // first row of this warpgroup
  const int row = first + 16 * (warp % 4) + lane / 4;
  const uint32_t q_tile = smem + kQ + (warpgroup - 1) * kQBytes;
  float o[32] = {};
  Softmax softmax;
  Ring<kStages> ring(0);

  mbarrier_wait(smem + kFullQ, 0);
  for (int j = 0; j < tiles; ++j, ring.advance()) {
    const uint32_t s = ring.stage;
    float x[32];
    mbarrier_wait(smem + kFullK + 8 * s, ring.parity);
    const uint64_t q = descriptor(q_tile), k = descriptor(smem + kK + s * kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      wgmma_m64n64k16_bf16_ss<0, 0>(x, q + step * kStepK, k + step * kStepK, step != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
    if (lane == 0) mbarrier_arrive(smem + kEmptyK + 8 * s);

    if ((j + 1) * kBc > p.nk || (kCausal && (j + 1) * kBc - 1 > first + p.nk - p.nq)) {
      mask<kCausal>(x, row, j * kBc + 2 * (lane % 4), p.nk, p.nk - p.nq);
    }
    float alpha[2];
    softmax.weigh(x, alpha, p.scale_log2);
    rescale(o, alpha);
    uint32_t a[4][4];
    pack(a, x);

    mbarrier_wait(smem + kFullV + 8 * s, ring.parity);
    const uint64_t v = descriptor(smem + kV + s * kTileBytes);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBc / 16; ++step) wgmma_m64n64k16_bf16_rs<1>(o, a[step], v + step * kStepMN, 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    if (lane == 0) mbarrier_arrive(smem + kEmptyV + 8 * s);
  }

  float inverse[2];
  softmax.finish(inverse, p.lse + size_t(head) * p.nq, row, p.nq, p.scale_log2);
  // Each warp overwrites the 16 rows of Q that only it has read.
  const uint32_t o_row = 16 * (warp % 4) + lane % 16, chunk = lane / 16;
#pragma unroll
  for (int i = 0; i < kD / 16; ++i) {
    const uint32_t r[4] = {cvt_rn_bf16x2(o[8 * i] * inverse[0], o[8 * i + 1] * inverse[0]),
                           cvt_rn_bf16x2(o[8 * i + 2] * inverse[1], o[8 * i + 3] * inverse[1]),
                           cvt_rn_bf16x2(o[8 * i + 4] * inverse[0], o[8 * i + 5] * inverse[0]),
                           cvt_rn_bf16x2(o[8 * i + 6] * inverse[1], o[8 * i + 7] * inverse[1])};
    stmatrix_x4(q_tile + o_row * kRowBytes + (((2 * i + chunk) ^ (o_row % 8)) << 4), r);
  }
  fence_proxy_async();
  bar_sync(warpgroup, 128);
  if (threadIdx.x % 128 == 0) {
    tma_store_3d(&map_o, q_tile, 0, first, head);
    bulk_commit();
    bulk_wait<0>();
  }
}

}  // namespace
}  // namespace hopper

extern "C" int hopper_forward_d64(const void* q, const void* k, const void* v, void* o, void* lse, int heads, int nq,
                                  int nk, float scale, int causal, void* stream) {
  using namespace hopper;
  CUtensorMap map_q, map_k, map_v, map_o;
  if (make_panel_map(&map_q, q, heads, nq, kD, 64) || make_panel_map(&map_k, k, heads, nk, kD, kBc) ||
      make_panel_map(&map_v, v, heads, nk, kD, kBc) || make_panel_map(&map_o, o, heads, nq, kD, 64)) {
    return cudaErrorInvalidValue;
  }
  const Params p{static_cast<float*>(lse), nq, nk, scale * kLog2e};
  auto kernel = causal ? forward_d64<true> : forward_d64<false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((nq + kBr - 1) / kBr, heads);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, map_q, map_k, map_v, map_o, p);
}
