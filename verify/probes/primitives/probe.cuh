// probe.cuh: what every primitive probe does around the primitive: fill shared memory, dump it, launch, wait.
//
// Included after ptx_sm80.cuh or ptx_sm90a.cuh. All memory goes through their wrappers, so that a probe is compiled
// unchanged by nvcc for a GPU and by g++ for the emulator.
#ifndef TILEPROOF_PROBE_CUH
#define TILEPROOF_PROBE_CUH

// Shared memory [dst, dst + bytes) = image, by all threads of the block; visible to all of them on return.
__device__ inline void load_shared(uint32_t dst, const void* image, int bytes) {
  const char* source = static_cast<const char*>(image);
  for (int at = 16 * int(threadIdx.x); at < bytes; at += 16 * int(blockDim.x)) cp_async_16(dst + at, source + at);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// out = shared memory [src, src + bytes), by all threads of the block, after a barrier.
__device__ inline void dump_shared(void* out, uint32_t src, int bytes) {
  __syncthreads();
  char* target = static_cast<char*>(out);
  for (int at = 16 * int(threadIdx.x); at < bytes; at += 16 * int(blockDim.x)) {
    uint32_t r[4];
    ld_shared_b128(r, src + at);
    st_global_b128(target + at, r);
  }
}

// Four registers of this thread: entry `thread` of a table in shared memory, and the same in global memory.
__device__ inline void load_registers(uint32_t (&r)[4], uint32_t table, int thread) {
  ld_shared_b128(r, table + 16 * thread);
}
__device__ inline void store_registers(uint32_t* out, const uint32_t (&r)[4], int thread) {
  st_global_b128(out + 4 * thread, r);
}

// The float32 of a bit pattern, and back.
__device__ inline float as_float(uint32_t bits) {
  float value;
  static_assert(sizeof(value) == sizeof(bits), "float is 32 bits");
  memcpy(&value, &bits, sizeof(value));
  return value;
}
__device__ inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Runs a kernel to its end and returns its cudaError_t.
template <class... Parameters, class... Arguments>
int run(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, Arguments... arguments) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

#endif  // TILEPROOF_PROBE_CUH
