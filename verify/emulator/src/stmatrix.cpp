// stmatrix.cpp: four 8 x 8 matrices of 16-bit elements from registers to shared memory, the inverse of ldmatrix.
//
// Lane 8 q + i gives the address of row i of matrix q. Register q of lane 4 g + t holds the elements (g, 2 t) and
// (g, 2 t + 1) of matrix q; transposed, (2 t, g) and (2 t + 1, g). The low half has the first.
// Source: PTX ISA, "Warp-level Matrix Store Instruction: stmatrix".
#include <cstring>

#include "emu_ptx_sm90a.h"
#include "hopper.h"

namespace emu {
namespace {

struct Operands {
  uint32_t row;
  const uint32_t* registers;
  bool transposed;
  Site site;
};

void store(Warp& warp, void* const* operands, uint32_t) {
  uint16_t matrix[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& given = *static_cast<const Operands*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int q = 0; q < 4; ++q) {
      for (int e = 0; e < 2; ++e) {
        const auto half = static_cast<uint16_t>(given.registers[q] >> (16 * e));
        (given.transposed ? matrix[q][2 * t + e][g] : matrix[q][g][2 * t + e]) = half;
      }
    }
  }
  for (int q = 0; q < 4; ++q) {
    uint32_t rows[8];
    for (int i = 0; i < 8; ++i) {
      const int lane = 8 * q + i;
      const auto& given = *static_cast<const Operands*>(operands[lane]);
      const Thread& thread = lane_of(warp, lane);
      check_shared(given.row, 16, 16, "stmatrix", given.site, thread);
      shared_write(given.row, 16, generic_access("stmatrix", given.site, thread));
      std::memcpy(shared_at(given.row), matrix[q][i], 16);
      rows[i] = given.row;
    }
    count_matrix_rows(BankUse::stmatrix, rows);
  }
}

}  // namespace

void stmatrix_x4(uint32_t row, const uint32_t* registers, bool transposed, Site site) {
  yield_point();
  Operands operands{row, registers, transposed, site};
  collective(transposed ? "stmatrix.trans" : "stmatrix", kFullMask, &operands, store, site);
}

}  // namespace emu
