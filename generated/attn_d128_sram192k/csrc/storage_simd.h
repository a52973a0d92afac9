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
// Templates: sha256 e0b66cde954834cc
//
// How elements lie in memory and become vectors of the type that the kernel computes in, and back.
// Loading is exact, subnormals included. Storing rounds to nearest, ties to even; NaN stays NaN.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

// An element type of the caller: `Storage<Element>::load` and `store` move kLanes of them.
template <class Element>
struct Storage {  // computed in as it is stored
  static constexpr bool kAsComputed = true;

  template <int kLanes>
  static ALWAYS_INLINE typename Simd<Element, kLanes>::Vector load(const Element* from) {
    return load_vector<typename Simd<Element, kLanes>::Vector>(from);
  }

  template <int kLanes>
  static ALWAYS_INLINE void store(Element* to, typename Simd<Element, kLanes>::Vector x) {
    store_vector(to, x);
  }
};

template <class To, class From>
ALWAYS_INLINE To convert(From x) {
  return __builtin_convertvector(x, To);
}

// kLanes 16-bit patterns, packed and one per 32-bit lane.
template <int kLanes>
struct Bits {
  typedef uint16_t Narrow __attribute__((vector_size(2 * kLanes)));
  typedef uint32_t Wide __attribute__((vector_size(4 * kLanes)));
};

template <int kLanes>
ALWAYS_INLINE typename Bits<kLanes>::Wide load_bits(const void* from) {
  return convert<typename Bits<kLanes>::Wide>(load_vector<typename Bits<kLanes>::Narrow>(from));
}

template <int kLanes>
ALWAYS_INLINE void store_bits(void* to, typename Bits<kLanes>::Wide bits) {
  store_vector(to, convert<typename Bits<kLanes>::Narrow>(bits));
}

struct BFloat16 {
  uint16_t bits;
};

template <>
struct Storage<BFloat16> {  // the upper half of a float
  static constexpr bool kAsComputed = false;

  template <int kLanes>
  static ALWAYS_INLINE typename Simd<float, kLanes>::Vector load(const BFloat16* from) {
    return (typename Simd<float, kLanes>::Vector)(load_bits<kLanes>(from) << 16);
  }

  template <int kLanes>
  static ALWAYS_INLINE void store(BFloat16* to, typename Simd<float, kLanes>::Vector x) {
    using Wide = typename Bits<kLanes>::Wide;
    const Wide bits = (Wide)x;
    const Wide rounded = bits + 0x7fff + (bits >> 16 & 1);
    store_bits<kLanes>(to, (x == x ? rounded : bits | 0x400000) >> 16);  // a NaN must not be rounded to infinity
  }
};

struct Float16 {
  uint16_t bits;
};

template <>
struct Storage<Float16> {  // 5 exponent bits, 10 fraction bits
  static constexpr bool kAsComputed = false;
#if defined(__F16C__)
  static constexpr int kNearest = 0;  // of vcvtps2ph: to nearest, ties to even, whatever MXCSR says
#endif

  template <int kLanes>
  static ALWAYS_INLINE typename Simd<float, kLanes>::Vector load(const Float16* from) {
    using Vector = typename Simd<float, kLanes>::Vector;
#if defined(__F16C__)
    if constexpr (kLanes >= 8) {  // no intrinsic: parsing its header takes 0.3 s
      Vector x;
      asm("vcvtph2ps %1, %0" : "=v"(x) : "v"(load_vector<typename Bits<kLanes>::Narrow>(from)));
      return x;
    }
#endif
    using Wide = typename Bits<kLanes>::Wide;
    const Wide half = load_bits<kLanes>(from);
    const Wide magnitude = half & 0x7fff;
    const Wide normal = (magnitude << 13) + (112u << 23);
    const Wide special = (magnitude << 13) + (224u << 23);  // infinity and NaN
    const Wide subnormal = (Wide)(convert<Vector>((typename Simd<float, kLanes>::Index)magnitude) * 0x1p-24f);
    const Wide bits = magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : special;
    return (Vector)(bits | (half & 0x8000) << 16);
  }

  template <int kLanes>
  static ALWAYS_INLINE void store(Float16* to, typename Simd<float, kLanes>::Vector x) {
#if defined(__F16C__)
    if constexpr (kLanes >= 8) {
      typename Bits<kLanes>::Narrow half;
      asm("vcvtps2ph %2, %1, %0" : "=v"(half) : "v"(x), "i"(kNearest));
      store_vector(to, half);
      return;
    }
#endif
    using Vector = typename Simd<float, kLanes>::Vector;
    using Wide = typename Bits<kLanes>::Wide;
    const Wide magnitude = (Wide)x & 0x7fffffff;
    const Wide normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const Wide subnormal = (Wide)((Vector)magnitude + 0.5f) - (126u << 23);  // floats near 1/2 lie 2^-24 apart, too
    const Wide special = magnitude > 0x7f800000 ? Wide{} + 0x7e00 : Wide{} + 0x7c00;
    const Wide half = magnitude < (113u << 23) ? subnormal : magnitude < (143u << 23) ? normal : special;
    store_bits<kLanes>(to, half | ((Wide)x >> 16 & 0x8000));
  }
};

// kWidth elements from `from` to `to`, converted. The last vector may overlap the one before it.
template <int kWidth, int kLanes, class Element, class Scalar>
ALWAYS_INLINE void load_row(const Element* from, Scalar* to) {
  static_assert(kWidth % 8 == 0, "a row is whole vectors of 8");
  constexpr int kStep = kWidth < kLanes ? 8 : kLanes;
  for (int t = 0; t < kWidth; t += kStep) {
    const int at = t + kStep <= kWidth ? t : kWidth - kStep;
    store_vector(to + at, Storage<Element>::template load<kStep>(from + at));
  }
}

}  // namespace
