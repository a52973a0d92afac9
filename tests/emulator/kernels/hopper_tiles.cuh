// hopper_tiles.cuh: what the Hopper test kernels share: descriptors of 128-byte swizzled tiles, waiting, tensor maps.
//
// A tile of rows x 64 elements of 16 bits is a panel: rows of 128 bytes, the 16-byte chunk c of row r stored at chunk
// c ^ (r % 8), on a 1024-byte boundary. Wider tiles are panels one after the other.
#ifndef HOPPER_TILES_CUH
#define HOPPER_TILES_CUH
#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "ptx_sm90a.cuh"

namespace hopper {

constexpr uint32_t kRowBytes = 128;                // one row of a panel
constexpr uint32_t kAtomBytes = 8 * kRowBytes;     // eight rows: the period of the swizzle
constexpr uint32_t kStepK = 32 >> 4;               // 16 elements along K inside a row, in descriptor units
constexpr uint32_t kStepMN = 2 * kAtomBytes >> 4;  // 16 rows along K of an MN-major tile, in descriptor units

// Shared-memory descriptor of a 128-byte swizzled tile. `panel_bytes`: distance of neighbouring panels of an MN-major
// operand (not used by a K-major one).
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t panel_bytes = 16) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(panel_bytes >> 4) << 16 | uint64_t(kAtomBytes >> 4) << 32 |
         uint64_t(1) << 62;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  while (!mbarrier_try_wait_parity(bar, parity)) {
  }
}

// A position in a ring of kStages buffers, and the parity of the phase that its next user waits for.
template <int kStages>
struct Ring {
  uint32_t stage = 0, parity;
  __device__ __forceinline__ explicit Ring(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The encoder of tensor maps, found at run time so that nothing links against the driver.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status) !=
      cudaSuccess) {
    return nullptr;
  }
  return status == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
}

// Map of a contiguous (heads, n, d) array with boxes of (1, rows, columns). Returns 0 on success.
inline int make_map(CUtensorMap* map, CUtensorMapDataType type, uint32_t element_bytes, const void* base, int heads,
                    int n, int d, uint32_t rows, uint32_t columns, CUtensorMapSwizzle swizzle) {
  const EncodeTiled encode = encoder();
  if (!encode) return 1;
  const cuuint64_t dims[3] = {cuuint64_t(d), cuuint64_t(n), cuuint64_t(heads)};
  const cuuint64_t strides[2] = {cuuint64_t(d) * element_bytes, cuuint64_t(n) * d * element_bytes};
  const cuuint32_t box[3] = {columns, rows, 1}, ones[3] = {1, 1, 1};
  return encode(map, type, 3, const_cast<void*>(base), dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS;
}

// The usual map: bf16, panels of 64 columns, 128-byte swizzle.
inline int make_panel_map(CUtensorMap* map, const void* base, int heads, int n, int d, uint32_t rows) {
  return make_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, heads, n, d, rows, 64, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace hopper
#endif  // HOPPER_TILES_CUH
