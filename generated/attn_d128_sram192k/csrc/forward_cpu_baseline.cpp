// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// baseline float32: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// baseline float64: Br=32 Bc=48, 166144 bytes of fast memory (Q panels 32768, O panels 32768, row statistics 768, S panel 1536, K block 49152, V block 49152)
// baseline bf16: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// baseline fp16: Br=96 Bc=88, 193792 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 4224, K block 45056, V block 45056)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 c5adb8805129bd94
//
// The forward kernels for any x86-64 or aarch64 machine, on vectors of 16 bytes. Compiled with
//     -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast
// BlockKernel<scalar, rows per vector, vectors per panel, keys per group, columns per group> is what the registers hold.
#include "forward_simd.h"

namespace {

// float32: 8 panels of 3 x 4 rows, against blocks of 88 keys.
struct Float32Plan {
  using Element = float;
#if defined(__aarch64__)
  using Block = BlockKernel<float, 4, 3, 6, 8>;
  using OneVectorBlock = BlockKernel<float, 4, 1, 8, 8>;
#else
  using Block = BlockKernel<float, 4, 3, 4, 4>;
  using OneVectorBlock = BlockKernel<float, 4, 1, 8, 8>;
#endif
  static constexpr int kBr = 96;
  static constexpr int kBc = 88;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 193792;
};

// float64: 8 panels of 2 x 2 rows, against blocks of 48 keys.
struct Float64Plan {
  using Element = double;
#if defined(__aarch64__)
  using Block = BlockKernel<double, 2, 2, 8, 8>;
  using OneVectorBlock = BlockKernel<double, 2, 1, 8, 8>;
#else
  using Block = BlockKernel<double, 2, 2, 4, 4>;
  using OneVectorBlock = BlockKernel<double, 2, 1, 8, 8>;
#endif
  static constexpr int kBr = 32;
  static constexpr int kBc = 48;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 166144;
};

// bf16: 8 panels of 3 x 4 rows, against blocks of 88 keys.
struct BFloat16Plan {
  using Element = BFloat16;
#if defined(__aarch64__)
  using Block = BlockKernel<float, 4, 3, 6, 8>;
  using OneVectorBlock = BlockKernel<float, 4, 1, 8, 8>;
#else
  using Block = BlockKernel<float, 4, 3, 4, 4>;
  using OneVectorBlock = BlockKernel<float, 4, 1, 8, 8>;
#endif
  static constexpr int kBr = 96;
  static constexpr int kBc = 88;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 193792;
};

// fp16: 8 panels of 3 x 4 rows, against blocks of 88 keys.
struct Float16Plan {
  using Element = Float16;
#if defined(__aarch64__)
  using Block = BlockKernel<float, 4, 3, 6, 8>;
  using OneVectorBlock = BlockKernel<float, 4, 1, 8, 8>;
#else
  using Block = BlockKernel<float, 4, 3, 4, 4>;
  using OneVectorBlock = BlockKernel<float, 4, 1, 8, 8>;
#endif
  static constexpr int kBr = 96;
  static constexpr int kBc = 88;
  static constexpr int kKPitch = 128;
  static constexpr int kVPitch = 128;
  static constexpr size_t kFastMemoryBytes = 193792;
};

// No memory that the workers share, and no pass before the kernel.
template <class Plan>
constexpr ForwardKernel kKernel = {nullptr, nullptr, forward<Plan>};

}  // namespace

extern "C" const ForwardKernel* attention_forward_baseline(int dtype) {
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
