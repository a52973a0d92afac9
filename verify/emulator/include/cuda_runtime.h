// cuda_runtime.h: the CUDA language and host API that emitted kernels use, for an ordinary C++ compiler.
//
// Keywords become empty macros, threadIdx and its kin plain variables that the scheduler sets, and a launch runs the
// grid at once on the calling thread. Streams are accepted and ignored. Twins of device functions take their call site
// as hidden last argument, so that findings name the emitted line.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emu {

// Where a twin was called in the emitted text. `code` is the place of the call in the library, from which the debug
// information tells the calls around it: the line of an inlined helper alone does not say which of its uses is meant.
struct Site {
  const char* file = nullptr;
  int line = 0;
  uint32_t code = 0;
};

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;  // by the linker: the library's first byte

// The place in the library from which this is called; 0 on a machine where nobody has said how to ask.
__attribute__((always_inline)) inline uint32_t code_here() {
#if defined(__x86_64__)
  const char* here;
  asm volatile("1: lea 1b(%%rip), %0" : "=r"(here));
  return static_cast<uint32_t>(here - &__ehdr_start);
#elif defined(__aarch64__)
  const char* here;
  asm volatile("adr %0, ." : "=r"(here));
  return static_cast<uint32_t>(here - &__ehdr_start);
#else
  return 0;
#endif
}

// The last parameters of a twin, and what its body makes of them.
#define EMU_SITE \
  const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE(), uint32_t emu_code = ::emu::code_here()
#define EMU_HERE (::emu::Site{emu_file, emu_line, emu_code})

// threads < 0: all threads of the block that have not exited.
void barrier_sync(int id, int threads, const char* what, Site site);
void barrier_arrive(int id, int threads, const char* what, Site site);
void syncwarp(uint32_t mask, Site site);
void thread_fence();
// The value of lane `source`; of the caller where `source` is outside of the mask.
uint32_t shuffle(uint32_t mask, uint32_t value, int source, Site site);
int own_lane();

void allow_shared_bytes(const void* kernel, int bytes);

// What every thread of a launch calls: a kernel with its arguments. No std::function: <functional> alone is a tenth of a
// second in each compilation.
struct Body {
  void (*call)(const void* closure);
  const void* closure;
};
int launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, Body body);
int last_launch_code();

template <typename T>
T shuffle_as(uint32_t mask, T value, int source, Site site) {
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = shuffle(mask, bits, source, site);
  memcpy(&value, &bits, 4);
  return value;
}

}  // namespace emu

// ---- Device functions

inline void __syncthreads(EMU_SITE) { emu::barrier_sync(0, -1, "__syncthreads", EMU_HERE); }
inline void __syncwarp(uint32_t mask = 0xffffffffu, EMU_SITE) { emu::syncwarp(mask, EMU_HERE); }
inline void __threadfence() { emu::thread_fence(); }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, EMU_SITE) {
  const int segment = emu::own_lane() & ~(width - 1);
  return emu::shuffle_as(mask, value, segment + (source & (width - 1)), EMU_HERE);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32, EMU_SITE) {
  const int lane = emu::own_lane(), source = lane ^ lane_mask;
  return emu::shuffle_as(mask, value, source / width > lane / width ? lane : source, EMU_HERE);
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// ---- Host functions

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801
};
typedef struct emu_stream* cudaStream_t;
typedef struct emu_event* cudaEvent_t;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || value > 227 * 1024) return cudaErrorInvalidValue;
  emu::allow_shared_bytes(reinterpret_cast<const void*>(kernel), value);
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    const auto& cluster = attribute.val.clusterDim;
    if (attribute.id == cudaLaunchAttributeClusterDimension && cluster.x * cluster.y * cluster.z != 1)
      return cudaErrorNotSupported;
  }
  std::tuple<std::decay_t<Parameters>...> parameters(std::forward<Arguments>(arguments)...);
  const auto thread = [&] { std::apply(kernel, parameters); };
  const emu::Body body = {[](const void* closure) { (*static_cast<decltype(&thread)>(closure))(); }, &thread};
  return static_cast<cudaError_t>(emu::launch(reinterpret_cast<const void*>(kernel), config->gridDim, config->blockDim,
                                              config->dynamicSmemBytes, body));
}

inline cudaError_t cudaGetLastError() { return static_cast<cudaError_t>(emu::last_launch_code()); }
inline cudaError_t cudaPeekAtLastError() { return cudaGetLastError(); }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* destination, int value, size_t bytes, cudaStream_t = nullptr) {
  memset(destination, value, bytes);
  return cudaSuccess;
}
