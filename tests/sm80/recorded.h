// Stands in for ptx_sm80.cuh and the CUDA runtime under g++: no instruction computes anything, every access to global
// and shared memory is written down, and a launch runs the chosen blocks thread by thread, each to its end. So this
// shows addresses, grids and error codes, not values and not synchronisation.
#define TILEPROOF_PTX_SM80_CUH
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x_) : x(x_) {}
};
using cudaStream_t = void*;
using cudaError_t = int;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline dim3 threadIdx;
inline uint32_t block_now;

namespace recorded {
struct Access {
  uint64_t address;
  int64_t bytes;
};
struct Shared {
  int64_t kind, thread, address;  // kind: 0 ldmatrix, 1 cp.async, 2 st.shared.b32, 3 ld.shared.b128
};
struct Launch {
  int64_t grid, threads, shared_bytes;
};
inline std::vector<Access> reads, writes;
inline std::vector<Shared> shared;
inline std::vector<Launch> launches;
inline void touch(int kind, uint32_t address) { shared.push_back({kind, threadIdx.x, address}); }
inline std::vector<int64_t> blocks;  // those of each launch to run; empty: all
inline int attribute_error, launch_error, attribute_bytes;
}  // namespace recorded

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  recorded::attribute_bytes = bytes;
  return recorded::attribute_error;
}

template <typename... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), P... arguments) {
  recorded::launches.push_back({c->gridDim.x, c->blockDim.x, static_cast<int64_t>(c->dynamicSmemBytes)});
  if (recorded::launch_error) return recorded::launch_error;
  std::vector<int64_t> run = recorded::blocks;
  for (int64_t b = 0; recorded::blocks.empty() && b < c->gridDim.x; ++b) run.push_back(b);
  for (int64_t b : run)
    for (unsigned t = 0; t < c->blockDim.x; ++t) {
      block_now = static_cast<uint32_t>(b);
      threadIdx.x = t;
      kernel(arguments...);
    }
  return cudaSuccess;
}

inline void __syncthreads() {}
inline uint32_t dynamic_smem() { return 0x400; }
inline uint32_t ctaid_x() { return block_now; }
inline void cp_async_16_zfill(uint32_t dst, const void* src, int bytes) {
  recorded::touch(1, dst);
  if (bytes) recorded::reads.push_back({reinterpret_cast<uint64_t>(src), bytes});
}
inline void cp_async_commit() {}
template <int>
void cp_async_wait() {}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  recorded::touch(0, row);
  r[0] = r[1] = r[2] = r[3] = 0;
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) { ldmatrix_x4(r, row); }
inline void mma_m16n8k16_bf16(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}
inline void mma_m16n8k16_f16(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}
inline float ex2_approx_ftz(float x) { return std::exp2(x); }
inline uint32_t cvt_rn_bf16x2(float, float) { return 0; }
inline uint32_t cvt_rn_f16x2(float, float) { return 0; }
inline float shfl_xor(float value, int) { return value; }
inline int redux_max_s32(int value) { return value; }
inline void st_shared_b32(uint32_t dst, uint32_t) { recorded::touch(2, dst); }
inline void ld_shared_b128(uint32_t (&r)[4], uint32_t src) {
  recorded::touch(3, src);
  r[0] = r[1] = r[2] = r[3] = 0;
}
inline int64_t ld_global_s64(const int64_t* src) { return *src; }
inline void st_global_f32(float* dst, float) { recorded::writes.push_back({reinterpret_cast<uint64_t>(dst), 4}); }
inline void st_global_b128(void* dst, const uint32_t (&)[4]) {
  recorded::writes.push_back({reinterpret_cast<uint64_t>(dst), 16});
}
