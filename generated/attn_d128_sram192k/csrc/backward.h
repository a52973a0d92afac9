// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// Templates: sha256 5f56906dde606df4
//
// The C interface between the bindings and the backward kernels, beside forward.h: the gradients of
// sum(dO o O) + sum(dLSE o LSE) by Q, K and V, from what the forward pass was given and returned.
// Q, dQ (B,Hq,Nq,d), K, dK (B,Hkv,Nk,d), V, dV (B,Hkv,Nk,dv), O, dO (B,Hq,Nq,dv), LSE, dLSE (B,Hq,Nq).
#pragma once
#include <cstdint>

// Strides count elements and are those of (batch, head, row), of dO also of the column; the last dimension of all other
// tensors has stride 1. Any may be 0, but those of the gradients must keep their elements apart.
struct BackwardArgs {
  const void *q, *k, *v, *o;
  const void* lse;          // as the forward pass wrote it: float, double for kFloat64; -inf marks an empty row
  const void *dout, *dlse;  // dO of O's type; dLSE of LSE's type, or null: 0
  void *dq, *dk, *dv;       // null: not wanted. Every element of the others is written
  int64_t B, Hq, Hkv, Nq, Nk;  // any may be 0, but Hkv divides Hq
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3], lse_stride[3], dout_stride[4], dlse_stride[3];
  int64_t dq_stride[3], dk_stride[3], dv_stride[3];
  const int64_t* key_lengths;  // as in ForwardArgs; dK and dV beyond are 0
  double scale;                // > 0, the one of the forward pass
  int causal;                  // Causal, the one of the forward pass
  int deterministic;           // CUDA: != 0: equal calls give equal bits. The CPU kernels always do, and ignore it
};

// One CPU kernel. Any number of workers may call `run` at the same time; the results do not depend on it, bit for bit.
// `next` is a counter from 0 that they share.
struct BackwardKernel {
  int64_t (*shared_bytes)(const BackwardArgs*);        // memory that they share, 64-byte aligned
  void (*begin)(const BackwardArgs*, void* shared);    // once, before the workers
  int (*run)(const BackwardArgs*, void* shared, int64_t* next);  // 0, or ENOMEM
};
