// matrix.cpp: ldmatrix and mma.sync, which a warp executes as one.
//
// Source: PTX ISA, "Warp-level Matrix Load Instruction: ldmatrix", "Matrix Fragments for mma.m16n8k16". Lane 4 g + t;
// of two elements in a register the one of lower index is in the low half. A row goes to several lanes: all of the warp
// must know of what ldmatrix reads; the read is on record as that of the lane that gave the address.
#include <cstring>

#include "runtime.h"

namespace emu {
namespace {

struct Load {
  uint32_t* registers;
  uint32_t row;  // address
  int matrices;
  bool transposed;
  Site site;
};

void load_matrices(Warp& warp, void* const* operands, uint32_t) {
  const Load& first = *static_cast<Load*>(operands[0]);
  const Clocks known = warp_minimum(warp);
  uint16_t element[4][8][8];  // matrix, row, column
  for (int q = 0; q < first.matrices; ++q) {
    uint32_t rows[8];
    for (int i = 0; i < 8; ++i) {
      const Thread& thread = lane_of(warp, 8 * q + i);
      rows[i] = static_cast<Load*>(operands[8 * q + i])->row;
      check_shared(rows[i], 16, 16, "ldmatrix", first.site, thread);
      Access access = generic_access("ldmatrix", first.site, thread);
      access.order = known.order;
      shared_read(rows[i], 16, access);
      memcpy(element[q][i], shared_at(rows[i]), 16);
    }
    count_matrix_rows(BankUse::ldmatrix, rows);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Load& own = *static_cast<Load*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int q = 0; q < own.matrices; ++q) {
      const uint32_t low = own.transposed ? element[q][2 * t][g] : element[q][g][2 * t];
      const uint32_t high = own.transposed ? element[q][2 * t + 1][g] : element[q][g][2 * t + 1];
      own.registers[q] = low | high << 16;
    }
  }
}

struct Product {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

template <float (*kWiden)(uint32_t)>
void multiply(Warp&, void* const* operands, uint32_t) {
  ++counters.mma;
  alignas(32) float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Product& own = *static_cast<Product*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const int column = 2 * t + half, shift = 16 * half;
      a[g][column] = kWiden(own.a[0] >> shift & 0xffff);
      a[g + 8][column] = kWiden(own.a[1] >> shift & 0xffff);
      a[g][column + 8] = kWiden(own.a[2] >> shift & 0xffff);
      a[g + 8][column + 8] = kWiden(own.a[3] >> shift & 0xffff);
      b[column][g] = kWiden(own.b[0] >> shift & 0xffff);
      b[column + 8][g] = kWiden(own.b[1] >> shift & 0xffff);
      d[g][column] = own.d[half];
      d[g + 8][column] = own.d[2 + half];
    }
  }
  accumulate_16(d[0], a[0], b[0], 8);
  for (int lane = 0; lane < 32; ++lane) {
    float* own = static_cast<Product*>(operands[lane])->d;
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      own[half] = d[g][2 * t + half];
      own[2 + half] = d[g + 8][2 * t + half];
    }
  }
}

}  // namespace

void ldmatrix(uint32_t* registers, uint32_t row, int matrices, bool transposed, Site site) {
  yield_point();
  Load own = {registers, row, matrices, transposed, site};
  collective("ldmatrix", kFullMask, &own, load_matrices, site);
}

void mma_m16n8k16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, bool bf16, Site site) {
  Product own = {d, a, {b0, b1}};
  collective(bf16 ? "mma.sync (bf16)" : "mma.sync (f16)", kFullMask, &own,
             bf16 ? multiply<from_bf16> : multiply<from_f16>, site);
}

}  // namespace emu
