// Calls the emitted loads and stores of 16-bit elements on arrays, LANES at a time.
#include "storage_simd.h"

template <class Element>
static void load(const void* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store_vector(to + i, Storage<Element>::template load<LANES>((const Element*)from + i));
}

template <class Element>
static void store(const float* from, void* to, int64_t n) {
  using Vector = Simd<float, LANES>::Vector;
  for (int64_t i = 0; i < n; i += LANES) Storage<Element>::template store<LANES>((Element*)to + i, load_vector<Vector>(from + i));
}

extern "C" {
void load_bf16(const void* from, float* to, int64_t n) { load<BFloat16>(from, to, n); }
void load_fp16(const void* from, float* to, int64_t n) { load<Float16>(from, to, n); }
void store_bf16(const float* from, void* to, int64_t n) { store<BFloat16>(from, to, n); }
void store_fp16(const float* from, void* to, int64_t n) { store<Float16>(from, to, n); }
}
