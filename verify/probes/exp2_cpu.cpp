// exp2_cpu.cpp: compares the exp2 of the emitted CPU kernels with the C library's double, argument by argument.
//
// Compiled once per instruction set against the emitted headers: simd.h with LANES the lanes of its float vectors, or
// forward_amx.h with TILE_EXP2 the name of its function. Arguments are the float32 with the bit patterns sign | x for
// x = begin, begin + stride, ...: with stride 1, every one of them.
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef TILE_EXP2
#include "forward_amx.h"

constexpr int LANES = 16;

static void exp2_of(const float* x, float* y) { _mm512_storeu_ps(y, TILE_EXP2(_mm512_loadu_ps(x))); }
#else
#include "simd.h"

static void exp2_of(const float* x, float* y) {
  Simd<float, LANES>::Vector v;
  memcpy(&v, x, sizeof v);
  v = exp2_scaled<float, LANES>(v, 1.0f);
  memcpy(y, &v, sizeof v);
}
#endif

struct Found {
  double worst;         // largest relative error of a result that is neither 0 nor subnormal
  double worst_at;      // its argument
  double flushed_from;  // largest true value whose result is 0
  double at_zero, at_minus_infinity;
  double nan_stays;     // 1 or 0
};

extern "C" __attribute__((visibility("default"))) void probe(uint32_t begin, uint32_t end, uint32_t stride,
                                                             uint32_t sign, Found* found) {
  *found = {};
  for (uint64_t at = begin; at < end; at += uint64_t(stride) * LANES) {
    float x[LANES], y[LANES];
    for (int i = 0; i < LANES; i++) {
      const uint64_t mine = at + uint64_t(i) * stride;
      const uint32_t bits = (mine < end ? uint32_t(mine) : begin) | sign;
      memcpy(&x[i], &bits, 4);
    }
    exp2_of(x, y);
    for (int i = 0; i < LANES; i++) {
      const double want = exp2(double(x[i]));
      if (y[i] == 0 && want > found->flushed_from) found->flushed_from = want;
      if (y[i] == 0 || want < 0x1p-126) continue;
      const double error = fabs(y[i] / want - 1);
      if (!(error <= found->worst)) {
        found->worst = error;
        found->worst_at = x[i];
      }
    }
  }
  float special[4][LANES], y[4][LANES];
  const float value[4] = {0.0f, -0.0f, -INFINITY, NAN};
  for (int n = 0; n < 4; n++) {
    for (int i = 0; i < LANES; i++) special[n][i] = value[n];
    exp2_of(special[n], y[n]);
  }
  found->at_zero = y[0][0] == y[1][0] ? y[0][0] : -1;
  found->at_minus_infinity = y[2][0];
  found->nan_stays = y[3][0] != y[3][0];
}
