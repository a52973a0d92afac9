// Runs one backward kernel of a unit on a problem read from standard input, on one worker: for emulators and
// sanitizers. ENTRY is the unit's. Every tensor has an allocation of its own, of exactly its size.
//
// In: 12 int64 (dtype, B, Hq, Hkv, Nq, Nk, causal, bytes of one element, of one LSE, d, dv, lengths?), the scale as
// double, the key lengths if any, then Q, K, V, O, LSE, dO, dLSE, contiguous. Out: dQ, dK, dV.
#include <cstdio>
#include <cstdlib>
#include <vector>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "backward.h"
#include "forward.h"

extern "C" const BackwardKernel* ENTRY(int dtype);

static std::vector<char> read(int64_t bytes) {
  std::vector<char> data(bytes);
  if (bytes && fread(data.data(), 1, bytes, stdin) != size_t(bytes)) exit(2);
  data.shrink_to_fit();
  return data;
}

template <int kCount>
static void set_strides(int64_t (&stride)[kCount], int64_t heads, int64_t rows, int64_t width) {
  const int64_t strides[4] = {heads * rows * width, rows * width, width, 1};
  for (int i = 0; i < kCount; i++) stride[i] = strides[i];
}

int main() {
  int64_t n[12];
  double scale;
  if (fread(n, 8, 12, stdin) != 12 || fread(&scale, 8, 1, stdin) != 1) return 2;
  const int64_t B = n[1], Hq = n[2], Hkv = n[3], Nq = n[4], Nk = n[5], size = n[7], wide = n[8], d = n[9], dv = n[10];
  const std::vector<char> lengths = read(n[11] ? 8 * B : 0);
  const std::vector<char> q = read(B * Hq * Nq * d * size), k = read(B * Hkv * Nk * d * size);
  const std::vector<char> v = read(B * Hkv * Nk * dv * size), o = read(B * Hq * Nq * dv * size);
  const std::vector<char> lse = read(B * Hq * Nq * wide), dout = read(B * Hq * Nq * dv * size);
  const std::vector<char> dlse = read(B * Hq * Nq * wide);
  std::vector<char> dq(q.size()), dk(k.size()), dv_(v.size());

  BackwardArgs a = {};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.o = o.data(), a.lse = lse.data();
  a.dout = dout.data(), a.dlse = dlse.data(), a.dq = dq.data(), a.dk = dk.data(), a.dv = dv_.data();
  a.B = B, a.Hq = Hq, a.Hkv = Hkv, a.Nq = Nq, a.Nk = Nk;
  set_strides(a.q_stride, Hq, Nq, d), set_strides(a.dq_stride, Hq, Nq, d);
  set_strides(a.k_stride, Hkv, Nk, d), set_strides(a.dk_stride, Hkv, Nk, d);
  set_strides(a.v_stride, Hkv, Nk, dv), set_strides(a.dv_stride, Hkv, Nk, dv);
  set_strides(a.o_stride, Hq, Nq, dv), set_strides(a.dout_stride, Hq, Nq, dv);
  set_strides(a.lse_stride, Hq, Nq, 1), set_strides(a.dlse_stride, Hq, Nq, 1);
  a.key_lengths = n[11] ? (const int64_t*)lengths.data() : nullptr;
  a.scale = scale;
  a.causal = int(n[6]);
#if defined(__x86_64__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // asks for the tile registers; the AMX unit needs them
#endif
  const BackwardKernel* kernel = ENTRY(int(n[0]));
  void* shared = aligned_alloc(64, (kernel->shared_bytes(&a) + 63) / 64 * 64);
  kernel->begin(&a, shared);
  int64_t next = 0;
  if (kernel->run(&a, shared, &next)) return 3;
  free(shared);
  for (const std::vector<char>* gradient : {&dq, &dk, &dv_})
    if (!gradient->empty()) fwrite(gradient->data(), 1, gradient->size(), stdout);
  return 0;
}
