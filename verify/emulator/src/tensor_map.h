// tensor_map.h: what a tensor map says, and the walk over one box of it.
//
// A box is a block of elements that one TMA instruction moves. In shared memory its rows follow each other, dimension 1
// fastest, dense or one swizzle span apart if they are shorter than that; then the swizzle exchanges 16-byte chunks. In
// global memory it starts at the coordinates, and a load's may stick out of the tensor on every side.
// Source: PTX ISA, "Tensors" (bounding box, swizzling modes); CUDA driver API, cuTensorMapEncodeTiled. The distance of
// short rows is not in the manual: tests/data has it from an H200.
#pragma once
#include <cstdint>

#include "cuda.h"

namespace emu {

// The swizzle modes with the numbers of CUtensorMapSwizzle. Descriptors of wgmma number them differently.
enum class Swizzle : uint8_t { none = 0, span32 = 1, span64 = 2, span128 = 3 };

// Bytes of a row of the pattern, over which 16-byte chunks are exchanged.
constexpr uint32_t swizzle_span(Swizzle mode) { return 16u << static_cast<int>(mode); }

// Bytes after which the pattern repeats: eight rows of 128 bytes, four of them, two of them.
constexpr uint32_t swizzle_period(Swizzle mode) { return mode == Swizzle::none ? 16 : 8 * swizzle_span(mode); }

// The pattern is a function of the absolute shared address: bits 4.. are exclusive-or'ed with bits 7.. .
constexpr uint32_t swizzled(uint32_t address, Swizzle mode) {
  return address ^ ((address >> 3) & (swizzle_span(mode) - 16));
}

// The content of a CUtensorMap.
struct TensorMap {
  static constexpr uint32_t kMagic = 0x7e50a9d3;
  uint32_t magic;
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t type;  // CUtensorMapDataType
  Swizzle swizzle;
  char* base;
  uint64_t dims[5];     // elements
  uint64_t strides[4];  // bytes between neighbours in dimension i + 1
  uint16_t box[5];      // elements

  uint32_t row_bytes() const { return uint32_t(box[0]) * element_bytes; }
  uint32_t row_pitch() const {  // from one row to the next in shared memory
    return swizzle != Swizzle::none && row_bytes() < swizzle_span(swizzle) ? swizzle_span(swizzle) : row_bytes();
  }
  uint32_t rows() const;
  uint32_t box_bytes() const { return rows() * row_bytes(); }  // what an mbarrier counts
  uint32_t shared_bytes() const { return rows() * row_pitch(); }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a tensor map has 128 bytes");

// The content of `map`, or nullptr if the encoder did not make it.
const TensorMap* decode(const CUtensorMap* map);

// One innermost row of a box. Only the bytes [begin, end) of the row lie in the tensor; begin == end: none.
struct BoxRow {
  uint32_t shared;  // address of the row before swizzling
  char* global;     // of the row's first byte; meaningful for the bytes inside only
  uint32_t begin, end;
};

// Calls visit(BoxRow) for each row of the box at `coordinates`, in the order of shared memory.
template <class Visit>
void for_each_row(const TensorMap& map, const int* coordinates, uint32_t shared, Visit visit) {
  const int64_t first = coordinates[0], count = map.box[0], extent = static_cast<int64_t>(map.dims[0]);
  const int64_t from = first < 0 ? -first : 0, to = extent - first < count ? extent - first : count;
  const uint32_t rows = map.rows(), pitch = map.row_pitch();
  uint32_t index[5] = {};
  for (uint32_t row = 0; row < rows; ++row) {
    bool inside = from < to;
    int64_t offset = first * map.element_bytes;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t x = int64_t(coordinates[i]) + index[i];
      inside = inside && x >= 0 && x < static_cast<int64_t>(map.dims[i]);
      offset += x * static_cast<int64_t>(map.strides[i - 1]);
    }
    BoxRow piece{shared + row * pitch, map.base + offset, 0, 0};
    if (inside) {
      piece.begin = static_cast<uint32_t>(from) * map.element_bytes;
      piece.end = static_cast<uint32_t>(to) * map.element_bytes;
    }
    visit(piece);
    for (int i = 1; i < map.rank && ++index[i] == map.box[i]; ++i) index[i] = 0;
  }
}

// Calls visit(shared, offset, bytes) for the parts of [begin, end) of a row in each 16-byte chunk of shared memory:
// `shared` is the swizzled address of the byte `offset` of the row.
template <class Visit>
void for_each_chunk(const BoxRow& row, Swizzle mode, uint32_t begin, uint32_t end, Visit visit) {
  while (begin < end) {
    const uint32_t next = (begin | 15) + 1 < end ? (begin | 15) + 1 : end;
    visit(swizzled(row.shared + begin, mode), begin, next - begin);
    begin = next;
  }
}

}  // namespace emu
