// amx_bf16.cpp: dot products of 32 bf16 pairs on the matrix unit, one at a time, to see how it rounds.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {
struct alignas(64) Config {
  uint8_t palette = 1, start = 0, zero[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};
}  // namespace

// Whether this process may use the tiles.
extern "C" int permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// c[i] += sum_t a[i][t] b[i][t] over 32 terms, for `count` independent dot products.
extern "C" void dots(const uint16_t (*a)[32], const uint16_t (*b)[32], float* c, int64_t count) {
  Config config;
  config.bytes_per_row[0] = 4, config.rows[0] = 1;    // C: 1 x 1 float32
  config.bytes_per_row[1] = 64, config.rows[1] = 1;   // A: 1 row of 16 pairs
  config.bytes_per_row[2] = 4, config.rows[2] = 16;   // B: 16 pairs, 1 column
  _tile_loadconfig(&config);
  for (int64_t i = 0; i < count; i++) {
    __asm__ volatile("" ::: "memory");
    _tile_loadd(0, c + i, 4);
    _tile_loadd(1, a[i], 64);
    _tile_loadd(2, b[i], 4);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c + i, 4);
    __asm__ volatile("" ::: "memory");
  }
  _tile_release();
}
