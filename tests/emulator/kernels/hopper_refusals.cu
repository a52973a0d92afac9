// hopper_refusals.cu: one misuse of an instruction per choice, each of which the emulator must refuse.
//
// Thread 0 misuses mbarriers and copies; the whole block, one warpgroup, misuses wgmma and stmatrix.
// Always: choice 0 does none of it.
#include "hopper_tiles.cuh"

namespace hopper {
namespace {

enum Misuse {
  kNothing,
  kCountOfZero,
  kParityOfTwo,
  kNoBarrierThere,
  kMisalignedBarrier,
  kTooManyBarriers,
  kTooManyBytes,
  kSizeOfEight,
  kMisalignedSource,
  kMisalignedGlobal,
  kBeyondShared,
  kWrongRank,
  kNoMap,
  kPrefetchNoMap,
  kNeverCommitted,
  kOverlap,
  kDivergentScale,
  kThreeWarps,
  kUncommittedProduct,
  kMisalignedRow,
};

constexpr uint32_t kBar = 8192, kFirstFree = kBar + 64, kSharedBytes = kFirstFree + 8 * 64;

struct Params {
  float* global;
  int choice;
};

__device__ __forceinline__ void misuse_copies(const CUtensorMap* map, const CUtensorMap* no_map, const Params& p) {
  const uint32_t smem = dynamic_smem(), bar = smem + kBar;
  mbarrier_init(bar, 1);
  fence_mbarrier_init();
  if (p.choice == kCountOfZero) mbarrier_init(bar + 8, 0);
  if (p.choice == kParityOfTwo) mbarrier_wait(bar, 2);
  if (p.choice == kNoBarrierThere) mbarrier_arrive(bar + 8);
  if (p.choice == kMisalignedBarrier) mbarrier_init(bar + 12, 1);
  if (p.choice == kTooManyBarriers) {
    for (int i = 0; i < 64; ++i) mbarrier_init(smem + kFirstFree + 8 * i, 1);
  }
  if (p.choice == kTooManyBytes) mbarrier_arrive_expect_tx(bar, 1 << 20);
  if (p.choice == kSizeOfEight) bulk_load(smem, p.global, 8, bar);
  if (p.choice == kMisalignedSource) bulk_store(p.global, smem + 8, 16);
  if (p.choice == kMisalignedGlobal) bulk_load(smem, p.global + 1, 16, bar);
  if (p.choice == kBeyondShared) bulk_load(smem + kSharedBytes - 8, p.global, 16, bar);
  if (p.choice == kWrongRank) tma_load_2d(smem, map, bar, 0, 0);
  if (p.choice == kNoMap) tma_load_3d(smem, no_map, bar, 0, 0, 0);
  if (p.choice == kPrefetchNoMap) prefetch_tensormap(no_map);
  if (p.choice == kNeverCommitted) {
    st_shared_b32(smem, 0);
    st_shared_b32(smem + 4, 0);
    st_shared_b32(smem + 8, 0);
    st_shared_b32(smem + 12, 0);
    fence_proxy_async();
    bulk_store(p.global, smem, 16);
  }
}

__device__ __forceinline__ void misuse_products(const Params& p) {
  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32;
  const uint32_t r[4] = {0, 0, 0, 0};
  if (p.choice == kMisalignedRow) stmatrix_x4(smem + 8, r);
  for (int i = 0; i < 4; ++i) st_shared_b128(smem + 16 * (threadIdx.x + 128 * i), r);
  fence_proxy_async();
  __syncthreads();
  const uint64_t a = descriptor(smem);
  float d[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) d[i] = 0.f;
  float (&half)[32] = reinterpret_cast<float (&)[32]>(d), (&other)[32] = reinterpret_cast<float (&)[32]>(d[16]);
  wgmma_fence();
  if (p.choice != kThreeWarps || warp != 2)
    wgmma_m64n64k16_bf16_ss<0, 0>(half, a, a, p.choice == kDivergentScale && threadIdx.x == 70);
  if (p.choice == kOverlap) wgmma_m64n64k16_bf16_ss<0, 0>(other, a, a, 1);
  if (p.choice == kUncommittedProduct) return;
  wgmma_commit();
  wgmma_wait<0>();
}

__global__ void __launch_bounds__(128, 1)
    misuse(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap no_map, const Params p) {
  if (p.choice >= kOverlap) {
    misuse_products(p);
  } else if (threadIdx.x == 0) {
    misuse_copies(&map, &no_map, p);
  }
}

}  // namespace
}  // namespace hopper

// `global`: at least 64 x 64 float32.
extern "C" int hopper_refusals(void* global, int choice, void* stream) {
  using namespace hopper;
  CUtensorMap map, no_map = {};
  if (make_map(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, global, 1, 64, 64, 8, 64, CU_TENSOR_MAP_SWIZZLE_NONE)) {
    return cudaErrorInvalidValue;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, misuse, map, no_map, Params{static_cast<float*>(global), choice});
}
