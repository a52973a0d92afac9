// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// baseline float32: Br=24 Bc=96, 178496 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9216, dS panels 9216, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// baseline float64: Br=12 Bc=48, 169280 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 4608, dS panels 4608, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// baseline bf16: Br=24 Bc=104, 188224 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9984, dS panels 9984, Q rows 12288, dO rows 12288, K block 53248, V block 53248)
// baseline fp16: Br=24 Bc=104, 188224 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9984, dS panels 9984, Q rows 12288, dO rows 12288, K block 53248, V block 53248)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 7586bd8b2ad18804
//
// The backward kernels for any x86-64 or aarch64 machine, on vectors of 16 bytes. Compiled with
//     -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast
// BackwardBlock<scalar, rows per vector, vectors per panel, keys per group, columns per group> is what the registers
// hold; columns<lanes, vectors, keys>(first) what they hold in the sums over rows.
#include "backward_simd.h"

namespace {

// float32: tiles of 2 x 3 x 4 rows (panels, vectors, lanes), blocks of 96 keys.
struct Float32Plan {
  using Element = float;
#if defined(__aarch64__)
  using Block = BackwardBlock<float, 4, 3, 6, 8>;
#else
  using Block = BackwardBlock<float, 4, 3, 4, 4>;
#endif
  static constexpr int kBr = 24;
  static constexpr int kBc = 96;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 178496;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<4, 2, 6>(0);
    sums.template columns<4, 3, 4>(8);
    sums.template columns<4, 3, 4>(20);
    sums.template columns<4, 3, 4>(32);
    sums.template columns<4, 3, 4>(44);
    sums.template columns<4, 3, 4>(56);
    sums.template columns<4, 3, 4>(68);
    sums.template columns<4, 3, 4>(80);
    sums.template columns<4, 3, 4>(92);
    sums.template columns<4, 3, 4>(104);
    sums.template columns<4, 3, 4>(116);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<4, 2, 6>(0);
    sums.template columns<4, 3, 4>(8);
    sums.template columns<4, 3, 4>(20);
    sums.template columns<4, 3, 4>(32);
    sums.template columns<4, 3, 4>(44);
    sums.template columns<4, 3, 4>(56);
    sums.template columns<4, 3, 4>(68);
    sums.template columns<4, 3, 4>(80);
    sums.template columns<4, 3, 4>(92);
    sums.template columns<4, 3, 4>(104);
    sums.template columns<4, 3, 4>(116);
  }
};

// float64: tiles of 2 x 3 x 2 rows (panels, vectors, lanes), blocks of 48 keys.
struct Float64Plan {
  using Element = double;
#if defined(__aarch64__)
  using Block = BackwardBlock<double, 2, 3, 6, 8>;
#else
  using Block = BackwardBlock<double, 2, 3, 4, 4>;
#endif
  static constexpr int kBr = 12;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 169280;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<2, 2, 6>(0);
    sums.template columns<2, 3, 4>(4);
    sums.template columns<2, 3, 4>(10);
    sums.template columns<2, 3, 4>(16);
    sums.template columns<2, 3, 4>(22);
    sums.template columns<2, 3, 4>(28);
    sums.template columns<2, 3, 4>(34);
    sums.template columns<2, 3, 4>(40);
    sums.template columns<2, 3, 4>(46);
    sums.template columns<2, 3, 4>(52);
    sums.template columns<2, 3, 4>(58);
    sums.template columns<2, 2, 6>(64);
    sums.template columns<2, 3, 4>(68);
    sums.template columns<2, 3, 4>(74);
    sums.template columns<2, 3, 4>(80);
    sums.template columns<2, 3, 4>(86);
    sums.template columns<2, 3, 4>(92);
    sums.template columns<2, 3, 4>(98);
    sums.template columns<2, 3, 4>(104);
    sums.template columns<2, 3, 4>(110);
    sums.template columns<2, 3, 4>(116);
    sums.template columns<2, 3, 4>(122);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<2, 2, 6>(0);
    sums.template columns<2, 3, 4>(4);
    sums.template columns<2, 3, 4>(10);
    sums.template columns<2, 3, 4>(16);
    sums.template columns<2, 3, 4>(22);
    sums.template columns<2, 3, 4>(28);
    sums.template columns<2, 3, 4>(34);
    sums.template columns<2, 3, 4>(40);
    sums.template columns<2, 3, 4>(46);
    sums.template columns<2, 3, 4>(52);
    sums.template columns<2, 3, 4>(58);
    sums.template columns<2, 2, 6>(64);
    sums.template columns<2, 3, 4>(68);
    sums.template columns<2, 3, 4>(74);
    sums.template columns<2, 3, 4>(80);
    sums.template columns<2, 3, 4>(86);
    sums.template columns<2, 3, 4>(92);
    sums.template columns<2, 3, 4>(98);
    sums.template columns<2, 3, 4>(104);
    sums.template columns<2, 3, 4>(110);
    sums.template columns<2, 3, 4>(116);
    sums.template columns<2, 3, 4>(122);
  }
};

// bf16: tiles of 2 x 3 x 4 rows (panels, vectors, lanes), blocks of 104 keys.
struct BFloat16Plan {
  using Element = BFloat16;
#if defined(__aarch64__)
  using Block = BackwardBlock<float, 4, 3, 6, 8>;
#else
  using Block = BackwardBlock<float, 4, 3, 4, 4>;
#endif
  static constexpr int kBr = 24;
  static constexpr int kBc = 104;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 188224;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<4, 2, 6>(0);
    sums.template columns<4, 3, 4>(8);
    sums.template columns<4, 3, 4>(20);
    sums.template columns<4, 3, 4>(32);
    sums.template columns<4, 3, 4>(44);
    sums.template columns<4, 3, 4>(56);
    sums.template columns<4, 3, 4>(68);
    sums.template columns<4, 3, 4>(80);
    sums.template columns<4, 3, 4>(92);
    sums.template columns<4, 3, 4>(104);
    sums.template columns<4, 3, 4>(116);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<4, 2, 6>(0);
    sums.template columns<4, 3, 4>(8);
    sums.template columns<4, 3, 4>(20);
    sums.template columns<4, 3, 4>(32);
    sums.template columns<4, 3, 4>(44);
    sums.template columns<4, 3, 4>(56);
    sums.template columns<4, 3, 4>(68);
    sums.template columns<4, 3, 4>(80);
    sums.template columns<4, 3, 4>(92);
    sums.template columns<4, 3, 4>(104);
    sums.template columns<4, 3, 4>(116);
  }
};

// fp16: tiles of 2 x 3 x 4 rows (panels, vectors, lanes), blocks of 104 keys.
struct Float16Plan {
  using Element = Float16;
#if defined(__aarch64__)
  using Block = BackwardBlock<float, 4, 3, 6, 8>;
#else
  using Block = BackwardBlock<float, 4, 3, 4, 4>;
#endif
  static constexpr int kBr = 24;
  static constexpr int kBc = 104;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 188224;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<4, 2, 6>(0);
    sums.template columns<4, 3, 4>(8);
    sums.template columns<4, 3, 4>(20);
    sums.template columns<4, 3, 4>(32);
    sums.template columns<4, 3, 4>(44);
    sums.template columns<4, 3, 4>(56);
    sums.template columns<4, 3, 4>(68);
    sums.template columns<4, 3, 4>(80);
    sums.template columns<4, 3, 4>(92);
    sums.template columns<4, 3, 4>(104);
    sums.template columns<4, 3, 4>(116);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<4, 2, 6>(0);
    sums.template columns<4, 3, 4>(8);
    sums.template columns<4, 3, 4>(20);
    sums.template columns<4, 3, 4>(32);
    sums.template columns<4, 3, 4>(44);
    sums.template columns<4, 3, 4>(56);
    sums.template columns<4, 3, 4>(68);
    sums.template columns<4, 3, 4>(80);
    sums.template columns<4, 3, 4>(92);
    sums.template columns<4, 3, 4>(104);
    sums.template columns<4, 3, 4>(116);
  }
};

template <class Plan>
constexpr BackwardKernel kKernel = {Backward<Plan>::Tasks::shared_bytes, Backward<Plan>::Tasks::begin, backward<Plan>};

}  // namespace

extern "C" const BackwardKernel* attention_backward_baseline(int dtype) {
  switch (dtype) {
    case kFloat32:
      return &kKernel<Float32Plan>;
    case kFloat64:
      return &kKernel<Float64Plan>;
    case kBFloat16:
      return &kKernel<BFloat16Plan>;
    case kFloat16:
      return &kKernel<Float16Plan>;
    default:
      return nullptr;
  }
}
