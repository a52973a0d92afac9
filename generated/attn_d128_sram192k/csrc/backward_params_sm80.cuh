// The plan, the parameters and the places of blocks that the kernels of backward_sm80.cu share.
//
// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// sm80 bf16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// sm80 fp16: Br=64 Bc=128, 164864 bytes of fast memory (K tile 32768, V tile 32768, Q tiles, 2 stages 32768, dO tiles, 2 stages 32768, P tile 16384, dS tile 16384, LSE and D, 2 stages 1024)
// FLOPs per head without a mask: 1280 * Nq * Nk
// Templates: sha256 7cb44d12f55a63c5
#pragma once
#include "backward.h"
#include "forward.h"

#include "ptx_sm80.cuh"

namespace {

constexpr int kD = 128, kDv = 128;  // columns in memory
constexpr int kDPad = 128, kDvPad = 128;  // in shared memory: whole k16 steps, zero beyond kD and kDv
constexpr int kPanelD = 64, kPanelDv = 64, kPanelP = 64;  // columns of a panel there
constexpr int kBr = 64, kBc = 128;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStages = 2;  // tiles of Q and dO in flight
constexpr int kStepsAtOnce = 4;  // k16 steps of S^T and dP^T that are unrolled

// Of S^T and dP^T a warp computes kKeys x kRows; of dK and dV kKeys x every kRowWarps-th 16 columns, of dQ
// 16 kDqM rows x every kDqColumnWarps-th 16 columns.
constexpr int kRowWarps = 2, kRows = kBr / kRowWarps;
constexpr int kM = 2, kKeys = 16 * kM;  // kBc = kKeys * kWarps / kRowWarps
constexpr int kNd = (kDPad / 16 + kRowWarps - 1) / kRowWarps, kNv = (kDvPad / 16 + kRowWarps - 1) / kRowWarps;
constexpr int kDqM = 2, kDqColumnWarps = 4;
constexpr int kDqN = 2, kDqPasses = 1;  // 16-column blocks of a pass; passes
constexpr int kTileSums = kThreads * kDqPasses * kDqN * kDqM * 8;  // float32 of one tile in `sums`

// Shared memory of key_tiles, offsets in bytes. dK and dV leave through K and V.
constexpr uint32_t kKAt = 0;  // K tile: 32768 bytes
constexpr uint32_t kVAt = 32768;  // V tile: 32768 bytes
constexpr uint32_t kQAt = 65536;  // Q tiles, 2 stages: 32768 bytes
constexpr uint32_t kDoAt = 98304;  // dO tiles, 2 stages: 32768 bytes
constexpr uint32_t kPAt = 131072;  // P tile: 16384 bytes
constexpr uint32_t kDsAt = 147456;  // dS tile: 16384 bytes
constexpr uint32_t kRowsAt = 163840;  // LSE and D, 2 stages: 1024 bytes
constexpr uint32_t kQStage = 16384, kDoStage = 16384, kRowsStage = 512;  // one stage
constexpr int kSharedBytes = 164864;

// query_tiles: a warp owns 16 kQueryM rows of every product.
constexpr int kQueryM = 2, kQueryThreads = 256;
constexpr int kQueryBr = 256, kQueryBc = 32;
constexpr int kQueryStages = 2, kQueryStepsAtOnce = 4;  // of K and V; as above
constexpr uint32_t kQueryQAt = 0;  // Q tile: 65536 bytes
constexpr uint32_t kQueryDoAt = 65536;  // dO tile: 65536 bytes
constexpr uint32_t kQueryKAt = 131072;  // K tiles, 2 stages: 16384 bytes
constexpr uint32_t kQueryVAt = 147456;  // V tiles, 2 stages: 16384 bytes
constexpr uint32_t kQueryKStage = 8192, kQueryVStage = 8192;
constexpr int kQuerySharedBytes = 163840;

constexpr int64_t kMaxGrid = 2147483647;  // blocks of one launch
constexpr int64_t kMaxRows = 2147483647 - 2 * (kBr + kBc);  // rows and keys are counted in int
constexpr int64_t kSectionBytes = 16777216;  // what the heads that run side by side read over and over
constexpr float kInf = __builtin_huge_valf();

struct Params {
  const char *q, *k, *v, *o, *dout;
  const float *lse, *dlse;
  char *dq, *dk, *dv;
  float *rows, *sums;  // per row of a padded tile LSE log2 e and D; per tile dQ / scale, in the order of finish_dq
  const int64_t* key_lengths;
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3], dout_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
  int64_t lse_stride[3], dlse_stride[3];  // elements; those above bytes: batch, head, row
  int hq, hkv, group;                     // query heads, key heads, query heads per key head
  int nq, nk, row_tiles;                  // row_tiles: tiles of kBr rows per head
  int causal, delta;                      // causal: row i sees key j iff j <= i + delta
  int tiles, heads, section;  // of a launch: tiles per head; batch * heads; how many of them run side by side
  float scale, scale_log2;
};

// Heads run in sections; inside a section tile by tile, its heads side by side.
struct Place {
  int bh, tile;
};
__device__ __forceinline__ Place place_of(const Params& p) {
  const int block = ctaid_x(), rank = block % (p.section * p.tiles), first = block / (p.section * p.tiles) * p.section;
  const int together = min(p.section, p.heads - first);
  return {first + rank % together, rank / together};
}

// Keys of a batch entry; a length outside [0, nk] stands for NaN and no keys.
struct Keys {
  int count;
  bool valid;
};
__device__ __forceinline__ Keys keys_of(const Params& p, int batch) {
  const int64_t length = p.key_lengths ? ld_global_s64(p.key_lengths + batch) : p.nk;
  const bool valid = 0 <= length && length <= p.nk;
  return {redux_max_s32(valid ? static_cast<int>(length) : 0), valid};
}

// How many of kBlocks blocks of 16 columns belong to the warp that has every kShare-th from `first` on.
template <int kBlocks, int kShare>
__device__ __forceinline__ int columns_of(int first) {
  return kBlocks % kShare == 0 ? kBlocks / kShare : (kBlocks - first + kShare - 1) / kShare;
}

// Keys from here on do not exist for row i.
__device__ __forceinline__ int limit_of(const Params& p, int i, int keys) {
  return i >= p.nq ? 0 : p.causal ? min(keys, i + 1 + p.delta) : keys;
}

// dQ in `sums`: a warp has every kDqColumnWarps-th 16 columns from 16 column_of_dq on, block by block, in the order of
// its accumulators, so that the 32 lanes of a reduction touch 128 bytes in a row.

__device__ __forceinline__ int column_of_dq(int warp) { return warp % kDqColumnWarps; }
__device__ __forceinline__ int columns_of_dq(int column) { return columns_of<kDPad / 16, kDqColumnWarps>(column); }
__device__ __forceinline__ int sum_at(int n, int i, int e) { return kThreads * (8 * (kDqM * n + i) + e); }

}  // namespace
