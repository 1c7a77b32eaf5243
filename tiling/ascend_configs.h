// The block configurations that attention on an Ascend has: rows and keys of its tiles, from which the rest follows by what fits. One is selected for
// a call by its shape. The variants of the kernel follow from them: one for each path and kv_tile, named by a tiling key.
#pragma once

#include "tiling/tiling_data.h"

namespace flashmla {

struct AscendConfig {
  int32_t kv_tile;
  int32_t rows;
};

// Short contexts take small tiles: half of a tile at least is real. Rows: 16, 32, 48 for few heads or one token, 64 to 128 where a pass has more;
// tall tiles read the cache less often, wide ones have fewer hand-overs, and both together exceed L0C and UB.
inline constexpr AscendConfig kAscendConfigs[] = {
    {16, 16},  {16, 48},                                     // up to 32 keys
    {32, 16},  {32, 32},  {32, 48},  {32, 64},  {32, 128},   // up to 64, or latents so wide that no more fits
    {64, 16},  {64, 32},  {64, 48},  {64, 96},  {64, 128},   // up to 128, or all rows of 128 heads
    {96, 16},  {96, 32},  {96, 64},  {96, 96},  {96, 128},   // .. where 128 keys beside them do not fit
    {128, 16}, {128, 32}, {128, 48}, {128, 64}, {128, 128},  // long contexts
    {256, 16}, {256, 32}, {256, 48}, {256, 64}, {256, 96},   // .. of narrow heads, or few rows
};

// 1000 and above: absorbed, 2000 and above: expanded; the rest is kv_tile.
constexpr int32_t tiling_key(int32_t path, int32_t kv_tile) { return (path == kAbsorbed ? 1000 : 2000) + kv_tile; }

}  // namespace flashmla
