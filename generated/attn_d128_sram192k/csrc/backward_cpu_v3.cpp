// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// v3 float32: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 float64: Br=12 Bc=48, 169280 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 4608, dS panels 4608, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// v3 bf16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 fp16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 7586bd8b2ad18804
//
// The backward kernels for x86-64-v3 machines (AVX2, FMA, F16C), on vectors of 32 bytes. Compiled with
//     -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -march=x86-64-v3
// BackwardBlock<scalar, rows per vector, vectors per panel, keys per group, columns per group> is what the registers
// hold; columns<lanes, vectors, keys>(first) what they hold in the sums over rows.
#include "backward_simd.h"

namespace {

// float32: tiles of 2 x 3 x 8 rows (panels, vectors, lanes), blocks of 48 keys.
struct Float32Plan {
  using Element = float;
  using Block = BackwardBlock<float, 8, 3, 4, 4>;
  static constexpr int kBr = 48;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 191040;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<8, 2, 6>(0);
    sums.template columns<8, 3, 4>(16);
    sums.template columns<8, 3, 4>(40);
    sums.template columns<8, 2, 6>(64);
    sums.template columns<8, 3, 4>(80);
    sums.template columns<8, 3, 4>(104);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<8, 2, 6>(0);
    sums.template columns<8, 3, 4>(16);
    sums.template columns<8, 3, 4>(40);
    sums.template columns<8, 2, 6>(64);
    sums.template columns<8, 3, 4>(80);
    sums.template columns<8, 3, 4>(104);
  }
};

// float64: tiles of 1 x 3 x 4 rows (panels, vectors, lanes), blocks of 48 keys.
struct Float64Plan {
  using Element = double;
  using Block = BackwardBlock<double, 4, 3, 4, 4>;
  static constexpr int kBr = 12;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 169280;
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

// bf16: tiles of 2 x 3 x 8 rows (panels, vectors, lanes), blocks of 48 keys.
struct BFloat16Plan {
  using Element = BFloat16;
  using Block = BackwardBlock<float, 8, 3, 4, 4>;
  static constexpr int kBr = 48;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 191040;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<8, 2, 6>(0);
    sums.template columns<8, 3, 4>(16);
    sums.template columns<8, 3, 4>(40);
    sums.template columns<8, 2, 6>(64);
    sums.template columns<8, 3, 4>(80);
    sums.template columns<8, 3, 4>(104);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<8, 2, 6>(0);
    sums.template columns<8, 3, 4>(16);
    sums.template columns<8, 3, 4>(40);
    sums.template columns<8, 2, 6>(64);
    sums.template columns<8, 3, 4>(80);
    sums.template columns<8, 3, 4>(104);
  }
};

// fp16: tiles of 2 x 3 x 8 rows (panels, vectors, lanes), blocks of 48 keys.
struct Float16Plan {
  using Element = Float16;
  using Block = BackwardBlock<float, 8, 3, 4, 4>;
  static constexpr int kBr = 48;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 191040;
  template <class Sums>
  static void k_columns(const Sums& sums) {
    sums.template columns<8, 2, 6>(0);
    sums.template columns<8, 3, 4>(16);
    sums.template columns<8, 3, 4>(40);
    sums.template columns<8, 2, 6>(64);
    sums.template columns<8, 3, 4>(80);
    sums.template columns<8, 3, 4>(104);
  }
  template <class Sums>
  static void v_columns(const Sums& sums) {
    sums.template columns<8, 2, 6>(0);
    sums.template columns<8, 3, 4>(16);
    sums.template columns<8, 3, 4>(40);
    sums.template columns<8, 2, 6>(64);
    sums.template columns<8, 3, 4>(80);
    sums.template columns<8, 3, 4>(104);
  }
};

template <class Plan>
constexpr BackwardKernel kKernel = {Backward<Plan>::Tasks::shared_bytes, Backward<Plan>::Tasks::begin, backward<Plan>};

}  // namespace

extern "C" const BackwardKernel* attention_backward_v3(int dtype) {
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
