// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// v4 float32: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 float32: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// baseline float32: Br=24 Bc=96, 178496 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9216, dS panels 9216, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// v4 float64: Br=24 Bc=24, 181824 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 4608, dS panels 4608, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 float64: Br=12 Bc=48, 169280 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 4608, dS panels 4608, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// baseline float64: Br=12 Bc=48, 169280 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 4608, dS panels 4608, Q rows 12288, dO rows 12288, K block 49152, V block 49152)
// amx bf16: Br=64 Bc=64, 188928 bytes of fast memory (Q panels 32768, dO panels 32768, dQ panels 32768, P panels 8192, dS panels 8192, S panel 8192, dP panel 8192, K block 32768, V block 16384, rows to pack 8192, row statistics 512)
// v4 bf16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 bf16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// baseline bf16: Br=24 Bc=104, 188224 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9984, dS panels 9984, Q rows 12288, dO rows 12288, K block 53248, V block 53248)
// v4 fp16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// v3 fp16: Br=48 Bc=48, 191040 bytes of fast memory (Q panels 24576, dO panels 24576, dQ panels 24576, row statistics 576, P panels 9216, dS panels 9216, Q rows 24576, dO rows 24576, K block 24576, V block 24576)
// baseline fp16: Br=24 Bc=104, 188224 bytes of fast memory (Q panels 12288, dO panels 12288, dQ panels 12288, row statistics 288, P panels 9984, dS panels 9984, Q rows 12288, dO rows 12288, K block 53248, V block 53248)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 fa56f119027e5a91
//
// How a backward pass on a CPU is cut into tiles of query rows, and how tiles that run side by side sum dK and dV.
//
// A K/V head has a sequence of tiles of Br query rows, through all of its query heads in turn. dQ is private to a tile,
// dK and dV are not. Every block of Bc keys has a turn: the number of tiles that have added to it. A tile waits with
// its sums until its predecessor has added, so the order of all sums is that of one worker alone, and tiles of one head
// run about a block of keys apart. A worker takes tiles of a head in their order, so whoever it waits for has been
// started, and the first of all unfinished tiles waits for nobody: workers may even run one after the other.
#pragma once

#include <sched.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "backward.h"
#include "forward.h"

namespace {

constexpr size_t kPage = 4096;
constexpr int64_t kCacheLine = 64;

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t whole_lines(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

template <class T>
inline T* element(const void* base, const int64_t (&stride)[3], int64_t batch, int64_t head, int64_t row) {
  return (T*)base + batch * stride[0] + head * stride[1] + row * stride[2];
}

enum Wanted : int { kDQ = 1, kDK = 2, kDV = 4 };

// Tiles of kBr rows, blocks of kBc keys, rows of kWidth (Q, K) and kWidthV (V, dO) elements. dK and dV are summed as
// Scalar and stored as Output: in place, or in shared memory with room for whole blocks of keys and kSum (kSumV)
// elements in a row.
template <class Scalar, class Output, bool kInPlace, int kBr, int kBc, int kWidth, int kWidthV, int kSum = kWidth,
          int kSumV = kWidthV>
struct BackwardTasks {
  typedef Scalar Sum __attribute__((aligned(1), may_alias));

  // A call, and the memory that its workers share: per K/V head the number of tiles taken, the turns of its blocks of
  // keys, and the sums dK and dV where they cannot be made in place.
  struct Call {
    const BackwardArgs& a;
    int64_t heads, group;   // K/V heads, query heads per K/V head
    int64_t row_tiles;      // per query head
    int64_t tiles, blocks;  // per K/V head
    int wanted;
    char* shared;

    Call(const BackwardArgs& args, void* memory) : a(args), shared((char*)memory) {
      heads = a.B * a.Hkv;
      group = a.Hkv ? a.Hq / a.Hkv : 0;
      row_tiles = (a.Nq + kBr - 1) / kBr;
      tiles = group * row_tiles;
      blocks = (a.Nk + kBc - 1) / kBc;
      wanted = (a.dq ? kDQ : 0) | (a.dk ? kDK : 0) | (a.dv ? kDV : 0);
    }

    int64_t counter_bytes() const { return kCacheLine + whole_lines(blocks * 8); }
    int64_t sum_bytes(const void* gradient, int width) const {
      return kInPlace || !gradient ? 0 : whole_lines(blocks * kBc * width * sizeof(Scalar));
    }
    int64_t shared_bytes() const {
      return heads * (counter_bytes() + sum_bytes(a.dk, kSum) + sum_bytes(a.dv, kSumV));
    }

    int64_t* taken(int64_t head) const { return (int64_t*)(shared + head * counter_bytes()); }
    int64_t* turns(int64_t head) const { return taken(head) + kCacheLine / 8; }
    // Where the sums of a head are made: rows of dK (dV) themselves, or of the shared memory.
    Sum* dk_sums(int64_t head, int64_t key, int64_t* pitch) const {
      const char* sums = shared + heads * counter_bytes();
      return sums_at(sums + head * sum_bytes(a.dk, kSum), a.dk, a.dk_stride, kSum, head, key, pitch);
    }
    Sum* dv_sums(int64_t head, int64_t key, int64_t* pitch) const {
      const char* sums = shared + heads * (counter_bytes() + sum_bytes(a.dk, kSum));
      return sums_at(sums + head * sum_bytes(a.dv, kSumV), a.dv, a.dv_stride, kSumV, head, key, pitch);
    }
    Sum* sums_at(const char* sums, const void* gradient, const int64_t (&stride)[3], int width, int64_t head,
                 int64_t key, int64_t* pitch) const {
      *pitch = kInPlace ? stride[2] : width;
      if constexpr (kInPlace) return element<Sum>(gradient, stride, head / a.Hkv, head % a.Hkv, key);
      return (Sum*)sums + key * width;
    }

    int64_t length(int64_t batch) const { return a.key_lengths ? a.key_lengths[batch] : a.Nk; }
    int64_t causal_shift() const { return a.causal == kBottomRight ? a.Nk - a.Nq : 0; }
    // The first row of a query head that sees `key`; a.Nq if there is none.
    int64_t first_row(int64_t batch, int64_t key) const {
      if (key >= length(batch)) return a.Nq;
      return a.causal == kFull ? 0 : smaller(larger(key - causal_shift(), 0), a.Nq);
    }
    // Row tiles of a query head before the first that adds to the block of keys from `key` on.
    int64_t tiles_before(int64_t batch, int64_t key) const {
      const int64_t row = first_row(batch, key);
      return row == a.Nq ? row_tiles : row / kBr;
    }
  };

  struct Tile {
    int64_t batch, kv_head, head;
    int64_t pair;              // batch and K/V head as one number
    int64_t number, row_tile;  // in the K/V head, in the query head
    int64_t row, rows;
    int64_t sees[kBr];  // keys that the mask shows a row; spare rows as the last one
  };

  static Tile tile_of(const Call& c, int64_t pair, int64_t number) {
    const BackwardArgs& a = c.a;
    Tile tile;
    tile.pair = pair;
    tile.batch = pair / a.Hkv;
    tile.kv_head = pair % a.Hkv;
    tile.number = number;
    tile.head = tile.kv_head * c.group + number / c.row_tiles;
    tile.row_tile = number % c.row_tiles;
    tile.row = tile.row_tile * kBr;
    tile.rows = smaller(kBr, a.Nq - tile.row);
    const int64_t length = c.length(tile.batch);
    for (int r = 0; r < kBr; r++) {
      const int64_t causal = tile.row + smaller(r, tile.rows - 1) + c.causal_shift() + 1;
      tile.sees[r] = a.causal == kFull ? length : larger(smaller(length, causal), 0);
    }
    return tile;
  }

  // The turn of a tile at the block of keys from `key` on.
  struct Turn {
    int64_t* turn;
    int64_t mine;
    bool is_first, is_last;
  };

  static Turn turn_of(const Call& c, const Tile& tile, int64_t key) {
    const int64_t before = c.tiles_before(tile.batch, key), adding = c.row_tiles - before;
    const int64_t mine = tile.number / c.row_tiles * adding + tile.row_tile - before;
    return {c.turns(tile.pair) + key / kBc, mine, mine == 0, mine + 1 == c.group * adding};
  }

  static void wait(const Turn& t) {
    for (int tries = 0; __atomic_load_n(t.turn, __ATOMIC_ACQUIRE) != t.mine; tries++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
      if (tries > 1000) sched_yield();  // whoever is waited for may have no core
    }
  }

  static void pass_on(const Turn& t) { __atomic_store_n(t.turn, t.mine + 1, __ATOMIC_RELEASE); }

  // dK and dV of the keys that no row sees.
  static void clear_unseen(const Call& c, int64_t pair) {
    const BackwardArgs& a = c.a;
    const int64_t batch = pair / a.Hkv, head = pair % a.Hkv;
    for (int64_t block = 0; block < c.blocks; block++) {
      const int64_t key = block * kBc;
      if (c.group > 0 && c.tiles_before(batch, key) < c.row_tiles) continue;
      for (int64_t j = key; j < smaller(key + kBc, a.Nk); j++) {
        if (a.dk) memset(element<Output>(a.dk, a.dk_stride, batch, head, j), 0, kWidth * sizeof(Output));
        if (a.dv) memset(element<Output>(a.dv, a.dv_stride, batch, head, j), 0, kWidthV * sizeof(Output));
      }
    }
  }

  template <class Kernel>
  static void run_head(const Call& c, int64_t pair, typename Kernel::Scratch& scratch) {
    int64_t* taken = c.taken(pair);
    while (__atomic_load_n(taken, __ATOMIC_RELAXED) < c.tiles) {
      const int64_t number = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
      if (number < c.tiles) Kernel::run_tile(c, tile_of(c, pair, number), scratch);
    }
  }

  static int64_t shared_bytes(const BackwardArgs* a) { return Call(*a, nullptr).shared_bytes(); }

  static void begin(const BackwardArgs* a, void* shared) {
    const Call c(*a, shared);
    memset(shared, 0, c.heads * c.counter_bytes());
  }

  // One worker: takes heads until none is left, then tiles of heads that others have begun, the latest first.
  template <class Kernel>
  static void run_heads(const Call& c, int64_t* next, typename Kernel::Scratch& scratch) {
    for (;;) {
      const int64_t pair = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (pair >= c.heads) break;
      clear_unseen(c, pair);
      run_head<Kernel>(c, pair, scratch);
    }
    for (int64_t pair = c.heads - 1; pair >= 0; pair--) run_head<Kernel>(c, pair, scratch);
  }

  // Memory of a worker, before it takes anything: others wait for what was taken. Null where there is none.
  template <class Scratch>
  static Scratch* allocate() {
    return (Scratch*)aligned_alloc(kPage, (sizeof(Scratch) + kPage - 1) / kPage * kPage);
  }
};

}  // namespace
