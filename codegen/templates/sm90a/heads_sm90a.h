// heads_sm90a.h: query heads that share a key head, made into rows of one head, on the host.
//
// A query tile costs the same whatever part of it is real rows: one token of 8 query heads per key head takes one tile
// instead of 8, and K and V are read once. Nothing but the arguments changes: a row's result is the same bit for bit.
#pragma once
#include <cstdint>

#include "forward.h"

namespace {

// Rewrites `args` if that takes fewer tiles of `tile_rows` rows. It must not be seen from within: all rows see the same
// keys (under bottom-right alignment a single one per head sees all of them), one stride leads from each row of Q and O
// to the next, and LSE (B,Hq,Nq) is the same memory as (B,Hkv,group*Nq).
void pack_heads(ForwardArgs& args, int64_t tile_rows, int64_t most_rows) {
  const int64_t group = args.Hq / args.Hkv, rows = args.Nq, packed = group * rows;
  const bool alike = args.causal == kFull || (args.causal == kBottomRight && rows == 1);
  const auto tiles = [tile_rows](int64_t n) { return (n + tile_rows - 1) / tile_rows; };
  if (!alike || packed > most_rows || tiles(packed) >= group * tiles(rows)) return;
  int64_t* const strides[2] = {args.q_stride, args.o_stride};  // of batch, head, row
  for (const int64_t* stride : strides)
    if (rows > 1 && stride[1] != rows * stride[2]) return;
  for (int64_t* stride : strides) {
    if (rows == 1) stride[2] = stride[1];
    stride[1] *= group;
  }
  args.Hq = args.Hkv;
  args.Nq = packed;
}

}  // namespace
