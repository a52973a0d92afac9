// hopper_boxes.cu: one box of a tensor map, loaded, stored or added, of any rank, element type and swizzle.
//
// Loads show the bytes of shared memory as they lie there; stores and reductions start from bytes that the host gives.
// Always: `image` is shared memory from the dynamic base on, before a store or after a load.
#include "hopper_tiles.cuh"

namespace hopper {
namespace {

enum Operation { kLoad, kStore, kAdd };

struct Params {
  unsigned char* image;
  uint32_t image_bytes, box_bytes;
  int operation, rank;
  int c[5];
};

constexpr uint32_t kSharedBytes = 64 * 1024, kBar = kSharedBytes - 16;

__global__ void box(const __grid_constant__ CUtensorMap map, const Params p) {
  const uint32_t smem = dynamic_smem();
  if (threadIdx.x == 0) {
    mbarrier_init(smem + kBar, 1);
    mbarrier_init(smem + kBar + 8, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(smem + kBar, p.image_bytes);
    bulk_load(smem, p.image, p.image_bytes, smem + kBar);
    mbarrier_wait(smem + kBar, 0);
    const int* c = p.c;
    if (p.operation == kLoad) {
      mbarrier_arrive_expect_tx(smem + kBar + 8, p.box_bytes);
      if (p.rank == 2) tma_load_2d(smem, &map, smem + kBar + 8, c[0], c[1]);
      if (p.rank == 3) tma_load_3d(smem, &map, smem + kBar + 8, c[0], c[1], c[2]);
      if (p.rank == 4) tma_load_4d(smem, &map, smem + kBar + 8, c[0], c[1], c[2], c[3]);
      if (p.rank == 5) tma_load_5d(smem, &map, smem + kBar + 8, c[0], c[1], c[2], c[3], c[4]);
      mbarrier_wait(smem + kBar + 8, 0);
      bulk_store(p.image, smem, p.image_bytes);
    } else if (p.operation == kStore) {
      if (p.rank == 2) tma_store_2d(&map, smem, c[0], c[1]);
      if (p.rank == 3) tma_store_3d(&map, smem, c[0], c[1], c[2]);
      if (p.rank == 4) tma_store_4d(&map, smem, c[0], c[1], c[2], c[3]);
      if (p.rank == 5) tma_store_5d(&map, smem, c[0], c[1], c[2], c[3], c[4]);
    } else {
      if (p.rank == 2) tma_reduce_add_2d(&map, smem, c[0], c[1]);
      if (p.rank == 3) tma_reduce_add_3d(&map, smem, c[0], c[1], c[2]);
      if (p.rank == 4) tma_reduce_add_4d(&map, smem, c[0], c[1], c[2], c[3]);
      if (p.rank == 5) tma_reduce_add_5d(&map, smem, c[0], c[1], c[2], c[3], c[4]);
    }
    bulk_commit();
    bulk_wait<0>();
  }
}

}  // namespace
}  // namespace hopper

// The map's arguments are those of cuTensorMapEncodeTiled. Returns its result times 1000 if it is not 0.
extern "C" int hopper_box(void* tensor, int type, int rank, const uint64_t* dims, const uint64_t* strides,
                          const uint32_t* box_dims, const uint32_t* element_strides, int interleave, int swizzle,
                          int fill, const int* coordinates, void* image, int image_bytes, int box_bytes, int operation,
                          void* stream) {
  using namespace hopper;
  CUtensorMap map;
  const EncodeTiled encode = encoder();
  if (!encode) return 1;
  const CUresult refused = encode(&map, CUtensorMapDataType(type), uint32_t(rank), tensor, dims, strides, box_dims,
                                  element_strides, CUtensorMapInterleave(interleave), CUtensorMapSwizzle(swizzle),
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CUtensorMapFloatOOBfill(fill));
  if (refused != CUDA_SUCCESS) return 1000 * refused;
  Params p{static_cast<unsigned char*>(image), uint32_t(image_bytes), uint32_t(box_bytes), operation, rank, {}};
  for (int i = 0; i < rank; ++i) p.c[i] = coordinates[i];
  const cudaError_t error = cudaFuncSetAttribute(box, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, box, map, p);
}
