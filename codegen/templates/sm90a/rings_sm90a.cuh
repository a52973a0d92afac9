// rings_sm90a.cuh: waiting on mbarriers, rings of buffers, and the matrix descriptors of tiles in shared memory.
//
// A tile is a row of panels, a panel kPanel columns of all rows of the tile, row by row: 128, 64 or 32 bytes per row,
// and swizzled over as many. Eight rows are one pattern of the swizzle, which depends on the address alone.
//
// Source: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Shared Memory Layout", "Matrix Descriptor Format".
#pragma once
#include <cstdint>

#include "ptx_sm90a.cuh"

namespace {

__device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) {
  while (!mbarrier_try_wait_parity(bar, parity)) {
  }
}

// Where one side stands in a ring of kStages buffers. A reader starts with parity 0, a writer with 1: all are empty.
template <int kStages>
struct Ring {
  uint32_t stage, parity;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Matrix descriptor of a tile made of kPanel-column panels.  PTX ISA, "Matrix Descriptor Format". Eight rows are
// one swizzle pattern; `panel_bytes` leads to the next panel where one instruction spans several (V).
template <int kPanel>
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kMode = kPanel == 64 ? 1 : kPanel == 32 ? 2 : 3;
  return kMode << 62 | uint64_t{8 * 2 * kPanel >> 4} << 32 | uint64_t{panel_bytes >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}

// What to add to the descriptor of a tile of kRows rows for k16 step `step` along its columns.
template <int kRows, int kPanel>
__device__ __forceinline__ constexpr uint32_t column_step(int step) {
  constexpr int kSteps = kPanel / 16;
  return (step / kSteps * 2 * kRows * kPanel + step % kSteps * 32) >> 4;
}

}  // namespace
