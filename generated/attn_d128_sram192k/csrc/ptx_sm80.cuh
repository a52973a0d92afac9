// ptx_sm80.cuh: every inline PTX instruction, every shared and every global access of the sm_80 kernels.
//
// One wrapper per instruction, named after it; no loops, no policy. A kernel that touches memory only
// through these functions can be run thread by thread on a CPU: an emulator defines the guard below and
// functions of the same names, written from the PTX manual and not from this file. Shared memory is an
// integer address, 16-bit floating point is its bits in a uint16_t, two of them share a uint32_t with
// the element of lower index in the low half.
//
// Source: PTX ISA 9.0; section names stand at each function. In a warp, lane = 4 * g + t.
#ifndef TILEPROOF_PTX_SM80_CUH
#define TILEPROOF_PTX_SM80_CUH
#include <cuda_runtime.h>

#include <cstdint>

// Address of the dynamic shared memory of the block. The swizzle counts on its alignment.
__device__ __forceinline__ uint32_t dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char tileproof_dynamic_smem[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(tileproof_dynamic_smem));
}

// blockIdx.x, read anew at every call: what follows from it need not stay in registers between two uses.
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// ---- Global to shared, asynchronous.  "cp.async", "cp.async.commit_group", "cp.async.wait_group"

// 16 bytes; both addresses are multiples of 16. `cg`: cached in L2 only, the block is the only reader in the SM.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(__cvta_generic_to_global(src)) : "memory");
}

// As cp_async_16, but only `bytes` (0 or 16) are read and the rest of the 16 is zero. With 0 bytes `src` is not read.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kNewest of this thread's committed groups are unfinished; the others are readable by this thread.
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// ---- Matrix fragments.  "Warp-level Matrix Load Instruction: ldmatrix", "Matrix Fragments for mma.m16n8k16"

// Four 8x8 matrices of 16-bit elements. Lane 8q + i gives the 16-byte aligned address of row i of matrix q;
// r[q] holds its elements (g, 2t) and (g, 2t + 1).
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same with each matrix transposed: r[q] holds elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// D += A B with A (16 x 16), B (16 x 8), D (16 x 8) in float32.
//   a[0] = A[g][2t..2t+1]   a[1] = A[g+8][2t..]   a[2] = A[g][2t+8..]   a[3] = A[g+8][2t+8..]
//   b0 = B[2t..2t+1][g]     b1 = B[2t+8..][g]     d[0..1] = D[g][2t..2t+1]   d[2..3] = D[g+8][2t..2t+1]
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Arithmetic.  "ex2", "cvt", "shfl.sync"

// 2^x, relative error below 2^-22 (2 ulp); a result below 2^-126 is 0; ex2(-inf) = 0; NaN stays NaN.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two float32 rounded to nearest even; the first source operand of cvt goes to the upper half.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t cvt_rn_f16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The number whose bits these are.
__device__ __forceinline__ float s32_as_float(int32_t bits) { return __int_as_float(bits); }

// The value of lane (lane ^ mask). All 32 lanes take part.
__device__ __forceinline__ float shfl_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// The largest value over the warp. For a value that is equal in all lanes it is the identity that tells the compiler so:
// the result lands in a uniform register, of which a warp needs one and not 32.  "redux.sync"
__device__ __forceinline__ int redux_max_s32(int value) {
  int largest;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
  return largest;
}

// ---- Shared memory by ordinary accesses.  "ld.shared", "st.shared"

__device__ __forceinline__ void st_shared_b32(uint32_t dst, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(value) : "memory");
}

__device__ __forceinline__ void ld_shared_b128(uint32_t (&r)[4], uint32_t src) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(src)
               : "memory");
}

// ---- Global memory by ordinary accesses

__device__ __forceinline__ int64_t ld_global_s64(const int64_t* src) { return *src; }
__device__ __forceinline__ float ld_global_f32(const float* src) { return *src; }

__device__ __forceinline__ void ld_global_b128(uint32_t (&r)[4], const void* src) {
  const uint4 value = *static_cast<const uint4*>(src);
  r[0] = value.x, r[1] = value.y, r[2] = value.z, r[3] = value.w;
}

__device__ __forceinline__ void st_global_f32(float* dst, float value) { *dst = value; }

__device__ __forceinline__ void st_global_b128(void* dst, const uint32_t (&r)[4]) {
  *static_cast<uint4*>(dst) = make_uint4(r[0], r[1], r[2], r[3]);
}

// *p += a, at some time before the kernel ends, by whichever thread comes first.  "red"
__device__ __forceinline__ void red_add_f32(float* p, float a) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "f"(a) : "memory");
}

#endif  // TILEPROOF_PTX_SM80_CUH
