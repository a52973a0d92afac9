// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// Templates: sha256 5868bd5a2b997668
//
// The C interface between the bindings and the kernels. It names no torch type, so that a kernel is compiled
// without torch's headers. Q (B,Hq,Nq,d), K (B,Hkv,Nk,d), V (B,Hkv,Nk,dv), O (B,Hq,Nq,dv), LSE (B,Hq,Nq).
// Query head h reads key/value head h / (Hq/Hkv).
#pragma once
#include <cstdint>

enum DType : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Key j is visible to row i: always; iff j <= i + Nk - Nq; iff j <= i. Nk is the size of K, also with key_lengths.
enum Causal : int { kFull = 0, kBottomRight = 1, kTopLeft = 2 };

// Strides count elements and are those of (batch, head, row); the last dimension has stride 1. On CUDA every base
// pointer is 16-byte aligned and every stride of Q, K, V a multiple of 8 elements; on the CPU neither holds.
struct ForwardArgs {
  const void *q, *k, *v;
  void* o;
  void* lse;  // natural log of the scaled scores' sum of exponentials: float, double for kFloat64; contiguous
  int64_t B, Hq, Hkv, Nq, Nk;  // B, Hq, Nq > 0; Nk may be 0: then O = 0 and LSE = -inf
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3];
  // (B,) or null: key j of batch b exists iff j < key_lengths[b]; K and V beyond are never read. CPU: host memory,
  // each in [0, Nk]. CUDA: device memory, not checked; a length outside [0, Nk] gives NaN rows.
  const int64_t* key_lengths;
  double scale;  // > 0
  int causal;
};

// One CPU kernel. `next` is a counter from which the workers claim chunks or tiles by __atomic_fetch_add.
struct ForwardKernel {
  int64_t (*shared_bytes)(const ForwardArgs*);                       // scratch of all workers; null: none
  void (*prepare)(const ForwardArgs*, void* shared, int64_t* next);  // pass before run; null: none
  int (*run)(const ForwardArgs*, void* shared, int64_t* next);       // 0, or ENOMEM
};
