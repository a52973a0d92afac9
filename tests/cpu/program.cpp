// Runs one kernel of a unit on a problem read from standard input: for emulators and sanitizers. ENTRY is the unit's.
// Every tensor has an allocation of its own, of exactly its size.
//
// In: 13 int64 (dtype, B, Hq, Hkv, Nq, Nk, causal, bytes of one element, of one output, of one LSE, d, dv, lengths?),
// the scale as double, the key lengths if any, then Q, K, V, contiguous. Out: O, then LSE.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "forward.h"

extern "C" const ForwardKernel* ENTRY(int dtype);

static std::vector<char> read(int64_t bytes) {
  std::vector<char> data(bytes);
  if (bytes && fread(data.data(), 1, bytes, stdin) != size_t(bytes)) exit(2);
  data.shrink_to_fit();
  return data;
}

int main() {
  int64_t n[13];
  double scale;
  if (fread(n, 8, 13, stdin) != 13 || fread(&scale, 8, 1, stdin) != 1) return 2;
  const int64_t B = n[1], Hq = n[2], Hkv = n[3], Nq = n[4], Nk = n[5], d = n[10], dv = n[11];
  const std::vector<char> lengths = read(n[12] ? 8 * B : 0);
  const std::vector<char> q = read(B * Hq * Nq * d * n[7]), k = read(B * Hkv * Nk * d * n[7]), v = read(B * Hkv * Nk * dv * n[7]);
  std::vector<char> o(B * Hq * Nq * dv * n[8]), lse(B * Hq * Nq * n[9]);

  ForwardArgs a = {};
  a.q = q.data(), a.k = k.data(), a.v = v.data(), a.o = o.data(), a.lse = lse.data();
  a.B = B, a.Hq = Hq, a.Hkv = Hkv, a.Nq = Nq, a.Nk = Nk;
  const int64_t rows[4] = {Nq, Nk, Nk, Nq}, heads[4] = {Hq, Hkv, Hkv, Hq}, widths[4] = {d, d, dv, dv};
  int64_t* strides[4] = {a.q_stride, a.k_stride, a.v_stride, a.o_stride};
  for (int i = 0; i < 4; i++) {
    strides[i][2] = widths[i];
    strides[i][1] = rows[i] * widths[i];
    strides[i][0] = heads[i] * strides[i][1];
  }
  a.key_lengths = n[12] ? (const int64_t*)lengths.data() : nullptr;
  a.scale = scale;
  a.causal = int(n[6]);
  int64_t next = 0;
  if (ENTRY(int(n[0]))->run(&a, nullptr, &next)) return 3;
  fwrite(o.data(), 1, o.size(), stdout);
  fwrite(lse.data(), 1, lse.size(), stdout);
  return 0;
}
