// barriers_sm90a.cu: probes of mbarrier phases, named barriers, bulk copies and setmaxnreg.
//
// Each launcher takes device pointers and sizes and returns a cudaError_t. Inputs and expected outputs:
// verify/conformance/barriers.py.
#include "ptx_sm90a.cuh"

#include <cstring>

#include "probe.cuh"

namespace {

// One thread, one barrier of count 3: what try_wait says where the manual says true, after each completed phase.
__global__ void phases_kernel(uint32_t* out, int phases) {
  const uint32_t bar = dynamic_smem();
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 3);
    fence_mbarrier_init();
    for (int phase = 0; phase < phases; ++phase) {
      const uint32_t previous = mbarrier_try_wait_parity(bar, (phase + 1) & 1) ? 1 : 0;
      mbarrier_arrive(bar);
      mbarrier_arrive_expect_tx(bar, 0);
      mbarrier_arrive(bar);
      const uint32_t completed = mbarrier_try_wait_parity(bar, phase & 1) ? 1 : 0;
      const uint32_t result[4] = {previous, completed, 0, 0};
      store_registers(out, result, phase);
    }
  }
}

// A ring of two places between two warps. Full barriers count 32 arrivals, empty ones 1. Item i carries
// 1000 i + lane, mirrored by the consumer: out[i][lane] = what lane 31 - lane wrote.
__global__ void ring_kernel(uint32_t* out, int items) {
  const uint32_t smem = dynamic_smem();
  const uint32_t full = smem, empty = smem + 16, places = smem + 128;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(full + 8 * stage, 32);
      mbarrier_init(empty + 8 * stage, 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int item = 0; item < items; ++item) {
    const int stage = item % 2, round = item / 2;
    const uint32_t place = places + 512 * stage;
    if (warp == 0) {
      while (!mbarrier_try_wait_parity(empty + 8 * stage, (round + 1) & 1)) {
      }
      const uint32_t r[4] = {uint32_t(1000 * item + lane), uint32_t(item), uint32_t(lane), uint32_t(stage)};
      st_shared_b128(place + 16 * lane, r);
      mbarrier_arrive(full + 8 * stage);
    } else {
      while (!mbarrier_try_wait_parity(full + 8 * stage, round & 1)) {
      }
      uint32_t r[4];
      ld_shared_b128(r, place + 16 * (31 - lane));
      store_registers(out + item * 32 * 4, r, lane);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + 8 * stage);
    }
  }
}

// Each round: two bulk loads complete on one barrier, announced before (even rounds) or after (odd rounds) the copies
// are issued; all threads wait and dump; then a bulk store of the first half and a reduction of the second.
__global__ void bulk_kernel(const char* source, char* out, char* stored, float* sums, int rounds, int half) {
  const uint32_t smem = dynamic_smem();
  const uint32_t bar = smem + 2 * half;
  const bool leader = threadIdx.x == 0;
  if (leader) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const char* from = source + 2 * half * round;
    if (leader) {
      if (round % 2 == 0) mbarrier_arrive_expect_tx(bar, 2 * half);
      bulk_load(smem + half, from, half, bar);
      bulk_load(smem, from + half, half, bar);
      if (round % 2 == 1) mbarrier_arrive_expect_tx(bar, 2 * half);
    }
    while (!mbarrier_try_wait_parity(bar, round & 1)) {
    }
    dump_shared(out + 2 * half * round, smem, 2 * half);
    if (leader) {
      bulk_store(stored + half * round, smem, half);
      bulk_commit();
      bulk_reduce_add_f32(sums, smem + half, half);
      bulk_commit();
      bulk_wait_read<1>();
      bulk_wait_read<0>();
      bulk_wait<0>();
    }
    __syncthreads();
  }
}

// Warps 0 and 1 hand four rounds of values to warps 2 and 3 through barriers 1 (full) and 2 (empty).
__global__ void named_kernel(uint32_t* out, int rounds) {
  const uint32_t smem = dynamic_smem();
  const int thread = threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    if (thread < 64) {
      if (round > 0) bar_sync(2, 128);
      const uint32_t r[4] = {uint32_t(1000 * round + thread), uint32_t(round), uint32_t(thread), 0};
      st_shared_b128(smem + 16 * thread, r);
      bar_arrive(1, 128);
    } else {
      bar_sync(1, 128);
      uint32_t r[4];
      ld_shared_b128(r, smem + 16 * (127 - thread));
      store_registers(out + round * 64 * 4, r, thread - 64);
      if (round + 1 < rounds) bar_arrive(2, 128);
    }
  }
}

// Three warpgroups: the first gives registers away, the others take them; then everyone stores its number.
__global__ void __launch_bounds__(384, 1) registers_kernel(float* out) {
  const int thread = threadIdx.x;
  if (thread < 128) {
    setmaxnreg_dec<40>();
    st_global_f32(out + thread, float(thread));
  } else {
    setmaxnreg_inc<232>();
    st_global_f32(out + thread, float(-thread));
  }
}

}  // namespace

// out: uint32 (phases, 4).
extern "C" int probe_phases(uint32_t* out, int phases) { return run(phases_kernel, 1, 32, 1024, out, phases); }

// out: uint32 (items, 32, 4).
extern "C" int probe_ring(uint32_t* out, int items) { return run(ring_kernel, 1, 64, 2048, out, items); }

// source, out: rounds * 2 * half bytes; stored: rounds * half bytes; sums: half bytes of float32.
extern "C" int probe_bulk(const char* source, char* out, char* stored, float* sums, int rounds, int half) {
  return run(bulk_kernel, 1, 64, 2 * half + 1024, source, out, stored, sums, rounds, half);
}

// out: uint32 (rounds, 64, 4).
extern "C" int probe_named(uint32_t* out, int rounds) { return run(named_kernel, 1, 128, 1024, out, rounds); }

// out: float32 (384,).
extern "C" int probe_registers(float* out) { return run(registers_kernel, 1, 384, 1024, out); }
