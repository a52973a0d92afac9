// core_order.cu: what orders two accesses, and what only seems to: each kernel beside the same one without its fault.
#include "core_faults.cuh"

namespace {

__device__ inline float* float_of(const Params& p, int i) { return reinterpret_cast<float*>(p.out) + i; }
__device__ inline const int64_t* pair_of(const Params& p, int i) { return reinterpret_cast<int64_t*>(p.out) + i; }

// Whether this block is the last of two to add to the counter, which starts as 0xffffffff: all threads know.
__device__ inline bool is_last_block(const Params& p) {
  if (threadIdx.x == 0) {
    const uint32_t before = atomic_add_global_u32(reinterpret_cast<uint32_t*>(p.out) + 1000, 1);
    st_shared_b32(dynamic_smem(), before);
  }
  __syncthreads();
  return ld_shared_b32(dynamic_smem()) == 0;
}

// ---- Shared memory

// ldmatrix gives a row to other lanes than the one that names it.
template <bool kFault>
__global__ void ldmatrix_of_own_rows(const Params) {
  const uint32_t own = dynamic_smem() + 16 * threadIdx.x;
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) st_shared_b32(own + 4 * i, 0);  // [ldmatrix_of_own_rows]
  if (!kFault) __syncwarp();
  ldmatrix_x4(r, own);  // [ldmatrix_of_own_rows]
}

// What one lane has waited for, a __syncwarp tells the others; a shuffle does not.
template <bool kFault>
__global__ void wait_of_one_lane(const Params) {
  const uint32_t i = threadIdx.x, own = dynamic_smem() + 16 * (i % 32), bar = dynamic_smem() + 2048;
  if (i == 0) mbarrier_init(bar, 32);
  zero_shared();
  if (i < 32) {
    st_shared_b32(own, i);  // [wait_of_one_lane]
    mbarrier_arrive(bar);
    return;
  }
  while (i == 32 && !mbarrier_try_wait_parity(bar, 0)) {
  }
  if (kFault)
    shfl_xor(0.f, 1);
  else
    __syncwarp();
  uint32_t r[4];
  ld_shared_b128(r, own);  // [wait_of_one_lane]
}

// One lane arrives for its warp once it knows what the others did.
template <bool kFault>
__global__ void arrival_of_one_lane(const Params) {
  const uint32_t i = threadIdx.x, own = dynamic_smem() + 16 * (i % 32), bar = dynamic_smem() + 2048;
  if (i == 0) mbarrier_init(bar, 1);
  zero_shared();
  uint32_t r[4];
  if (i < 32) {
    st_shared_b32(own, i);  // [arrival_of_one_lane]
    if (!kFault) __syncwarp();
    if (i == 0) mbarrier_arrive(bar);
  } else {
    while (!mbarrier_try_wait_parity(bar, 0)) {
    }
    ld_shared_b128(r, own);  // [arrival_of_one_lane]
  }
}

// The fence may be the reader's, if it comes after the barrier.
template <bool kFault>
__global__ void proxy_fence_of_the_reader(const Params p) {
  const uint32_t i = threadIdx.x;
  st_shared_b32(dynamic_smem() + 4 * i, i);  // [proxy_fence_of_the_reader]
  if (kFault && i == 0) fence_proxy_async();
  __syncthreads();
  if (i != 0) return;
  if (!kFault) fence_proxy_async();
  bulk_store(p.out, dynamic_smem(), 256);  // [proxy_fence_of_the_reader]
  bulk_commit();
  bulk_wait<0>();
}

// The fence of the thread that initialises must come before the barrier that tells the others.
template <bool kFault>
__global__ void init_fence_behind_the_barrier(const Params p) {
  const uint32_t i = threadIdx.x, bar = dynamic_smem() + 2048;
  if (i == 0) mbarrier_init(bar, 1);  // [init_fence_behind_the_barrier]
  if (!kFault && i == 0) fence_mbarrier_init();
  __syncthreads();
  if (kFault && i == 0) fence_mbarrier_init();
  if (i != 32) return;
  mbarrier_arrive_expect_tx(bar, 256);
  bulk_load(dynamic_smem(), p.in, 256, bar);  // [init_fence_behind_the_barrier]
  while (!mbarrier_try_wait_parity(bar, 0)) {
  }
}

// ---- Global memory, in one block

template <bool kFault>
__global__ void load_of_another_warps_store(const Params p) {
  const int i = threadIdx.x;
  st_global_f32(float_of(p, i), 1.f);  // [load_of_another_warps_store]
  if (!kFault) __syncthreads();
  ld_global_s64(pair_of(p, (i ^ 32) / 2));  // [load_of_another_warps_store]
}

// With wait_group.read the source may be used again, but nothing is known of the destination.
template <bool kFault>
__global__ void load_behind_a_wait_for_the_source(const Params p) {
  const int i = threadIdx.x;
  st_shared_b32(dynamic_smem() + 4 * i, i);
  fence_proxy_async();
  __syncthreads();
  if (i != 0) return;
  bulk_store(p.out, dynamic_smem(), 128);  // [load_behind_a_wait_for_the_source]
  bulk_commit();
  if (kFault)
    bulk_wait_read<0>();
  else
    bulk_wait<0>();
  ld_global_s64(pair_of(p, 0));  // [load_behind_a_wait_for_the_source]
}

// ---- Global memory, between blocks

// Whichever of the two blocks runs first.
template <bool kFault>
__global__ void store_to_what_another_block_reads(const Params p) {
  const int i = threadIdx.x;
  if (ctaid_x() == 0)
    ld_global_s64(pair_of(p, i));  // [store_to_what_another_block_reads]
  else
    st_global_f32(float_of(p, 2 * i + (kFault ? 0 : 128)), 1.f);  // [store_to_what_another_block_reads]
}

// Both blocks add, and one of them loads without knowing whether the other has.
template <bool kFault>
__global__ void load_of_a_sum(const Params p) {
  const int i = threadIdx.x;
  red_add_f32(float_of(p, 2 * i), 1.f);                        // [load_of_a_sum]
  if (kFault && ctaid_x() == 1) ld_global_s64(pair_of(p, i));  // [load_of_a_sum]
}

// The last block reads what the others wrote: fence, add, add, fence.
template <bool kFault>
__global__ void counter_without_fences(const Params p) {
  const int i = threadIdx.x, block = ctaid_x();
  st_global_f32(float_of(p, 32 * block + i), 1.f);  // [counter_without_fences]
  if (!kFault) __threadfence();
  __syncthreads();
  if (!is_last_block(p)) return;
  if (!kFault) __threadfence();
  ld_global_s64(pair_of(p, 16 * (block ^ 1) + i / 2));  // [counter_without_fences]
}

template <bool kFault>
__global__ void counter_without_the_readers_fence(const Params p) {
  const int i = threadIdx.x, block = ctaid_x();
  st_global_f32(float_of(p, 32 * block + i), 1.f);  // [counter_without_the_readers_fence]
  __syncthreads();
  if (i == 0) __threadfence();  // for all, behind the barrier
  if (!is_last_block(p)) return;
  if (!kFault) __threadfence();
  ld_global_s64(pair_of(p, 16 * (block ^ 1) + i / 2));  // [counter_without_the_readers_fence]
}

// The thread that adds knows nothing of what the others wrote.
template <bool kFault>
__global__ void counter_without_the_writers_barrier(const Params p) {
  const int i = threadIdx.x, block = ctaid_x();
  st_global_f32(float_of(p, 32 * block + i), 1.f);  // [counter_without_the_writers_barrier]
  __threadfence();
  if (!kFault) __syncthreads();
  if (!is_last_block(p)) return;
  __threadfence();
  ld_global_s64(pair_of(p, 16 * (block ^ 1) + i / 2));  // [counter_without_the_writers_barrier]
}

// Bytes that a bulk copy writes are there after wait_group, not after wait_group.read.
template <bool kFault>
__global__ void counter_before_the_bytes(const Params p) {
  const int i = threadIdx.x, block = ctaid_x();
  st_shared_b32(dynamic_smem() + 128 + 4 * i, i);
  fence_proxy_async();
  __syncthreads();
  if (i == 0) {
    bulk_store(p.out + 128 * block, dynamic_smem() + 128, 128);  // [counter_before_the_bytes]
    bulk_commit();
    if (kFault)
      bulk_wait_read<0>();
    else
      bulk_wait<0>();
    __threadfence();
  }
  if (!is_last_block(p)) return;
  __threadfence();
  ld_global_s64(pair_of(p, 16 * (block ^ 1) + i / 2));  // [counter_before_the_bytes]
}

// A barrier of the whole grid: the emulator runs blocks one after the other, so the first waits for ever.
template <bool kFault>
__global__ void wait_for_a_later_block(const Params p) {
  uint32_t* counter = reinterpret_cast<uint32_t*>(p.out) + 1000;  // 0xffffffff before
  atomic_add_global_u32(counter, 2);
  while (atomic_add_global_u32(counter, 0) < (kFault ? 3 : 1)) {  // [wait_for_a_later_block]
  }
}

}  // namespace

extern "C" int run(const char* name, int fault, const void* in, void* out) {
  KERNEL(ldmatrix_of_own_rows, 1, 32);
  KERNEL(wait_of_one_lane, 1, 64);
  KERNEL(arrival_of_one_lane, 1, 64);
  KERNEL(proxy_fence_of_the_reader, 1, 64);
  KERNEL(init_fence_behind_the_barrier, 1, 64);
  KERNEL(load_of_another_warps_store, 1, 64);
  KERNEL(load_behind_a_wait_for_the_source, 1, 32);
  KERNEL(store_to_what_another_block_reads, 2, 32);
  KERNEL(load_of_a_sum, 2, 32);
  KERNEL(counter_without_fences, 2, 32);
  KERNEL(counter_without_the_readers_fence, 2, 32);
  KERNEL(counter_without_the_writers_barrier, 2, 32);
  KERNEL(counter_before_the_bytes, 2, 32);
  KERNEL(wait_for_a_later_block, 2, 1);
  return cudaErrorInvalidValue;
}
