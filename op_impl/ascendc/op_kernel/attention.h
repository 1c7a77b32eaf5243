// Attention: S = Q K^T on the cube, softmax on the vector units, O += P V. What both sides of a core agree on: where buffers lie.
#pragma once

#include "schedule.h"
#include "vec.h"

namespace flashmla {

constexpr float kLowest = -3.0e38f;  // a maximum before any key; finite, for -inf - (-inf) is NaN
constexpr int32_t kMostKvBuffers = 4;
constexpr int32_t kMostUbBuffers = 3;      // of P V
constexpr int32_t kMostL0CBuffers = 4;
constexpr int32_t kLeastPvColumns = 32;  // an output leaves through a P V buffer, half of whose columns as float32 and rounded at a time

template <typename T>
struct AttentionShape {
  int64_t d_qk;        // columns of Q and K that exist
  int64_t d_qk16, d_v16;
  int64_t d_out;       // columns of V that exist
  const AscendBlocks &b;

  __aicore__ inline explicit AttentionShape(const Call<T> &call) : b(call.d.blocks) {
    d_qk = (call.absorbed() ? call.d.rank : call.d.d_n) + call.d.d_r;
    d_out = call.absorbed() ? call.d.rank : call.d.d_v;
    d_qk16 = align_up(d_qk, kFractal);
    d_v16 = align_up(d_out, kFractal);
  }
};

// An absorbed query is one rounded row; an expanded one may come in two parts, as its keys are rounded too.
template <typename T>
__aicore__ inline int64_t query_parts(const Call<T> &call) { return call.absorbed() ? 1 : call.d.parts; }

// Places for P in L1.
__aicore__ inline int32_t p_places(const AscendBlocks &b) { return b.p_in_rope ? b.kv_buffers : b.p_buffers; }

__aicore__ inline int32_t next_of(int32_t index, int32_t count) { return index + 1 == count ? 0 : index + 1; }

// A latent output meets W_UV in parts; what W_o takes is rounded once.
template <typename T>
__aicore__ inline int32_t output_parts(const Call<T> &call) { return call.absorbed() ? call.d.parts : 1; }

// L1 of a core. Absorbed, V is the first columns of K and both share a tile.
template <typename T>
struct AttentionL1 {
  LocalTensor<T> q[2];                // [rows, d_qk16], expanded in parts
  LocalTensor<T> k[kMostKvBuffers];   // [kv_tile, d_qk16]
  LocalTensor<T> v[kMostKvBuffers];   // [kv_tile, d_v16]
  LocalTensor<T> p[kMostKvBuffers];   // [rows, kv_tile], of the tile in that buffer

  __aicore__ inline AttentionL1(const Call<T> &call, const AttentionShape<T> &s) {
    Region l1(TPosition::A1);
    for (int32_t part = 0; part < query_parts(call); ++part) q[part] = l1.take<T>(s.b.rows * s.d_qk16);
    for (int32_t i = 0; i < s.b.kv_buffers; ++i) {
      k[i] = l1.take<T>(s.b.kv_tile * s.d_qk16);
      v[i] = call.absorbed() ? k[i] : l1.take<T>(s.b.kv_tile * s.d_v16);
    }
    // P may stand on the rope columns of its tile: QK has used them up, and PV does not read them.
    for (int32_t i = 0; i < p_places(s.b); ++i) p[i] = s.b.p_in_rope ? k[i][s.d_v16 * s.b.kv_tile] : l1.take<T>(s.b.rows * s.b.kv_tile);
  }
};

// UB of each AIV, which has half of the rows.
template <typename T>
struct AttentionUb {
  LocalTensor<float> scores[2];  // [half, kv_tile]
  LocalTensor<T> p[2];           // fractals [kv_tile / 16][half][16]
  LocalTensor<float> pv[kMostUbBuffers];  // [half, ub_columns]
  LocalTensor<float> o;          // [half, d_v16]
  LocalTensor<float> top[2], sum[2], row_scale[2];  // [half] of the pass and of the one before
  LocalTensor<float> scale_blocks[2], rescale_blocks[2];
  LocalTensor<float> rescale, tile_max, blocks;  // rescale is scratch of the sums where its tile is past

  __aicore__ inline explicit AttentionUb(const AttentionShape<T> &s) {
    const int64_t half = s.b.rows / 2;
    Region ub(TPosition::VECCALC);
    for (int32_t i = 0; i < s.b.score_buffers; ++i) scores[i] = ub.take<float>(half * s.b.kv_tile);
    for (int32_t i = 0; i < s.b.p_buffers; ++i) p[i] = ub.take<T>(half * s.b.kv_tile);
    for (int32_t i = 0; i < 2; ++i) {
      top[i] = ub.take<float>(half);
      sum[i] = ub.take<float>(half);
      row_scale[i] = ub.take<float>(half);
      scale_blocks[i] = ub.take<float>(half * kFloatsOfBlock);
      rescale_blocks[i] = ub.take<float>(half * kFloatsOfBlock);
    }
    for (int32_t i = 0; i < s.b.ub_out_buffers; ++i) pv[i] = ub.take<float>(half * larger(s.b.ub_columns, kLeastPvColumns));
    o = ub.take<float>(half * s.d_v16);
    rescale = ub.take<float>(half);
    tile_max = ub.take<float>(half);
    blocks = ub.take<float>(half * kFloatsOfBlock);
  }
};

// The tile whose scores are under way while the one before it is multiplied with V: its buffers and what is left to do.
struct TileInFlight {
  bool any = false;
  bool last = false;     // of its segment
  int64_t rows16 = 0;    // rows of the pass, whole fractals
  int64_t keys16 = 0;    // keys of the tile, whole fractals
  int32_t kv = 0;        // KV buffer
  int32_t p = 0;         // place of P in L1
  int32_t pass = 0;      // parity of the segment
  int32_t tile = 0;      // parity of the tile
};

}  // namespace flashmla
