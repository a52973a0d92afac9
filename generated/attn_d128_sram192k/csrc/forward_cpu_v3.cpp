// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// v3 float32: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// v3 float64: Br=32 Bc=48, 167680 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 3072, K block 49152, V block 49152)
// v3 bf16: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// v3 fp16: Br=96 Bc=80, 189056 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 7680, K block 40960, V block 40960)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 c5adb8805129bd94
//
// The forward kernels for x86-64-v3 machines (AVX2, FMA, F16C), on vectors of 32 bytes. Compiled with
//     -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -march=x86-64-v3
// BlockKernel<scalar, rows per vector, vectors per panel, keys per group, columns per group> is what the registers hold.
#include "forward_simd.h"

namespace {

// float32: 4 panels of 3 x 8 rows, against blocks of 80 keys.
struct Float32Plan {
  using Element = float;
  using Block = BlockKernel<float, 8, 3, 4, 4>;
  using OneVectorBlock = BlockKernel<float, 8, 1, 8, 8>;
  static constexpr int kBr = 96;
  static constexpr int kBc = 80;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 189056;
};

// float64: 4 panels of 2 x 4 rows, against blocks of 48 keys.
struct Float64Plan {
  using Element = double;
  using Block = BlockKernel<double, 4, 2, 6, 4>;
  using OneVectorBlock = BlockKernel<double, 4, 1, 8, 8>;
  static constexpr int kBr = 32;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 167680;
};

// bf16: 4 panels of 3 x 8 rows, against blocks of 80 keys.
struct BFloat16Plan {
  using Element = BFloat16;
  using Block = BlockKernel<float, 8, 3, 4, 4>;
  using OneVectorBlock = BlockKernel<float, 8, 1, 8, 8>;
  static constexpr int kBr = 96;
  static constexpr int kBc = 80;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 189056;
};

// fp16: 4 panels of 3 x 8 rows, against blocks of 80 keys.
struct Float16Plan {
  using Element = Float16;
  using Block = BlockKernel<float, 8, 3, 4, 4>;
  using OneVectorBlock = BlockKernel<float, 8, 1, 8, 8>;
  static constexpr int kBr = 96;
  static constexpr int kBc = 80;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 189056;
};

// No memory that the workers share, and no pass before the kernel.
template <class Plan>
constexpr ForwardKernel kKernel = {nullptr, nullptr, forward<Plan>};

}  // namespace

extern "C" const ForwardKernel* attention_forward_v3(int dtype) {
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
