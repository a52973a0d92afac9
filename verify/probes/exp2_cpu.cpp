// exp2_cpu.cpp: compares the exp2 of the emitted vector kernels with the C library's double, argument by argument.
//
// Compiled once per instruction set against the emitted simd.h, with LANES the lanes of its float vectors. Arguments are
// -x for the float32 x whose bit patterns are begin, begin + stride, ...: with stride 1, every one of them.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

struct Found {
  double worst;        // largest relative error of a result that is not 0
  double worst_at;     // its argument
  double flushed_from; // largest true value whose result is 0
  double at_zero, at_minus_infinity;
  double nan_stays;    // 1 or 0
};

extern "C" __attribute__((visibility("default"))) void probe(uint32_t begin, uint32_t end, uint32_t stride, Found* found) {
  using Vector = Simd<float, LANES>::Vector;
  *found = {};
  for (uint64_t at = begin; at < end; at += uint64_t(stride) * LANES) {
    float x[LANES], y[LANES];
    for (int i = 0; i < LANES; i++) {
      const uint64_t mine = at + uint64_t(i) * stride;
      const uint32_t bits = (mine < end ? uint32_t(mine) : begin) | 0x80000000u;
      memcpy(&x[i], &bits, 4);
    }
    Vector v;
    memcpy(&v, x, sizeof v);
    v = exp2_scaled<float, LANES>(v, 1.0f);
    memcpy(y, &v, sizeof v);
    for (int i = 0; i < LANES; i++) {
      const double want = exp2(double(x[i]));
      if (y[i] == 0) {
        if (want > found->flushed_from) found->flushed_from = want;
        continue;
      }
      const double error = fabs(y[i] / want - 1);
      if (!(error <= found->worst)) {
        found->worst = error;
        found->worst_at = x[i];
      }
    }
  }
  const float special[4] = {0.0f, -0.0f, -INFINITY, NAN};
  float y[4][LANES];
  for (int n = 0; n < 4; n++) {
    const Vector v = exp2_scaled<float, LANES>(broadcast<Vector>(special[n]), 1.0f);
    memcpy(y[n], &v, sizeof v);
  }
  found->at_zero = y[0][0] == y[1][0] ? y[0][0] : -1;
  found->at_minus_infinity = y[2][0];
  found->nan_stays = y[3][0] != y[3][0];
}
