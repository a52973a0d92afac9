// tensor_sm90a.cu: probes of the tensor copies: loads, stores and reductions of 2D to 5D boxes with every swizzle.
//
// Each launcher takes device pointers, a Box in host memory, and returns a cudaError_t (or a CUresult above 100000 when
// the driver refuses the tensor map). Inputs and expected outputs: verify/conformance/tensors.py.
#include "ptx_sm90a.cuh"

#include <cstring>

#include "probe.cuh"

// All a copy needs, in host memory. Unused dimensions are 0. shared_bytes: what is filled before and dumped after.
struct Box {
  int32_t rank, is_float, swizzle, shared_bytes;
  int32_t start;  // of the box in shared memory, bytes
  int32_t box_bytes;
  int32_t box[5], coordinate[5];
  int64_t dims[5], strides[5];  // strides of dimensions 1, 2, ... in bytes
};

namespace {

struct Coordinates {
  int c[5];
};

enum class Direction { kLoad, kStore, kReduce };

template <int kRank>
__device__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t bar, const int (&c)[5]) {
  if constexpr (kRank == 2) tma_load_2d(dst, map, bar, c[0], c[1]);
  if constexpr (kRank == 3) tma_load_3d(dst, map, bar, c[0], c[1], c[2]);
  if constexpr (kRank == 4) tma_load_4d(dst, map, bar, c[0], c[1], c[2], c[3]);
  if constexpr (kRank == 5) tma_load_5d(dst, map, bar, c[0], c[1], c[2], c[3], c[4]);
}

template <int kRank>
__device__ void store_box(const CUtensorMap* map, uint32_t src, const int (&c)[5]) {
  if constexpr (kRank == 2) tma_store_2d(map, src, c[0], c[1]);
  if constexpr (kRank == 3) tma_store_3d(map, src, c[0], c[1], c[2]);
  if constexpr (kRank == 4) tma_store_4d(map, src, c[0], c[1], c[2], c[3]);
  if constexpr (kRank == 5) tma_store_5d(map, src, c[0], c[1], c[2], c[3], c[4]);
}

template <int kRank>
__device__ void reduce_box(const CUtensorMap* map, uint32_t src, const int (&c)[5]) {
  if constexpr (kRank == 2) tma_reduce_add_2d(map, src, c[0], c[1]);
  if constexpr (kRank == 3) tma_reduce_add_3d(map, src, c[0], c[1], c[2]);
  if constexpr (kRank == 4) tma_reduce_add_4d(map, src, c[0], c[1], c[2], c[3]);
  if constexpr (kRank == 5) tma_reduce_add_5d(map, src, c[0], c[1], c[2], c[3], c[4]);
}

// Shared memory = image; one thread copies the box in or out; then shared memory is dumped.
template <int kRank, Direction kDirection>
__global__ void box_kernel(const __grid_constant__ CUtensorMap map, Coordinates at, const void* image, char* out,
                           int bytes, int start, int box_bytes) {
  const uint32_t smem = dynamic_smem();
  const uint32_t bar = smem + bytes;
  const bool leader = threadIdx.x == 0;
  if (leader) {
    prefetch_tensormap(&map);
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
  }
  load_shared(smem, image, bytes);
  fence_proxy_async();
  __syncthreads();
  if constexpr (kDirection == Direction::kLoad) {
    if (leader) {
      mbarrier_arrive_expect_tx(bar, box_bytes);
      load_box<kRank>(smem + start, &map, bar, at.c);
    }
    while (!mbarrier_try_wait_parity(bar, 0)) {
    }
    dump_shared(out, smem, bytes);
  } else if (leader) {
    if constexpr (kDirection == Direction::kStore) {
      store_box<kRank>(&map, smem + start, at.c);
    } else {
      reduce_box<kRank>(&map, smem + start, at.c);
    }
    bulk_commit();
    bulk_wait<0>();
  }
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

CUresult encode(CUtensorMap* map, void* tensor, const Box& box) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      function == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  cuuint64_t dims[5], strides[5];
  cuuint32_t sizes[5], steps[5];
  for (int i = 0; i < 5; ++i) {
    dims[i] = cuuint64_t(box.dims[i]);
    strides[i] = cuuint64_t(box.strides[i]);
    sizes[i] = cuuint32_t(box.box[i]);
    steps[i] = 1;
  }
  return reinterpret_cast<EncodeTiled>(function)(
      map, box.is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cuuint32_t(box.rank),
      tensor, dims, strides, sizes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(box.swizzle),
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <Direction kDirection>
int copy(void* tensor, const void* image, char* out, const Box& box) {
  CUtensorMap map;
  const CUresult refused = encode(&map, tensor, box);
  if (refused != CUDA_SUCCESS) return 100000 + int(refused);
  Coordinates at;
  for (int i = 0; i < 5; ++i) at.c[i] = box.coordinate[i];
  auto kernel = box.rank == 2   ? box_kernel<2, kDirection>
                : box.rank == 3 ? box_kernel<3, kDirection>
                : box.rank == 4 ? box_kernel<4, kDirection>
                                : box_kernel<5, kDirection>;
  return run(kernel, 1, 64, box.shared_bytes + 1024, map, at, image, out, box.shared_bytes, box.start, box.box_bytes);
}

}  // namespace

// image, out: box->shared_bytes of shared memory before and after the load.
extern "C" int probe_tensor_load(void* tensor, const void* image, char* out, const Box* box) {
  return copy<Direction::kLoad>(tensor, image, out, *box);
}

// The tensor changes.
extern "C" int probe_tensor_store(void* tensor, const void* image, const Box* box) {
  return copy<Direction::kStore>(tensor, image, nullptr, *box);
}

extern "C" int probe_tensor_reduce(void* tensor, const void* image, const Box* box) {
  return copy<Direction::kReduce>(tensor, image, nullptr, *box);
}
