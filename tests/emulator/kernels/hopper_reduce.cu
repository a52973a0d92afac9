// hopper_reduce.cu: C += A B^T by split K, the partial products added in global memory in four ways.
//
// Each block multiplies one slice of 64 along K and adds its 64 x 64 float32 result to C: through shared memory by a
// TMA reduction or by a linear bulk reduction, or from registers by vector or scalar reductions. A is transposed or
// not: (k, rows) or (rows, k) in global memory.
// Always: C holds the sum of all slices after the launch, whatever the order of the blocks; but not with kMixed, where
// the block of the first slice overwrites C by ordinary stores.
#include "hopper_tiles.cuh"

namespace hopper {
namespace {

enum Way { kTensor = 0, kLinear = 1, kVector = 2, kScalar = 3, kMixed = 4 };  // the last is wrong

constexpr int kThreads = 128;
constexpr uint32_t kTileBytes = 64 * kRowBytes, kA = 0, kB = kTileBytes, kC = 2 * kTileBytes;
constexpr uint32_t kFull = kC + 64 * 64 * 4, kSharedBytes = kFull + 8;

template <Way kWay, bool kTransA>
__global__ void __launch_bounds__(kThreads, 1)
    split_k(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
            const __grid_constant__ CUtensorMap map_c, float* c) {
  const uint32_t smem = dynamic_smem();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.x;
  if (threadIdx.x == 0) {
    mbarrier_init(smem + kFull, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(smem + kFull, 2 * kTileBytes);
    tma_load_3d(smem + kA, &map_a, smem + kFull, kTransA ? 0 : 64 * slice, kTransA ? 64 * slice : 0, 0);
    tma_load_3d(smem + kB, &map_b, smem + kFull, 64 * slice, 0, 0);
  }
  mbarrier_wait(smem + kFull, 0);
  float x[32];
  const uint64_t a = descriptor(smem + kA), b = descriptor(smem + kB);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_m64n64k16_bf16_ss<kTransA, 0>(x, a + step * (kTransA ? kStepMN : kStepK), b + step * kStepK, step != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(x);

  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  if constexpr (kWay == kTensor || kWay == kLinear) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int y = row + 8 * (i / 2 % 2), z = column + 8 * (i / 4) + i % 2;
      uint32_t bits;
      memcpy(&bits, &x[i], sizeof bits);
      st_shared_b32(smem + kC + (64 * y + z) * 4, bits);
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      if constexpr (kWay == kTensor) {
        tma_reduce_add_3d(&map_c, smem + kC, 0, 0, 0);
      } else {
        bulk_reduce_add_f32(c, smem + kC, 64 * 64 * 4);
      }
      bulk_commit();
      bulk_wait<0>();
    }
  } else if constexpr (kWay == kVector) {
    // Lanes of even t take four columns of the row from their neighbour, those of odd t four of the row below.
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool odd = lane % 2;
      const float s0 = shfl_xor(odd ? x[4 * j] : x[4 * j + 2], 1), s1 = shfl_xor(odd ? x[4 * j + 1] : x[4 * j + 3], 1);
      float* place = c + (row + (odd ? 8 : 0)) * 64 + 8 * j + 4 * (lane % 4 / 2);
      if (odd) {
        red_add_v4_f32(place, s0, s1, x[4 * j + 2], x[4 * j + 3]);
      } else {
        red_add_v2_f32(place, x[4 * j], x[4 * j + 1]);
        red_add_v2_f32(place + 2, s0, s1);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float* place = c + (row + 8 * (i / 2 % 2)) * 64 + column + 8 * (i / 4) + i % 2;
      if (kWay == kMixed && slice == 0) {
        st_global_f32(place, x[i]);
      } else {
        red_add_f32(place, x[i]);
      }
    }
  }
}

template <bool kTransA>
auto choose(int way) {
  return way == kTensor   ? split_k<kTensor, kTransA>
         : way == kLinear ? split_k<kLinear, kTransA>
         : way == kVector ? split_k<kVector, kTransA>
         : way == kScalar ? split_k<kScalar, kTransA>
                          : split_k<kMixed, kTransA>;
}

}  // namespace
}  // namespace hopper

// A (64, k), or (k, 64) if trans_a; B (64, k); C (64, 64) float32. k is a multiple of 64.
extern "C" int hopper_split_k(const void* a, const void* b, void* c, int k, int trans_a, int way, void* stream) {
  using namespace hopper;
  CUtensorMap map_a, map_b, map_c;
  if (make_panel_map(&map_a, a, 1, trans_a ? k : 64, trans_a ? 64 : k, 64) || make_panel_map(&map_b, b, 1, 64, k, 64) ||
      make_map(&map_c, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, c, 1, 64, 64, 64, 64, CU_TENSOR_MAP_SWIZZLE_NONE)) {
    return cudaErrorInvalidValue;
  }
  auto kernel = trans_a ? choose<true>(way) : choose<false>(way);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(k / 64);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, map_a, map_b, map_c, static_cast<float*>(c));
}
