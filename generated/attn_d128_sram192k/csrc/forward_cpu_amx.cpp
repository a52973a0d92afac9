// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// amx bf16: Br=128 Bc=96, 161792 bytes of fast memory (Q panels 32768, O panels 65536, row statistics 2048, S panel 12288, K block 24576, V block 24576)
// amx fp16: Br=96 Bc=64, 181376 bytes of fast memory (Q panels 49152, O panels 49152, row statistics 1152, S panel 8192, P panel 8192, K block 32768, V block 32768)
// FLOPs per head without a mask: 512 * Nq * Nk
// Templates: sha256 29534b455ef6c07f
//
// The forward kernels for machines with AMX-BF16 and AVX512-BF16. Compiled with
//     -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -march=x86-64-v4 -mtune=icelake-server -mavx512bf16 -mamx-tile -mamx-bf16
#include "forward_amx_bf16.h"
#include "forward_amx_fp16.h"
extern "C" const ForwardKernel* attention_forward_amx(int dtype) {
  if (dtype == kBFloat16) return &bf16::kKernel;
  if (dtype == kFloat16) return &fp16::kKernel;
  return nullptr;
}
