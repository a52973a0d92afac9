// core_shared.cu: faults in the use of shared memory, each beside the same kernel without it.
#include "core_faults.cuh"

namespace {

template <bool kFault>
__global__ void read_without_syncthreads(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  st_shared_b32(smem + 16 * i, i);  // [read_without_syncthreads]
  if (!kFault) __syncthreads();
  uint32_t r[4];
  ld_shared_b128(r, smem + 16 * (i ^ 32));  // [read_without_syncthreads]
}

template <bool kFault>
__global__ void overwrite_without_syncthreads(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  uint32_t r[4];
  ld_shared_b128(r, smem + 16 * (i ^ 32));  // [overwrite_without_syncthreads]
  if (!kFault) __syncthreads();
  st_shared_b32(smem + 16 * i, i);  // [overwrite_without_syncthreads]
}

template <bool kFault>
__global__ void overwrite_of_narrow_reads(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  ld_shared_b32(smem + 4 * (i ^ 32));  // [overwrite_of_narrow_reads]
  if (!kFault) __syncthreads();
  st_shared_b32(smem + 4 * i, i);  // [overwrite_of_narrow_reads]
}

template <bool kFault>
__global__ void two_writers(const Params) {
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  if (i < 32) st_shared_b32(smem + 4 * i, 1);  // [two_writers]
  if (!kFault) __syncthreads();
  if (i >= 32) st_shared_b32(smem + 4 * i - 128, 2);  // [two_writers]
}

// A shuffle lets the lanes meet, but orders no memory.
template <bool kFault>
__global__ void shuffle_instead_of_syncwarp(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  st_shared_b32(smem + 16 * i, i);  // [shuffle_instead_of_syncwarp]
  if (kFault)
    shfl_xor(0.f, 1);
  else
    __syncwarp();
  uint32_t r[4];
  ld_shared_b128(r, smem + 16 * (i ^ 1));  // [shuffle_instead_of_syncwarp]
}

// The warps of each pair need a barrier; __syncwarp orders the lanes of one warp only.
template <bool kFault>
__global__ void syncwarp_instead_of_barrier(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  st_shared_b32(smem + 16 * i, i);  // [syncwarp_instead_of_barrier]
  __syncwarp();
  if (!kFault) bar_sync(1 + i / 64, 64);
  uint32_t r[4];
  ld_shared_b128(r, smem + 16 * (i ^ 32));  // [syncwarp_instead_of_barrier]
}

// bar.arrive gives, but does not take: the reader must sync.
template <bool kFault>
__global__ void reader_only_arrives(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  if (i < 32) {
    st_shared_b32(smem + 16 * i, i);  // [reader_only_arrives]
    bar_arrive(1, 64);
  } else {
    if (kFault)
      bar_arrive(1, 64);
    else
      bar_sync(1, 64);
    uint32_t r[4];
    ld_shared_b128(r, smem + 16 * (i - 32));  // [reader_only_arrives]
  }
}

template <bool kFault>
__global__ void copy_not_waited_for(const Params p) {
  const uint32_t own = dynamic_smem() + 16 * threadIdx.x;
  cp_async_16(own, p.in + 16 * threadIdx.x);  // [copy_not_waited_for]
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  uint32_t r[4];
  ld_shared_b128(r, own);  // [copy_not_waited_for]
  cp_async_wait<0>();
}

template <bool kFault>
__global__ void copy_of_the_wrong_group(const Params p) {
  const uint32_t own = dynamic_smem() + 16 * threadIdx.x;
  cp_async_16(own + 2048, p.in);
  cp_async_commit();
  cp_async_16(own, p.in + 16 * threadIdx.x);  // [copy_of_the_wrong_group]
  cp_async_commit();
  cp_async_wait<kFault ? 1 : 0>();
  uint32_t r[4];
  ld_shared_b128(r, own);  // [copy_of_the_wrong_group]
  cp_async_wait<0>();
}

// Each thread has waited for its own copies, which says nothing to the others.
template <bool kFault>
__global__ void copy_without_barrier(const Params p) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  cp_async_16(smem + 16 * i, p.in + 16 * i);  // [copy_without_barrier]
  cp_async_commit();
  cp_async_wait<0>();
  if (!kFault) __syncthreads();
  uint32_t r[4];
  ldmatrix_x4(r, smem + 16 * (i ^ 32));  // [copy_without_barrier]
}

template <bool kFault>
__global__ void copy_into_a_buffer_in_use(const Params p) {
  zero_shared();
  const uint32_t smem = dynamic_smem(), i = threadIdx.x;
  uint32_t r[4];
  ldmatrix_x4_trans(r, smem + 16 * (i ^ 32));  // [copy_into_a_buffer_in_use]
  if (!kFault) __syncthreads();
  cp_async_16(smem + 16 * i, p.in + 16 * i);  // [copy_into_a_buffer_in_use]
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kFault>
__global__ void exit_with_a_copy(const Params p) {
  cp_async_16(dynamic_smem() + 16 * threadIdx.x, p.in);  // [exit_with_a_copy]
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  cp_async_commit();  // an empty group may stay
}

template <bool kFault>
__global__ void read_of_nothing(const Params) {
  zero_shared();
  const uint32_t smem = dynamic_smem();
  uint32_t r[4];
  ldmatrix_x4(r, smem + 16 * threadIdx.x + (kFault ? 16 : 0));  // [read_of_nothing]
}

template <bool kFault>
__global__ void beyond_the_block(const Params) {
  st_shared_b32(dynamic_smem() + 4 * threadIdx.x + (kFault ? 4096 : 0), 1);  // [beyond_the_block]
}

template <bool kFault>
__global__ void before_the_block(const Params) {
  st_shared_b32(dynamic_smem() + 4 * threadIdx.x - (kFault ? 4 : 0), 1);  // [before_the_block]
}

template <bool kFault>
__global__ void misaligned_row(const Params) {
  zero_shared();
  uint32_t r[4];
  ldmatrix_x4(r, dynamic_smem() + 16 * (threadIdx.x % 16) + (kFault ? 8 : 0));  // [misaligned_row]
}

template <bool kFault>
__global__ void misaligned_store(const Params) {
  st_shared_b32(dynamic_smem() + 8 * threadIdx.x + (kFault ? 2 : 0), 1);  // [misaligned_store]
}

template <bool kFault>
__global__ void copy_of_too_many_bytes(const Params p) {
  cp_async_16_zfill(dynamic_smem() + 16 * threadIdx.x, p.in, kFault ? 32 : 0);  // [copy_of_too_many_bytes]
  cp_async_commit();
  cp_async_wait<0>();
}

}  // namespace

extern "C" int run(const char* name, int fault, const void* in, void* out) {
  KERNEL(read_without_syncthreads, 1, 128);
  KERNEL(overwrite_without_syncthreads, 1, 128);
  KERNEL(overwrite_of_narrow_reads, 1, 128);
  KERNEL(two_writers, 1, 64);
  KERNEL(shuffle_instead_of_syncwarp, 1, 32);
  KERNEL(syncwarp_instead_of_barrier, 1, 128);
  KERNEL(reader_only_arrives, 1, 64);
  KERNEL(copy_not_waited_for, 1, 64);
  KERNEL(copy_of_the_wrong_group, 1, 64);
  KERNEL(copy_without_barrier, 1, 64);
  KERNEL(copy_into_a_buffer_in_use, 1, 64);
  KERNEL(exit_with_a_copy, 1, 32);
  KERNEL(read_of_nothing, 1, 64);
  KERNEL(beyond_the_block, 1, 64);
  KERNEL(before_the_block, 1, 64);
  KERNEL(misaligned_row, 1, 32);
  KERNEL(misaligned_store, 1, 32);
  KERNEL(copy_of_too_many_bytes, 1, 32);
  return cudaErrorInvalidValue;
}
