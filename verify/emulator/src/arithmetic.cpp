// arithmetic.cpp: how the matrix units add, and the approximate functions and conversions.
//
// Products of two 16-bit numbers are exact in float32 (barring underflow), so a model is an order of additions and
// where they round. The PTX ISA leaves both open: results may depend on the model only within the bounds of the tests.
// Source of the truncating model: Fasi, Higham, Mikaitis, Pranesh (PeerJ CS 7:e330, 2021); arXiv:2512.07004.
#include <cmath>
#include <cstring>

#include "runtime.h"

namespace emu {

double ex2_error = 0;  // relative

namespace {

typedef float Vector __attribute__((vector_size(32)));  // 8 columns
constexpr int kDepth = 16;

enum class Model { chain, exact, truncating };
Model model = Model::chain;
int block = 8;           // products that the truncating model adds at once
int fraction_bits = 24;  // an addend less than 2^-fraction_bits of the largest one is lost
// On an H200 a block has 16 products and 25 bits: verify/emulator/measured.py.

void launch_start() {
  model = static_cast<Model>(int(option("mma", 0)));
  block = max(1, int(option("mma_block", 8)));
  fraction_bits = int(option("mma_fraction_bits", 24));
  ex2_error = option("ex2_error", 0);
}

void chain(float* d, const float* a, const float* b, int n) {
  for (int j = 0; j < n; j += 8)
    for (int i = 0; i < 16; ++i) {
      Vector sum;
      memcpy(&sum, d + n * i + j, sizeof sum);
      for (int k = 0; k < kDepth; ++k) {
        Vector row;
        memcpy(&row, b + n * k + j, sizeof row);
        sum += a[kDepth * i + k] * row;
      }
      memcpy(d + n * i + j, &sum, sizeof sum);
    }
}

// Rounds toward zero.
float truncated(double x) {
  const float nearest = static_cast<float>(x);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(x) ? std::nextafterf(nearest, 0.f) : nearest;
}

constexpr int kNoExponent = -10000;  // of a zero: below every other

int exponent(double x) { return x == 0 || !std::isfinite(x) ? kNoExponent : std::ilogb(x); }

// The sum of the addends, all cut off at fraction_bits below the largest exponent; the sum is cut off to float32.
float truncating_sum(const double* addends, const int* exponents, int count) {
  double plain = 0;
  int largest = kNoExponent;
  for (int k = 0; k < count; ++k) {
    plain += addends[k];
    largest = max(largest, exponents[k]);
  }
  if (largest == kNoExponent || !std::isfinite(plain)) return static_cast<float>(plain);
  const double unit = std::ldexp(1.0, largest - fraction_bits);
  double sum = 0;  // integers below 2^(fraction_bits + 2 + log2(count)): exact in double
  for (int k = 0; k < count; ++k) sum += std::trunc(addends[k] / unit);
  return truncated(sum * unit);
}

// The exponent of a product is the sum of its factors', one less than its own where the significands reach 2 together.
float truncating_dot(float c, const float* a, const float* b, int stride) {
  for (int first = 0; first < kDepth; first += block) {
    double addends[kDepth + 1] = {c};
    int exponents[kDepth + 1] = {exponent(c)}, count = 1;
    for (int k = first; k < min(first + block, kDepth); ++k, ++count) {
      addends[count] = double(a[k]) * b[stride * k];
      exponents[count] = addends[count] == 0 ? kNoExponent : exponent(a[k]) + exponent(b[stride * k]);
    }
    c = truncating_sum(addends, exponents, count);
  }
  return c;
}

float exact_dot(float c, const float* a, const float* b, int stride) {
  double sum = c;
  for (int k = 0; k < kDepth; ++k) sum += double(a[k]) * b[stride * k];
  return static_cast<float>(sum);
}

void one_by_one(float* d, const float* a, const float* b, int n) {
  const auto dot = model == Model::exact ? exact_dot : truncating_dot;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < n; ++j) d[n * i + j] = dot(d[n * i + j], a + kDepth * i, b + j, n);
}

// ".ftz": a subnormal number counts as 0, with its sign.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

}  // namespace

void accumulate_16(float* d, const float* a, const float* b, int n) {
  if (model == Model::chain)
    chain(d, a, b, n);
  else
    one_by_one(d, a, b, n);
}

// "ex2": a result below 2^-126 is 0. Under the option each result is off by up to ex2_error of it, to either side.
float ex2(float x) {
  float y = exp2f(x);
  if (ex2_error != 0) y = static_cast<float>(y * (1 + ex2_error * (random_bits() * 0x1p-31 - 1)));
  return y < 0x1p-126f ? 0.f : y;
}

float rcp(float x) { return flushed(1 / flushed(x)); }
float lg2(float x) { return log2f(flushed(x)); }

// "cvt.rn": to nearest, ties to even; NaN becomes 0x7fff.
uint32_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint32_t to_f16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // from 65520 on: infinity
  if (magnitude < 0x38800000)                         // below 2^-14: a multiple of 2^-24
    return sign | static_cast<uint32_t>(std::nearbyint(std::fabs(double(x)) * 0x1p24));
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | ((rounded - 0x38000000) >> 13);  // the exponent's bias: 127 - 15
}

namespace arithmetic {
const Topic topic = {launch_start, nullptr, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace emu
