// core_faults.cuh: how kernels with planted faults are launched: `name<true>` has the fault, `name<false>` is right.
//
// Lines that a finding must name end in `// [name]`.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

struct Params {
  const char* in;  // 4096 bytes, of 0
  char* out;       // 4096 bytes
};

template <typename Kernel>
cudaError_t launch(Kernel kernel, int blocks, int threads, const void* in, void* out) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = 4096;
  return cudaLaunchKernelEx(&config, kernel, Params{static_cast<const char*>(in), static_cast<char*>(out)});
}

// Inside of run(): `name` of `blocks` blocks of `threads` threads.
#define KERNEL(kernel, blocks, threads) \
  if (strcmp(name, #kernel) == 0) return launch(fault ? kernel<true> : kernel<false>, blocks, threads, in, out)

// Every thread zeroes its 16 bytes, and all know of it.
__device__ inline void zero_shared() {
  const uint32_t own = dynamic_smem() + 16 * threadIdx.x;
  for (int i = 0; i < 4; ++i) st_shared_b32(own + 4 * i, 0);
  __syncthreads();
}
