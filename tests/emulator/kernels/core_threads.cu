// core_threads.cu: faults in how threads meet: warps that diverge, barriers that do not fit, threads that wait forever.
#include "core_faults.cuh"

namespace {

template <bool kFault>
__global__ void divergent_shuffle(const Params) {
  float x = 1.f;
  if (kFault && threadIdx.x < 8)
    x = shfl_xor(x, 1);  // [divergent_shuffle]
  else
    x = shfl_xor(x, 2);  // [divergent_shuffle]
}

template <bool kFault>
__global__ void shuffle_of_another_mask(const Params) {
  const int half = threadIdx.x / 16;
  const uint32_t mask = kFault && threadIdx.x == 15 ? 0xff00u : 0xffffu << 16 * half;
  __shfl_sync(mask, 1.f, 16 * half);  // [shuffle_of_another_mask]
}

template <bool kFault>
__global__ void lane_outside_of_its_mask(const Params) {
  if (kFault || threadIdx.x < 16) __syncwarp(0x0000ffffu);  // [lane_outside_of_its_mask]
}

template <bool kFault>
__global__ void exited_lane_is_waited_for(const Params) {
  if (threadIdx.x >= 24) return;
  __syncwarp(kFault ? 0xffffffffu : 0x00ffffffu);  // [exited_lane_is_waited_for]
}

template <bool kFault>
__global__ void lane_exits_from_a_mask(const Params) {
  __syncwarp();
  if (kFault && threadIdx.x == 5) return;
  __syncwarp();  // [lane_exits_from_a_mask]
}

template <bool kFault>
__global__ void warp_split_over_two_barriers(const Params) {
  if (kFault && threadIdx.x % 2)
    __syncthreads();  // [warp_split_over_two_barriers]
  else
    __syncthreads();  // [warp_split_over_two_barriers]
}

template <bool kFault>
__global__ void barrier_that_does_not_exist(const Params) {
  bar_sync(kFault ? 16 : 15, 64);  // [barrier_that_does_not_exist]
}

template <bool kFault>
__global__ void count_of_half_a_warp(const Params) {
  bar_sync(1, kFault ? 48 : 64);  // [count_of_half_a_warp]
}

template <bool kFault>
__global__ void two_counts_for_one_barrier(const Params) {
  if (threadIdx.x < 32)
    bar_sync(2, kFault ? 96 : 64);  // [two_counts_for_one_barrier]
  else
    bar_sync(2, 64);  // [two_counts_for_one_barrier]
}

template <bool kFault>
__global__ void barrier_that_one_warp_skips(const Params) {
  if (!kFault || threadIdx.x < 32) bar_sync(3, 64);  // [barrier_that_one_warp_skips]
}

template <bool kFault>
__global__ void two_warps_at_two_barriers(const Params) {
  if (threadIdx.x < 32)
    bar_sync(4, 64);  // [two_warps_at_two_barriers]
  else
    bar_sync(kFault ? 5 : 4, 64);  // [two_warps_at_two_barriers]
}

template <bool kFault>
__global__ void lanes_at_a_barrier_and_a_shuffle(const Params) {
  if (kFault && threadIdx.x < 16) shfl_xor(1.f, 1);  // [lanes_at_a_barrier_and_a_shuffle]
  __syncthreads();                                   // [lanes_at_a_barrier_and_a_shuffle]
}

// No fault in either form: a thread that exits completes __syncthreads for the others.
template <bool kFault>
__global__ void threads_that_leave_early(const Params) {
  if (threadIdx.x >= 64) return;
  if (kFault && threadIdx.x >= 32) return;
  __syncthreads();
  __syncthreads();
}

}  // namespace

extern "C" int run(const char* name, int fault, const void* in, void* out) {
  KERNEL(divergent_shuffle, 1, 32);
  KERNEL(shuffle_of_another_mask, 1, 32);
  KERNEL(lane_outside_of_its_mask, 1, 32);
  KERNEL(exited_lane_is_waited_for, 1, 32);
  KERNEL(lane_exits_from_a_mask, 1, 32);
  KERNEL(warp_split_over_two_barriers, 1, 64);
  KERNEL(barrier_that_does_not_exist, 1, 64);
  KERNEL(count_of_half_a_warp, 1, 64);
  KERNEL(two_counts_for_one_barrier, 1, 64);
  KERNEL(barrier_that_one_warp_skips, 1, 64);
  KERNEL(two_warps_at_two_barriers, 1, 64);
  KERNEL(lanes_at_a_barrier_and_a_shuffle, 1, 32);
  KERNEL(threads_that_leave_early, 1, 128);
  return cudaErrorInvalidValue;
}
