// core_order.cu: what orders two accesses, and what only seems to: each kernel beside the same one without its fault.
#include "core_faults.cuh"

namespace {

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

}  // namespace

extern "C" int run(const char* name, int fault, const void* in, void* out) {
  KERNEL(ldmatrix_of_own_rows, 1, 32);
  KERNEL(wait_of_one_lane, 1, 64);
  KERNEL(arrival_of_one_lane, 1, 64);
  KERNEL(proxy_fence_of_the_reader, 1, 64);
  KERNEL(init_fence_behind_the_barrier, 1, 64);
  return cudaErrorInvalidValue;
}
