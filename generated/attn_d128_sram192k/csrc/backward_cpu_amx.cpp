// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// amx bf16: Br=64 Bc=64, 188928 bytes of fast memory (Q panels 32768, dO panels 32768, dQ panels 32768, P panels 8192, dS panels 8192, S panel 8192, dP panel 8192, K block 32768, V block 16384, rows to pack 8192, row statistics 512)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 69b277871235380a
//
// The backward kernel for machines with AMX-BF16 and AVX512-BF16. Compiled with
//     -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -march=x86-64-v4 -mtune=icelake-server -mavx512bf16 -mamx-tile -mamx-bf16
#include "backward_amx_bf16.h"

extern "C" const BackwardKernel* attention_backward_amx(int dtype) {
  return dtype == kBFloat16 ? &bf16::kKernel : nullptr;
}
