// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// v4 float32: Br=96 Bc=72, 187008 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 13824, K block 36864, V block 36864)
// v3 float32: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// baseline float32: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// v4 float64: Br=32 Bc=48, 170752 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 6144, K block 49152, V block 49152)
// v3 float64: Br=32 Bc=48, 167680 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 3072, K block 49152, V block 49152)
// baseline float64: Br=32 Bc=48, 166144 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 1536, K block 49152, V block 49152)
// amx bf16: Br=128 Bc=96, 161792 bytes of fast memory (Q panels 32768, O panels 65536, row statistics 2048, S panel 12288, K block 24576, V block 24576)
// v4 bf16: Br=96 Bc=72, 187008 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 13824, K block 36864, V block 36864)
// v3 bf16: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// baseline bf16: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// amx fp16: Br=96 Bc=64, 181376 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 8192, P panel 8192, K block 32768, V block 32768)
// v4 fp16: Br=96 Bc=72, 187008 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 13824, K block 36864, V block 36864)
// v3 fp16: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// baseline fp16: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 2a8094e7d8bac0fd
//
// Vectors of scalars: GCC's vector extension, loads and stores at any address, transposition, and 2^x for x <= 0.
// Compiled once per instruction set, so everything is in an unnamed namespace and no standard template is used: a
// function shared by the linker could run on a machine that lacks its instructions.
#pragma once

#include <cstdint>
#include <cstring>

#define ALWAYS_INLINE inline __attribute__((always_inline))
// For what several kernels of a unit call. Inlined, or cloned for the constants that each kernel passes, it took a
// third of the time that the largest unit takes to compile.
#define COMPILED_ONCE __attribute__((noinline, noclone))

namespace {

// A scalar that may lie at any address: a caller's pointer need not be aligned.
template <class Scalar>
struct Loose {
  typedef Scalar Type __attribute__((aligned(1), may_alias));
};

// kLanes scalars, and the integers of the same width (what a comparison gives: all bits set, or none).
template <class Scalar, int kLanes>
struct Simd;

template <int kLanes>
struct Simd<float, kLanes> {
  typedef float Vector __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Index __attribute__((vector_size(4 * kLanes)));
};

template <int kLanes>
struct Simd<double, kLanes> {
  typedef double Vector __attribute__((vector_size(8 * kLanes)));
  typedef int64_t Index __attribute__((vector_size(8 * kLanes)));
};

// All lanes equal x. `x - 0` is one broadcast instruction; `x + 0` is not, because -0 + 0 is +0.
template <class Vector, class Scalar>
ALWAYS_INLINE Vector broadcast(Scalar x) {
  return x - Vector{};
}

// Vectors at any address.
template <class Vector>
ALWAYS_INLINE Vector load_vector(const void* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

template <class Vector>
ALWAYS_INLINE void store_vector(void* to, Vector x) {
  memcpy(to, &x, sizeof x);
}

// rows[i][j] <-> rows[j][i]: squares of 1, 2, 4, ... elements change places across the diagonal.
template <class Scalar, int kLanes>
ALWAYS_INLINE void transpose(typename Simd<Scalar, kLanes>::Vector (&rows)[kLanes]) {
  typename Simd<Scalar, kLanes>::Index low, high;
#pragma GCC unroll 4
  for (int square = 1; square < kLanes; square *= 2) {
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; j++) {
      low[j] = j & square ? kLanes + j - square : j;
      high[j] = j & square ? kLanes + j : j + square;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i & square) continue;
      const auto a = rows[i], b = rows[i + square];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + square] = __builtin_shuffle(a, b, high);
    }
  }
}

// p(r) = 2^r on [-1/2, 1/2] with p(0) = 1 exactly, in Horner's form. The coefficients are minimax in relative error,
// found by a Remez exchange and rounded to the format; the errors are those of the rounded ones, before evaluation.
template <class Vector>
ALWAYS_INLINE Vector exp2_polynomial(Vector r, float) {  // relative error 2.1e-08
  Vector p = broadcast<Vector>(0x1.470b48p-13f);
  p = p * r + 0x1.5f7276p-10f;
  p = p * r + 0x1.3b270ep-7f;
  p = p * r + 0x1.c6ae72p-5f;
  p = p * r + 0x1.ebfbe2p-3f;
  p = p * r + 0x1.62e432p-1f;
  return p * r + 1.0f;
}

template <class Vector>
ALWAYS_INLINE Vector exp2_polynomial(Vector r, double) {  // relative error 4.2e-17
  Vector p = broadcast<Vector>(0x1.c063841f3a21dp-32);
  p = p * r + 0x1.e605f964b639dp-28;
  p = p * r + 0x1.b54167a1b0034p-24;
  p = p * r + 0x1.62bfd49ededd3p-20;
  p = p * r + 0x1.ffcbee3b0a61cp-17;
  p = p * r + 0x1.43091309610fcp-13;
  p = p * r + 0x1.5d87fe7bbbe09p-10;
  p = p * r + 0x1.3b2ab6fba1e1cp-7;
  p = p * r + 0x1.c6b08d7048f31p-5;
  p = p * r + 0x1.ebfbdff82c598p-3;
  p = p * r + 0x1.62e42fefa39f3p-1;
  return p * r + 1.0;
}

// x + kRound is x rounded to a whole number n, with the biased exponent of 2^n in its low bits.
template <class Scalar>
struct Exponent;

template <>
struct Exponent<float> {
  static constexpr int kFractionBits = 23;
  static constexpr float kRound = 0x1.8p23f + 127;
  static constexpr float kLeast = -125;      // smaller n count as n = -inf
  static constexpr float kTiny = 0x1p-126f;  // smallest normal number
};

template <>
struct Exponent<double> {
  static constexpr int kFractionBits = 52;
  static constexpr double kRound = 0x1.8p52 + 1023;
  static constexpr double kLeast = -1021;
  static constexpr double kTiny = 0x1p-1022;
};

// 2^(x scale) for x <= 0 and scale > 0: n = x scale rounded to a whole number, r = x scale - n, result p(r) 2^n.
// x = 0 gives exactly 1, x = -inf exactly 0, and a NaN stays a NaN. Where n < kLeast the result is 0: a subnormal one
// would cost about 150 cycles in every product that it enters.
template <class Scalar, int kLanes>
ALWAYS_INLINE typename Simd<Scalar, kLanes>::Vector exp2_scaled(typename Simd<Scalar, kLanes>::Vector x, Scalar scale) {
  using Vector = typename Simd<Scalar, kLanes>::Vector;
  using Index = typename Simd<Scalar, kLanes>::Index;
  using E = Exponent<Scalar>;
  const Vector n = x * scale + E::kRound;
  const Vector r = x * scale - (n - E::kRound);
  const Vector power = (Vector)((Index)n << E::kFractionBits);
  return n < E::kRound + E::kLeast ? Vector{} : exp2_polynomial(r, Scalar()) * power;
}

}  // namespace
