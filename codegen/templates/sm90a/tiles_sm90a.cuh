// tiles_sm90a.cuh: which rows and keys a block works on, and the warps that give it work: one names the tiles of query
// rows, one loads Q, one K and one V. A part of the forward kernel: it uses the sizes and Params of the file it is
// included by.
//
// Holds always: the bytes of a stage belong to its writer from `empty` to `full`, to its readers from `full` on.
#pragma once
#include <cstdint>

#include "rings_sm90a.cuh"

namespace {

// A tile of query rows: row0 < 0 says that there is no more, keys < 0 that the batch's length is not in [0, nk].
struct Tile {
  int row0, batch, head, keys;
};

// Waits for the next tile. Equal in all lanes; redux tells the compiler so.
__device__ __forceinline__ Tile take_tile(uint32_t smem, Ring<kTileSlots>& slot) {
  uint32_t r[4];
  wait(smem + kTileFull + 8 * slot.stage, slot.parity);
  ld_shared_b128(r, smem + kTilesAt + 16 * slot.stage);
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + kTileEmpty + 8 * slot.stage);
  slot.next();
  return {redux_max_s32(static_cast<int>(r[0])), redux_max_s32(static_cast<int>(r[1])),
          redux_max_s32(static_cast<int>(r[2])), redux_max_s32(static_cast<int>(r[3]))};
}

// Keys that a row sees; at most 0 if none.
template <bool kCausal>
__device__ __forceinline__ int seen_by(const Params& p, int row, int keys) {
  return kCausal ? min(keys, row + 1 + p.delta) : keys;
}

// The last key tile that rows below `end` need: of these, the last row sees the most. Rows that see no key take tile 0
// as well, so that every query tile has one: it is masked, and where no row of the block sees a key it is not read.
template <bool kCausal>
__device__ __forceinline__ int last_key_tile(const Params& p, int end, int keys) {
  return (max(seen_by<kCausal>(p, min(end, p.nq) - 1, keys), 1) - 1) / kBc;
}

// ---- The warps that give work

// Names the tiles, by one thread. Heads run in sections; inside a section tile by tile, its heads side by side, the
// last rows (the longest ones under a causal mask) first. With `paired`, a block takes tile i from the end and then
// tile i from the start: all pairs are equally long.
__device__ __forceinline__ void name_tiles(const Params& p, uint32_t smem) {
  const int per_head = p.paired ? (p.row_tiles + 1) / 2 : p.row_tiles, in_section = p.section * per_head;
  Ring<kTileSlots> slot = {0, 1};
  uint32_t asked = 0;
  bool second = false;
  int index = ctaid_x();
#pragma unroll 1
  for (bool more = true; more;) {
    uint32_t r[4] = {~0u, 0, 0, 0};
    more = index < p.heads * per_head;
    if (more) {
      const int first = index / in_section * p.section, rank = index % in_section;
      const int together = min(p.section, p.heads - first), bh = first + rank % together, batch = bh / p.hq;
      const int from_end = rank / together, from_start = p.row_tiles - 1 - from_end;
      const int64_t length = p.key_lengths ? ld_global_s64(p.key_lengths + batch) : p.nk;
      r[0] = kBr * (second ? from_end : from_start);
      r[1] = batch;
      r[2] = bh - batch * p.hq;
      r[3] = 0 <= length && length <= p.nk ? static_cast<int>(length) : -1;
      second = p.paired && !second && from_end != from_start;
    }
    wait(smem + kTileEmpty + 8 * slot.stage, slot.parity);
    st_shared_b128(smem + kTilesAt + 16 * slot.stage, r);
    mbarrier_arrive(smem + kTileFull + 8 * slot.stage);
    slot.next();
    if (second) continue;
    if (p.next_tile && more) {
      wait(smem + kTileAsked, asked);
      asked ^= 1;
    }
    index = gridDim.x + (p.next_tile ? atomic_add_global_u32(p.next_tile, 1) : index);
  }
}

// Loads Q: 64 rows for each consumer, as soon as that consumer is done with its rows of the tile before.
__device__ __forceinline__ void load_queries(const Params& p, const CUtensorMap* map, uint32_t smem) {
  const bool leads = threadIdx.x % 32 == 0;
  Ring<kTileSlots> slot = {0, 0};
#pragma unroll 1
  for (uint32_t empty = 1;; empty ^= 1) {
    const Tile tile = take_tile(smem, slot);
    if (tile.row0 < 0) return;
#pragma unroll 1
    for (int i = 0; i < kConsumers; ++i) {
      wait(smem + kQEmpty + 8 * i, empty);
      if (!leads) continue;
      mbarrier_arrive_expect_tx(smem + kQFull + 8 * i, kQBytes);
#pragma unroll
      for (int c = 0; c < kDPad; c += kPanelD)
        tma_load_4d(smem + kQAt + i * kQBytes + 2 * 64 * c, map, smem + kQFull + 8 * i, c, tile.row0 + 64 * i,
                    tile.head, tile.batch);
    }
  }
}

// The row of K and V at which key tile 0 starts. If no row of the block sees a key: beyond the tensor, where the copies
// read nothing and give zeros.
template <bool kCausal>
__device__ __forceinline__ int first_key_row(const Params& p, const Tile& tile) {
  return seen_by<kCausal>(p, min(tile.row0 + kBr, p.nq) - 1, tile.keys) > 0 ? 0 : max(p.nk, 1);
}

// Loads K, the last key tile first.
template <bool kCausal>
__device__ __forceinline__ void load_keys(const Params& p, const CUtensorMap* map, uint32_t smem) {
  const bool leads = threadIdx.x % 32 == 0;
  Ring<kTileSlots> slot = {0, 0};
  Ring<kStagesK> k = {0, 1};
#pragma unroll 1
  for (;;) {
    const Tile tile = take_tile(smem, slot);
    if (tile.row0 < 0) return;
    const int head = tile.head / p.group, row0 = first_key_row<kCausal>(p, tile);
#pragma unroll 1
    for (int j = last_key_tile<kCausal>(p, tile.row0 + kBr, tile.keys); j >= 0; --j) {
      const uint32_t full = smem + kKFull + 8 * k.stage, dst = smem + kKAt + k.stage * kKBytes;
      wait(smem + kKEmpty + 8 * k.stage, k.parity);
      k.next();
      if (!leads) continue;
      mbarrier_arrive_expect_tx(full, kKBytes);
#pragma unroll
      for (int c = 0; c < kDPad; c += kPanelD)
        tma_load_4d(dst + c * kKBytes / kDPad, map, full, c, row0 + j * kBc, head, tile.batch);
    }
  }
}

// Loads V, the last key tile first. Rows of keys that do not exist become zero: whatever lies there must not meet a P
// of 0, as 0 * NaN is NaN. The copies see to that beyond nk, this warp beyond a shorter length.
template <bool kCausal>
__device__ __forceinline__ void load_values(const Params& p, const CUtensorMap* map, uint32_t smem) {
  const int lane = threadIdx.x % 32;
  uint32_t arrived = 0;
  Ring<kTileSlots> slot = {0, 0};
  Ring<kStagesV> v = {0, 1};
#pragma unroll 1
  for (;;) {
    const Tile tile = take_tile(smem, slot);
    if (tile.row0 < 0) return;
    const int head = tile.head / p.group, row0 = first_key_row<kCausal>(p, tile);
#pragma unroll 1
    for (int j = last_key_tile<kCausal>(p, tile.row0 + kBr, tile.keys); j >= 0; --j) {
      // Asked for earlier, while a long tile still runs, the next one from the counter would be a long one, too.
      if (j == 0 && p.next_tile && lane == 0) mbarrier_arrive(smem + kTileAsked);
      const uint32_t full = smem + kVFull + 8 * v.stage, dst = smem + kVAt + v.stage * kVBytes;
      wait(smem + kVEmpty + 8 * v.stage, v.parity);
      v.next();
      const int exist = tile.keys - j * kBc;
      const bool cut = row0 == 0 && exist < kBc && tile.keys < p.nk;
      if (lane == 0) {
        const uint32_t bar = cut ? smem + kVArrived : full;
        mbarrier_arrive_expect_tx(bar, kVBytes);
#pragma unroll
        for (int c = 0; c < kDvPad; c += kPanelDv)
          tma_load_4d(dst + c * kVBytes / kDvPad, map, bar, c, row0 + j * kBc, head, tile.batch);
      }
      if (!cut) continue;
      wait(smem + kVArrived, arrived);
      arrived ^= 1;
      constexpr int kRowBytes = 2 * kPanelDv;
      const uint32_t zero[4] = {0, 0, 0, 0};
#pragma unroll 1
      for (int at = exist * kRowBytes + 16 * lane; at < kBc * kRowBytes; at += 32 * 16)
#pragma unroll 1
        for (int c = 0; c < kDvPad; c += kPanelDv) st_shared_b128(dst + c * kVBytes / kDvPad + at, zero);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(full);
    }
  }
}

}  // namespace
