// map_sm90a.h: tensor maps over Q, K and V, made on the host.
//
// Source: CUDA driver API 13, cuTensorMapEncodeTiled.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// A tensor map over (batch, head, row, column) with boxes of `rows` x `panel`. Strides count elements.
cudaError_t make_map(CUtensorMap* map, CUtensorMapDataType type, const void* base, int64_t columns, int64_t rows,
                     int64_t heads, int64_t batches, const int64_t (&strides)[3], int box_rows, int panel) {
  using Encode = decltype(&cuTensorMapEncodeTiled);  // found at run time: nothing links against the driver
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Encode>(
        error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const int64_t sizes[3] = {rows, heads, batches};
  cuuint64_t dims[4] = {static_cast<cuuint64_t>(columns)}, bytes[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t stride = sizes[i] > 1 ? 2 * strides[2 - i] : 16;  // the stride of a dimension of size 1 means nothing
    if (stride <= 0 || stride % 16 != 0 || stride >= int64_t{1} << 40) return cudaErrorNotSupported;
    dims[i + 1] = sizes[i];
    bytes[i] = stride;
  }
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(panel), static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = panel == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : panel == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult result = encode(map, type, 4, const_cast<void*>(base), dims, bytes, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace
