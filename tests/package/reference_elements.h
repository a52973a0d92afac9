// Elements of every dtype as double: what the reference kernels of the package tests read and write.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "forward.h"

namespace {

float from_fp16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  float x;
  if (exponent == 0) return (sign ? -1.f : 1.f) * static_cast<float>(fraction) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  std::memcpy(&x, &bits, 4);
  return x;
}

float from_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t to_fp16(float x) {
  if (x != x) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  if (a >= 65520.f) return sign | 0x7c00;
  if (a < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(a * 0x1p24f)));
  int exponent;
  const float fraction = std::frexp(a, &exponent);  // in [1/2, 1)
  const int steps = static_cast<int>(std::nearbyint(fraction * 2048.f));
  return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + steps - 1024));
}

double load(const void* p, int64_t i, int dtype) {
  switch (dtype) {
    case kFloat32: return static_cast<const float*>(p)[i];
    case kFloat64: return static_cast<const double*>(p)[i];
    case kBFloat16: return from_bf16(static_cast<const uint16_t*>(p)[i]);
    default: return from_fp16(static_cast<const uint16_t*>(p)[i]);
  }
}

void store(void* p, int64_t i, double x, int dtype) {
  switch (dtype) {
    case kFloat32: static_cast<float*>(p)[i] = static_cast<float>(x); return;
    case kFloat64: static_cast<double*>(p)[i] = x; return;
    case kBFloat16: static_cast<uint16_t*>(p)[i] = to_bf16(static_cast<float>(x)); return;
    default: static_cast<uint16_t*>(p)[i] = to_fp16(static_cast<float>(x)); return;
  }
}

}  // namespace
