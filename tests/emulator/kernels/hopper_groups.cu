// hopper_groups.cu: bulk groups and their two waits, stmatrix and its transposed form, votes and integer maxima.
//
// `relay` copies rows to global memory through two buffers that it fills in turn: it may fill one again when at most
// the newest store still reads. `echo` reads back what it has stored, which needs the wait for the writing. `fragments`
// stores one register image by stmatrix, and by its transposed form.
// Always: with the arguments named right below, the output is the input.
#include "hopper_tiles.cuh"

namespace hopper {
namespace {

constexpr uint32_t kRow = 512, kBar = 2 * kRow, kSharedBytes = kBar + 8;

struct Params {
  const uint32_t* input;
  uint32_t* scratch;
  uint32_t* output;
  int rows, choice;
};

// choice: how many stores may still read when a buffer is filled again. 1 is right, 2 is not.
__global__ void relay(const Params p) {
  const uint32_t smem = dynamic_smem();
  for (int row = 0; row < p.rows; ++row) {
    const uint32_t buffer = smem + row % 2 * kRow;
    if (threadIdx.x == 0) {
      if (p.choice == 1) {
        bulk_wait_read<1>();
      } else {
        bulk_wait_read<2>();
      }
    }
    __syncwarp();
    const uint32_t first = row * (kRow / 4) + 4 * threadIdx.x;
    const uint32_t r[4] = {first, first + 1, first + 2, first + 3};
    st_shared_b128(buffer + 16 * threadIdx.x, r);
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x == 0) {
      bulk_store(p.output + row * (kRow / 4), buffer, kRow);
      bulk_commit();
    }
  }
  if (threadIdx.x == 0) bulk_wait<0>();
}

// choice: 0 waits for the writing, which is right; 1 for the reading only. The load is issued before its expect_tx.
__global__ void echo(const Params p) {
  const uint32_t smem = dynamic_smem();
  if (threadIdx.x != 0) return;
  mbarrier_init(smem + kBar, 1);
  fence_mbarrier_init();
  bulk_load(smem, p.input, kRow, smem + kBar);
  mbarrier_arrive_expect_tx(smem + kBar, kRow);
  mbarrier_wait(smem + kBar, 0);
  bulk_store(p.scratch, smem, kRow);
  bulk_commit();
  if (p.choice == 0) {
    bulk_wait<0>();
  } else {
    bulk_wait_read<0>();
  }
  bulk_load(smem + kRow, p.scratch, kRow, smem + kBar);
  mbarrier_arrive_expect_tx(smem + kBar, kRow);
  mbarrier_wait(smem + kBar, 1);
  bulk_store(p.output, smem + kRow, kRow);
  bulk_commit();
  bulk_wait<0>();
}

// choice: 0 stmatrix, 1 its transposed form. Register q of each lane is `input` [lane][q]; `output` is the four
// matrices.
__global__ void fragments(const Params p) {
  const uint32_t smem = dynamic_smem(), lane = threadIdx.x;
  if (lane == 0) {
    mbarrier_init(smem + kBar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(smem + kBar, kRow);
    bulk_load(smem, p.input, kRow, smem + kBar);
  }
  __syncwarp();
  mbarrier_wait(smem + kBar, 0);
  uint32_t r[4];
  ld_shared_b128(r, smem + 16 * lane);
  if (p.choice == 0) {
    stmatrix_x4(smem + kRow + 16 * lane, r);
  } else {
    stmatrix_x4_trans(smem + kRow + 16 * lane, r);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    bulk_store(p.output, smem + kRow, kRow);
    bulk_commit();
    bulk_wait<0>();
  }
}

// output[lane]: max(3 lane - 40, 17 - lane, choice). output[32 + lane]: lane ^ 5, with bit 31 set if a lane is
// `choice`. output[64 + lane]: the bits of -1.5.
__global__ void integers(const Params p) {
  const int lane = threadIdx.x, a = 3 * lane - 40, b = 17 - lane, c = p.choice;
  float* out = reinterpret_cast<float*>(p.output);
  st_global_f32(out + lane, s32_as_float(max3_s32(a, b, c)));
  const bool any = vote_any(lane == p.choice);
  st_global_f32(out + 32 + lane, s32_as_float(int32_t(shfl_xor_b32(uint32_t(lane), 5) | (any ? 1u << 31 : 0u))));
  st_global_f32(out + 64 + lane, s32_as_float(float_as_s32(-1.5f)));
}

}  // namespace
}  // namespace hopper

// which: 0 relay, 1 echo, 2 fragments, 3 integers.
extern "C" int hopper_groups(int which, const void* input, void* scratch, void* output, int rows, int choice,
                             void* stream) {
  using namespace hopper;
  const Params p{static_cast<const uint32_t*>(input), static_cast<uint32_t*>(scratch), static_cast<uint32_t*>(output),
                 rows, choice};
  auto kernel = which == 0 ? relay : which == 1 ? echo : which == 2 ? fragments : integers;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, p);
}
