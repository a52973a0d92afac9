// core_launch.cu: what a launch passes to a kernel, and which launches are refused.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

struct Wide {  // more than registers hold: passed by value, a copy for each thread
  float* out;
  int64_t filler[30];
  float first;
};

// Writes first + the rank of the thread in the grid to its place, from the built-in variables alone.
__global__ void ranks(const __grid_constant__ Wide p) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned rank = block * blockDim.x * blockDim.y * blockDim.z + thread;
  __syncthreads();
  st_global_f32(p.out + rank, p.first + rank);
}

// Each thread writes the last 4 bytes of the block's shared memory in its turn, or reads what nobody wrote.
__global__ void touch_last(int bytes, int reads) {
  const uint32_t last = dynamic_smem() + bytes - 16;
  if (!reads) st_shared_b32(last + 4 * (threadIdx.x % 4), 1);
  uint32_t r[4];
  if (reads) ld_shared_b128(r, last);
}

cudaLaunchConfig_t configured(dim3 grid, dim3 block, int shared) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  return config;
}

}  // namespace

extern "C" int run_ranks(float* out, const int* sizes, float first) {
  const cudaLaunchConfig_t config =
      configured(dim3(sizes[0], sizes[1], sizes[2]), dim3(sizes[3], sizes[4], sizes[5]), 0);
  Wide p = {};
  p.out = out;
  p.first = first;
  return cudaLaunchKernelEx(&config, ranks, p);
}

// allowed < 0: the attribute is left alone.
extern "C" int run_touch_last(int shared, int allowed, int reads) {
  if (allowed >= 0) {
    const cudaError_t error = cudaFuncSetAttribute(touch_last, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed);
    if (error != cudaSuccess) return error;
  }
  const cudaLaunchConfig_t config = configured(dim3(2), dim3(4), shared);
  return cudaLaunchKernelEx(&config, touch_last, shared, reads);
}

// Two launches, the first one finds something; what the second one returns.
extern "C" int run_after_a_finding(float* out, const int* sizes, float start) {
  const int first = run_touch_last(64, -1, 1);
  const int second = run_ranks(out, sizes, start);
  return first == cudaErrorLaunchFailure ? second : cudaSuccess;
}

extern "C" int run_cluster() {
  cudaLaunchConfig_t config = configured(dim3(2), dim3(32), 0);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {2, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, touch_last, 0, 0);
}
