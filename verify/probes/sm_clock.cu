// Reads the cycle counter of every multiprocessor beside the GPU's nanosecond timer. Two readings with work between
// them give the clock at which that work ran: cycles passed over nanoseconds passed, on the same multiprocessor.
// Source: PTX ISA, special registers %smid, %clock64, %globaltimer.
#include <cuda_runtime.h>

#include <cstdint>

constexpr unsigned kPlaces = 1024;  // one per multiprocessor, by its number; more than any GPU has

// One thread per block. Cycles and nanoseconds are stored together: blocks of one multiprocessor may overwrite each
// other, and any pair of theirs is a reading.
__global__ void read_clocks(longlong2* readings) {
  unsigned place;
  unsigned long long nanoseconds;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(place));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  const long long cycles = clock64();
  if (place < kPlaces) readings[place] = make_longlong2(cycles, static_cast<long long>(nanoseconds));
}

// readings: kPlaces pairs of int64 in device memory, zero where nothing was read. Returns the launch's error.
extern "C" int sm_clocks(void* readings, int blocks, void* stream) {
  read_clocks<<<blocks, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<longlong2*>(readings));
  return static_cast<int>(cudaGetLastError());
}
