// tensor_map.cpp: the tensor-map encoder of the driver API, with the driver's checks.
//
// Source: CUDA driver API, cuTensorMapEncodeTiled (the constraints on each argument, in its order).
#include "tensor_map.h"

#include <cstdio>
#include <cstring>
#include <string>

namespace emu {
namespace {

std::string last_reason;

CUresult refuse(const std::string& reason) {
  last_reason = "cuTensorMapEncodeTiled: " + reason;
  return CUDA_ERROR_INVALID_VALUE;
}

uint32_t element_size(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ:
      return 4;
  }
  return 0;
}

std::string dimension(cuuint32_t i, const char* what, uint64_t value) {
  return std::string(what) + " " + std::to_string(value) + " of dimension " + std::to_string(i);
}

}  // namespace

uint32_t TensorMap::rows() const {
  uint32_t n = 1;
  for (int i = 1; i < rank; ++i) n *= box[i];
  return n;
}

const TensorMap* decode(const CUtensorMap* map) {
  const TensorMap* content = reinterpret_cast<const TensorMap*>(map);
  return content->magic == TensorMap::kMagic ? content : nullptr;
}

}  // namespace emu

extern "C" const char* emu_tensor_map_reason() { return emu::last_reason.c_str(); }

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                           const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                           const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                                           CUtensorMapFloatOOBfill fill) {
  using emu::dimension;
  using emu::refuse;
  emu::last_reason.clear();
  if (!map || reinterpret_cast<uintptr_t>(map) % 64) return refuse("the map is not aligned to 64 bytes");
  emu::TensorMap content = {};
  content.magic = emu::TensorMap::kMagic;
  content.element_bytes = static_cast<uint8_t>(emu::element_size(type));
  if (!content.element_bytes) return refuse("data type " + std::to_string(int(type)) + " is unknown");
  if (rank < 1 || rank > 5) return refuse("rank " + std::to_string(rank) + " is not in 1..5");
  if (!base || reinterpret_cast<uintptr_t>(base) % 16) return refuse("the base is not aligned to 16 bytes");
  if (!dims || !box || !element_strides || (rank > 1 && !strides)) return refuse("an array is a null pointer");
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (dims[i] < 1 || dims[i] > uint64_t(1) << 32) return refuse(dimension(i, "size", dims[i]) + " is not in 1..2^32");
    if (box[i] < 1 || box[i] > 256) return refuse(dimension(i, "box", box[i]) + " is not in 1..256");
    if (element_strides[i] != 1) return refuse(dimension(i, "element stride", element_strides[i]) + " is not 1");
    content.dims[i] = dims[i];
    content.box[i] = static_cast<uint16_t>(box[i]);
  }
  for (cuuint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16) return refuse(dimension(i + 1, "stride", strides[i]) + " is not a multiple of 16 bytes");
    if (strides[i] >= uint64_t(1) << 40) return refuse(dimension(i + 1, "stride", strides[i]) + " is not below 2^40");
    content.strides[i] = strides[i];
  }
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return refuse("interleaved layouts are not supported");
  if (swizzle < CU_TENSOR_MAP_SWIZZLE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B) {
    return refuse("swizzle mode " + std::to_string(int(swizzle)) + " is not supported");
  }
  if (l2_promotion < CU_TENSOR_MAP_L2_PROMOTION_NONE || l2_promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    return refuse("L2 promotion " + std::to_string(int(l2_promotion)) + " is unknown");
  }
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) return refuse("only zero fill is supported");
  content.rank = static_cast<uint8_t>(rank);
  content.type = static_cast<uint8_t>(type);
  content.swizzle = static_cast<emu::Swizzle>(swizzle);
  content.base = static_cast<char*>(base);
  const uint32_t inner = content.row_bytes(), span = emu::swizzle_span(content.swizzle);
  if (inner % 16) return refuse("the inner box has " + std::to_string(inner) + " bytes, which 16 does not divide");
  if (content.swizzle != emu::Swizzle::none && inner > span) {
    return refuse("the inner box has " + std::to_string(inner) + " bytes, more than the swizzle span of " +
                  std::to_string(span));
  }
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &content, sizeof content);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int version,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
  const bool known = symbol && std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  const bool served = known && version >= 12000;  // the function came with CUDA 12.0
  *function = served ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (status) {
    *status = served  ? cudaDriverEntryPointSuccess
              : known ? cudaDriverEntryPointVersionNotSufficent
                      : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
