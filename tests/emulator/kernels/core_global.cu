// core_global.cu: faults in the use of global memory. `in` and `out` are 4096 bytes; `out` is written once, or in rows.
#include "core_faults.cuh"

namespace {

template <bool kFault>
__global__ void read_behind_the_end(const Params p) {
  const int64_t* in = reinterpret_cast<const int64_t*>(p.in);
  ld_global_s64(in + (kFault ? 512 : 511));  // [read_behind_the_end]
}

// What a copy of 0 bytes would read does not matter.
template <bool kFault>
__global__ void copy_behind_the_end(const Params p) {
  const uint32_t own = dynamic_smem() + 16 * threadIdx.x;
  cp_async_16_zfill(own, p.in + 4096, kFault ? 16 : 0);  // [copy_behind_the_end]
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kFault>
__global__ void write_before_the_start(const Params p) {
  st_global_f32(reinterpret_cast<float*>(p.out) - (kFault ? 1 : 0), 1.f);  // [write_before_the_start]
}

template <bool kFault>
__global__ void write_to_an_input(const Params p) {
  char* to = kFault ? const_cast<char*>(p.in) : p.out;
  st_global_f32(reinterpret_cast<float*>(to), 1.f);  // [write_to_an_input]
}

template <bool kFault>
__global__ void misaligned_load(const Params p) {
  const char* from = p.in + (kFault ? 4 : 8);
  ld_global_s64(reinterpret_cast<const int64_t*>(from));  // [misaligned_load]
}

template <bool kFault>
__global__ void misaligned_copy(const Params p) {
  cp_async_16(dynamic_smem() + 16 * threadIdx.x, p.in + (kFault ? 8 : 16));  // [misaligned_copy]
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kFault>
__global__ void two_blocks_write_one_place(const Params p) {
  const int block = kFault ? 0 : ctaid_x();
  st_global_f32(reinterpret_cast<float*>(p.out) + 32 * block + threadIdx.x, 1.f);  // [two_blocks_write_one_place]
}

template <bool kFault>
__global__ void block_reads_what_another_writes(const Params p) {
  const int block = ctaid_x();
  float* out = reinterpret_cast<float*>(p.out) + 32 * block + threadIdx.x;
  st_global_f32(out, 1.f);  // [block_reads_what_another_writes]
  __syncwarp();  // a load takes what two threads have written
  const char* from = p.out + 128 * (kFault ? block ^ 1 : block) + threadIdx.x / 2 * 8;
  ld_global_s64(reinterpret_cast<const int64_t*>(from));  // [block_reads_what_another_writes]
}

template <bool kFault>
__global__ void output_written_twice(const Params p) {
  for (int i = threadIdx.x; i < 1024; i += 32) {
    float* to = reinterpret_cast<float*>(p.out) + i;
    st_global_f32(to, 1.f);                         // [output_written_twice]
    if (kFault && i == 77) st_global_f32(to, 2.f);  // [output_written_twice]
  }
}

template <bool kFault>
__global__ void output_not_written(const Params p) {
  for (int i = threadIdx.x; i < (kFault ? 1000 : 1024); i += 32)
    st_global_f32(reinterpret_cast<float*>(p.out) + i, 1.f);  // [output_not_written]
}

// Rows of 100 bytes, 128 bytes apart.
template <bool kFault>
__global__ void write_between_the_rows(const Params p) {
  const int row = threadIdx.x;
  for (int i = 0; i < (kFault && row == 7 ? 26 : 25); ++i) {
    float* to = reinterpret_cast<float*>(p.out) + 32 * row + i;
    st_global_f32(to, 1.f);  // [write_between_the_rows]
  }
}

template <bool kFault>
__global__ void row_not_written(const Params p) {
  const int row = threadIdx.x;
  if (kFault && row == 3) return;
  for (int i = 0; i < 25; ++i)
    st_global_f32(reinterpret_cast<float*>(p.out) + 32 * row + i, 1.f);  // [row_not_written]
}

}  // namespace

extern "C" int run(const char* name, int fault, const void* in, void* out) {
  KERNEL(read_behind_the_end, 1, 32);
  KERNEL(copy_behind_the_end, 1, 32);
  KERNEL(write_before_the_start, 1, 1);
  KERNEL(write_to_an_input, 1, 1);
  KERNEL(misaligned_load, 1, 32);
  KERNEL(misaligned_copy, 1, 32);
  KERNEL(two_blocks_write_one_place, 2, 32);
  KERNEL(block_reads_what_another_writes, 2, 32);
  KERNEL(output_written_twice, 1, 32);
  KERNEL(output_not_written, 1, 32);
  KERNEL(write_between_the_rows, 1, 32);
  KERNEL(row_not_written, 1, 32);
  return cudaErrorInvalidValue;
}
