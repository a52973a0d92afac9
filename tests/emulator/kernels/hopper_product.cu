// hopper_product.cu: one wgmma of operands whose shared memory and descriptors the host made.
//
// The image of shared memory comes by one bulk load: both operands, and behind them what each thread's registers of A
// and of the accumulator hold. The descriptors are arguments, so that a test can try every swizzle mode and both
// majors.
// Always: out[thread][register] is A B plus the accumulator.
#include "hopper_tiles.cuh"

namespace hopper {
namespace {

struct Params {
  const unsigned char* image;  // shared memory from the dynamic base on
  uint32_t image_bytes;
  uint32_t registers;  // where in the image: [128][4] registers of A, then [128][n / 2] of the accumulator
  uint64_t a, b;       // descriptors with start addresses relative to that base
  float* out;          // [128][n / 2]
};

constexpr uint32_t kSharedBytes = 224 * 1024, kBar = kSharedBytes - 8;

template <int kN, typename Product>
__device__ __forceinline__ void multiply(const Params& p, Product product) {
  const uint32_t smem = dynamic_smem();
  if (threadIdx.x == 0) {
    mbarrier_init(smem + kBar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(smem + kBar, p.image_bytes);
    bulk_load(smem, p.image, p.image_bytes, smem + kBar);
  }
  __syncthreads();
  mbarrier_wait(smem + kBar, 0);
  float d[kN / 2];
  uint32_t a[4];
  const uint32_t registers = smem + p.registers, sums = registers + 128 * sizeof a;
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = ld_shared_b32(registers + threadIdx.x * sizeof a + 4 * i);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const uint32_t bits = ld_shared_b32(sums + threadIdx.x * sizeof d + 4 * i);
    memcpy(&d[i], &bits, sizeof bits);
  }
  pin(d);
  wgmma_fence();
  product(d, a, p.a + (smem >> 4), p.b + (smem >> 4));
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) st_global_f32(p.out + threadIdx.x * (kN / 2) + i, d[i]);
}

// Both forms and types of m64n{N}k16, with the transposes as template arguments.
#define HOPPER_PRODUCTS(N)                                                                \
  template <int kTransA, int kTransB>                                                     \
  __global__ void product_n##N##_ss(const Params p) {                                     \
    multiply<N>(p, [](float (&d)[N / 2], const uint32_t (&)[4], uint64_t a, uint64_t b) { \
      wgmma_m64n##N##k16_bf16_ss<kTransA, kTransB>(d, a, b, 1);                           \
    });                                                                                   \
  }                                                                                       \
  template <int kTransB>                                                                  \
  __global__ void product_n##N##_rs(const Params p) {                                     \
    multiply<N>(p, [](float (&d)[N / 2], const uint32_t (&r)[4], uint64_t, uint64_t b) {  \
      wgmma_m64n##N##k16_f16_rs<kTransB>(d, r, b, 1);                                     \
    });                                                                                   \
  }
HOPPER_PRODUCTS(8)
HOPPER_PRODUCTS(64)
HOPPER_PRODUCTS(136)
HOPPER_PRODUCTS(256)

using Kernel = void (*)(const Params);

#define HOPPER_CHOOSE(N)                                                                              \
  if (n == N) {                                                                                       \
    return registers ? (trans_b ? Kernel(product_n##N##_rs<1>) : Kernel(product_n##N##_rs<0>))        \
           : trans_a ? (trans_b ? Kernel(product_n##N##_ss<1, 1>) : Kernel(product_n##N##_ss<1, 0>))  \
                     : (trans_b ? Kernel(product_n##N##_ss<0, 1>) : Kernel(product_n##N##_ss<0, 0>)); \
  }
Kernel choose(int n, bool registers, bool trans_a, bool trans_b) {
  HOPPER_CHOOSE(8)
  HOPPER_CHOOSE(64)
  HOPPER_CHOOSE(136)
  HOPPER_CHOOSE(256)
  return nullptr;
}

}  // namespace
}  // namespace hopper

// bf16 operands by two descriptors, or f16 with A in registers.
extern "C" int hopper_product(const void* image, int image_bytes, int register_offset, uint64_t a, uint64_t b,
                              void* out, int n, int registers, int trans_a, int trans_b, void* stream) {
  using namespace hopper;
  const Kernel kernel = choose(n, registers, trans_a, trans_b);
  if (!kernel) return cudaErrorInvalidValue;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  const Params p{static_cast<const unsigned char*>(image),
                 uint32_t(image_bytes),
                 uint32_t(register_offset),
                 a,
                 b,
                 static_cast<float*>(out)};
  return cudaLaunchKernelEx(&config, kernel, p);
}
