// Calls the small functions of the emitted headers on arrays, a vector of VECTOR_BYTES at a time.
#include "storage_simd.h"

template <class Element>
static void load(const void* from, float* to, int64_t n) {
  constexpr int kLanes = VECTOR_BYTES / 4;
  for (int64_t i = 0; i < n; i += kLanes) {
    store_vector(to + i, Storage<Element>::template load<kLanes>((const Element*)from + i));
  }
}

template <class Element>
static void store(const float* from, void* to, int64_t n) {
  constexpr int kLanes = VECTOR_BYTES / 4;
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto x = load_vector<typename Simd<float, kLanes>::Vector>(from + i);
    Storage<Element>::template store<kLanes>((Element*)to + i, x);
  }
}

template <class Scalar>
static void exp2(const Scalar* from, Scalar* to, int64_t n, Scalar scale) {
  constexpr int kLanes = VECTOR_BYTES / sizeof(Scalar);
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto x = load_vector<typename Simd<Scalar, kLanes>::Vector>(from + i);
    store_vector(to + i, exp2_scaled<Scalar, kLanes>(x, scale));
  }
}

extern "C" {
void load_bf16(const void* from, float* to, int64_t n) { load<BFloat16>(from, to, n); }
void load_fp16(const void* from, float* to, int64_t n) { load<Float16>(from, to, n); }
void store_bf16(const float* from, void* to, int64_t n) { store<BFloat16>(from, to, n); }
void store_fp16(const float* from, void* to, int64_t n) { store<Float16>(from, to, n); }
void exp2_float32(const float* from, float* to, int64_t n, double scale) { exp2<float>(from, to, n, float(scale)); }
void exp2_float64(const double* from, double* to, int64_t n, double scale) { exp2<double>(from, to, n, scale); }
}
