// hopper_protocol.cu: one small warp-specialised kernel, right with fault 0, and with one statement wrong otherwise.
//
// D = round(A B^T) V for A, B (64, 64 k) and V (64, 64), all bf16. A producer thread streams slices of A and B through
// a ring; the consumer warpgroup multiplies, passes the rounded product through shared memory, multiplies by V, and two
// of its threads store 32 rows each by TMA. The result is stored twice, D and 2 D, from one buffer.
// Always: with fault 0 no access races with another, in any schedule.
#include "hopper_tiles.cuh"

namespace hopper {
namespace {

enum Fault {
  kNone,
  kNoFullWait,          // the consumer multiplies without waiting for its slice
  kWrongParity,         // it waits for the other parity
  kFewBytes,            // the producer announces half of the bytes
  kManyBytes,           // the producer announces twice the bytes
  kNoEmptyWait,         // the producer does not wait for a free stage
  kEarlyRelease,        // a stage is released before its wgmma is complete
  kLateArrivals,        // the empty barriers count every thread, but one thread a warp arrives
  kOverArrival,         // the producer arrives twice in one phase
  kNoInitFence,         // no fence.mbarrier_init
  kNoInitBarrier,       // no __syncthreads after mbarrier.init
  kInitTwice,           // a barrier is initialised twice
  kBarrierOverwritten,  // an ordinary store hits a barrier
  kNoWgmmaFence,
  kNoWgmmaCommit,
  kNoWgmmaWait,          // the second product is read without a wait
  kTouched,              // an accumulator is written in flight
  kNoFenceBeforeWgmma,   // the product is stored and multiplied without a proxy fence
  kOneLaneWithoutFence,  // one lane of a warp leaves that fence out
  kFenceBeforeStore,     // the fence stands before the stores
  kNoSyncwarp,           // the fence stands, but other lanes' stores are not waited for
  kNoFenceBeforeTma,     // no proxy fence before the TMA store
  kNoBarrierBeforeTma,   // no barrier before the TMA store
  kNoReadWait,           // the buffer is written again while the first store reads it
  kOtherNoReadWait,      // the same, only the second storing thread leaves the wait out
  kNoBulkCommit,
  kNoBulkWait,
  kUnusedLoad,    // a slice too many is loaded
  kOtherStage,    // one warp multiplies another stage
  kPoolTooSmall,  // the producer gives back too few registers
  kOneWarpKeeps,  // one producer warp gives back nothing
  kWrongStride,   // stride of the descriptor of V
  kMisaligned,    // a TMA destination is not aligned
};

constexpr int kStages = 2, kThreads = 256;
constexpr uint32_t kTileBytes = 64 * kRowBytes, kHalfBytes = kTileBytes / 2;
constexpr uint32_t kA = 0, kB = kA + kStages * kTileBytes, kV = kB + kStages * kTileBytes, kP = kV + kTileBytes;
constexpr uint32_t kOut = kP + kTileBytes, kFull = kOut + kTileBytes, kEmpty = kFull + 8 * kStages;
constexpr uint32_t kFullV = kEmpty + 8 * kStages, kSharedBytes = kFullV + 8;

struct Params {
  int slices, fault;
};

__device__ __forceinline__ void load_slice(uint32_t smem, const CUtensorMap* map_a, const CUtensorMap* map_b,
                                           uint32_t stage, int slice) {
  tma_load_3d(smem + kA + stage * kTileBytes, map_a, smem + kFull + 8 * stage, 64 * slice, 0, 0);
  tma_load_3d(smem + kB + stage * kTileBytes, map_b, smem + kFull + 8 * stage, 64 * slice, 0, 0);
}

// Rounds a 64 x 64 accumulator, times `factor`, into a panel; each warp writes its own 16 rows.
__device__ __forceinline__ void store_panel(uint32_t panel, const float (&x)[32], float factor) {
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t r[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) r[k] = cvt_rn_bf16x2(x[8 * i + 2 * k] * factor, x[8 * i + 2 * k + 1] * factor);
    stmatrix_x4(panel + row * kRowBytes + (((2 * i + lane / 16) ^ (row % 8)) << 4), r);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    protocol(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
             const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_d, const Params p) {
  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, fault = p.fault;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(smem + kFull + 8 * s, 1);
      mbarrier_init(smem + kEmpty + 8 * s, fault == kLateArrivals ? 128 : 4);
    }
    mbarrier_init(smem + kFullV, 1);
    if (fault == kInitTwice) mbarrier_init(smem + kFullV, 1);
    if (fault == kBarrierOverwritten) st_shared_b32(smem + kFullV, 0);
    if (fault != kNoInitFence) fence_mbarrier_init();
  }
  if (fault != kNoInitBarrier) __syncthreads();

  if (warp < 4) {
    if (fault == kPoolTooSmall) {
      setmaxnreg_dec<104>();
    } else if (fault != kOneWarpKeeps || warp != 3) {
      setmaxnreg_dec<56>();
    }
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(smem + kFullV, kTileBytes);
      tma_load_3d(smem + kV + (fault == kMisaligned ? 64 : 0), &map_v, smem + kFullV, 0, 0, 0);
      Ring<kStages> ring(1);
      for (int j = 0; j < p.slices; ++j, ring.advance()) {
        const uint32_t s = ring.stage;
        if (fault != kNoEmptyWait) mbarrier_wait(smem + kEmpty + 8 * s, ring.parity);
        const uint32_t announced = fault == kFewBytes    ? kTileBytes
                                   : fault == kManyBytes ? 4 * kTileBytes
                                                         : 2 * kTileBytes;
        mbarrier_arrive_expect_tx(smem + kFull + 8 * s, announced);
        if (fault == kOverArrival) mbarrier_arrive(smem + kFull + 8 * s);
        load_slice(smem, &map_a, &map_b, s, j);
      }
      if (fault == kUnusedLoad) {
        mbarrier_wait(smem + kEmpty + 8 * ring.stage, ring.parity);
        mbarrier_arrive_expect_tx(smem + kFull + 8 * ring.stage, 2 * kTileBytes);
        load_slice(smem, &map_a, &map_b, ring.stage, 0);
      }
    }
    return;
  }

  setmaxnreg_inc<256>();
  float x[32], y[32];
  Ring<kStages> ring(0);
  for (int j = 0; j < p.slices; ++j, ring.advance()) {
    const uint32_t s = fault == kOtherStage && warp == 6 ? 1 - ring.stage : ring.stage;
    if (fault != kNoFullWait)
      mbarrier_wait(smem + kFull + 8 * ring.stage, fault == kWrongParity ? ring.parity ^ 1 : ring.parity);
    const uint64_t a = descriptor(smem + kA + s * kTileBytes), b = descriptor(smem + kB + s * kTileBytes);
    if (fault != kNoWgmmaFence) wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64n64k16_bf16_ss<0, 0>(x, a + k * kStepK, b + k * kStepK, j + k != 0);
    if (fault != kNoWgmmaCommit) wgmma_commit();
    if (fault == kEarlyRelease && lane == 0) mbarrier_arrive(smem + kEmpty + 8 * ring.stage);
    if (fault == kTouched && threadIdx.x == 150) x[7] = 0.f;
    wgmma_wait<0>();
    pin(x);
    if (fault != kEarlyRelease && lane == 0) mbarrier_arrive(smem + kEmpty + 8 * ring.stage);
  }

  if (fault == kFenceBeforeStore) fence_proxy_async();
  store_panel(smem + kP, x, 1.f);
  const bool fenced = fault != kNoFenceBeforeWgmma && fault != kFenceBeforeStore;
  if (fenced && (fault != kOneLaneWithoutFence || threadIdx.x != 150)) fence_proxy_async();
  if (fault != kNoSyncwarp) __syncwarp();
  mbarrier_wait(smem + kFullV, 0);
  const uint64_t a = descriptor(smem + kP);
  const uint64_t v = descriptor(smem + kV) - (fault == kWrongStride ? uint64_t(kAtomBytes >> 5) << 32 : 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_m64n64k16_bf16_ss<0, 1>(y, a + k * kStepK, v + k * kStepMN, k != 0);
  wgmma_commit();
  if (fault != kNoWgmmaWait) wgmma_wait<0>();
  pin(y);

  const bool stores = threadIdx.x % 64 == 0;  // threads 128 and 192: 32 rows each
  const uint32_t half = threadIdx.x / 64 - 2;
  for (int round = 0; round < 2; ++round) {
    if (round == 1) {
      const bool forgotten = fault == kNoReadWait || (fault == kOtherNoReadWait && half == 1);
      if (stores && !forgotten) bulk_wait_read<0>();
      bar_sync(1, 128);
    }
    store_panel(smem + kOut, y, round ? 2.f : 1.f);
    if (fault != kNoFenceBeforeTma) fence_proxy_async();
    if (fault != kNoBarrierBeforeTma) bar_sync(1, 128);
    if (stores) {
      tma_store_3d(&map_d, smem + kOut + half * kHalfBytes, 0, 32 * half, round);
      if (fault != kNoBulkCommit) bulk_commit();
    }
  }
  if (stores && fault != kNoBulkWait) bulk_wait<0>();
}

}  // namespace
}  // namespace hopper

// A, B (64, 64 slices), V (64, 64), D (2, 64, 64), bf16. swizzle: CUtensorMapSwizzle of the map of V.
extern "C" int hopper_protocol(const void* a, const void* b, const void* v, void* d, int slices, int fault, int swizzle,
                               void* stream) {
  using namespace hopper;
  CUtensorMap map_a, map_b, map_v, map_d;
  if (make_panel_map(&map_a, a, 1, 64, 64 * slices, 64) || make_panel_map(&map_b, b, 1, 64, 64 * slices, 64) ||
      make_map(&map_v, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, v, 1, 64, 64, 64, 64, CUtensorMapSwizzle(swizzle)) ||
      make_panel_map(&map_d, d, 2, 64, 64, 32)) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t error = cudaFuncSetAttribute(protocol, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, protocol, map_a, map_b, map_v, map_d, Params{slices, fault});
}
