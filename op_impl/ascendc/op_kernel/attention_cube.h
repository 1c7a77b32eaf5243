// The cube's side of attention: loads Q and KV tiles, S = Q K^T, O += P V.
#pragma once

#include "attention.h"

namespace flashmla {

template <typename T>
class AttentionCube {
 public:
  __aicore__ inline explicit AttentionCube(const Call<T> &call)
      : call_(call), s_(call), l1_(call, s_), ub_(s_), zeros_(call.template buffer<T>(call.d.workspace.zeros)),
        parts_(query_parts(call)),
        most_rows_(larger(kFractal, align_down(s_.b.kv_tile / (1 + AscendC::GetBlockIdx() % kTilePhases), kFractal))) {
    Region l0a(TPosition::A2), l0b(TPosition::B2), l0c(TPosition::CO1);
    for (int32_t i = 0; i < 2; ++i) {
      l0a_[i] = l0a.take<T>(kL0HalfBytes / sizeof(T));
      l0b_[i] = l0b.take<T>(kL0HalfBytes / sizeof(T));
    }
    for (int32_t i = 0; i < s_.b.score_buffers; ++i) scores_[i] = l0c.take<float>(s_.b.rows * s_.b.kv_tile, 1024);
    for (int32_t i = 0; i < s_.b.l0c_out_buffers; ++i) pv_[i] = l0c.take<float>(s_.b.rows * s_.b.pv_columns, 1024);
    for (int32_t i = 0; i < s_.b.kv_buffers; ++i) AscendC::SetFlag<HardEvent::MTE1_MTE2>(i);
    AscendC::SetFlag<HardEvent::MTE1_MTE2>(kQuery);
    for (int32_t i = 0; i < 2; ++i) AscendC::SetFlag<HardEvent::M_MTE1>(i);
    for (int32_t i = 0; i < s_.b.score_buffers; ++i) AscendC::SetFlag<HardEvent::FIX_M>(i);
    for (int32_t i = 0; i < s_.b.l0c_out_buffers; ++i) AscendC::SetFlag<HardEvent::FIX_M>(kPv + i);
    for (int32_t i = 0; i < p_places(s_.b); ++i) AscendC::CrossCoreSetFlag<kCoreMode, PIPE_MTE1>(MTE1_MTE3_P_FREE);
  }

  __aicore__ inline void finish() {
    for (int32_t i = 0; i < s_.b.kv_buffers; ++i) AscendC::WaitFlag<HardEvent::MTE1_MTE2>(i);
    AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kQuery);
    for (int32_t i = 0; i < 2; ++i) AscendC::WaitFlag<HardEvent::M_MTE1>(i);
    for (int32_t i = 0; i < s_.b.score_buffers; ++i) AscendC::WaitFlag<HardEvent::FIX_M>(i);
    for (int32_t i = 0; i < s_.b.l0c_out_buffers; ++i) AscendC::WaitFlag<HardEvent::FIX_M>(kPv + i);
    // Credits that the AIVs gave back for buffers nobody fills any more.
    for (int32_t i = 0; i < s_.b.score_buffers; ++i) AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_SCORES_FREE);
    for (int32_t i = 0; i < s_.b.ub_out_buffers; ++i) AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_PV_FREE);
  }

  __aicore__ inline void load_query(const Pass &pass) {
    const KernelData &d = call_.d;
    AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kQuery);
    const int64_t rows16 = align_up(pass.rows, kFractal);
    if (call_.absorbed()) {
      const int64_t row = pass.first_token * d.heads + pass.row0;
      load_fractals(l1_.q[0], call_.template buffer<T>(d.workspace.query)[row * call_.ld_query()], pass.rows, s_.d_qk, call_.ld_query(), rows16);
    } else {
      const int64_t ld = d.heads * call_.ld_q();
      for (int32_t part = 0; part < parts_; ++part) {
        const GlobalTensor<T> q = call_.template buffer<T>(d.workspace.q[part]);
        load_fractals(l1_.q[part], q[(pass.first_token + pass.row0) * ld + pass.head * call_.ld_q()], pass.rows, s_.d_qk, ld, rows16);
      }
    }
    for (int32_t part = 0; part < parts_; ++part) zero_last_rows(l1_.q[part], zeros_, pass.rows, s_.d_qk16, rows16);
    hand_over<HardEvent::MTE2_MTE1>(kQuery);
  }
  // No more scores of this pass: the next one's Q may come.
  __aicore__ inline void drop_query() { AscendC::SetFlag<HardEvent::MTE1_MTE2>(kQuery); }

  // S = Q K^T for tile `t`, to the AIVs.
  __aicore__ inline TileInFlight scores(const Pass &pass, int64_t t) {
    TileInFlight tile;
    const int64_t key = t * s_.b.kv_tile, keys = smaller(s_.b.kv_tile, pass.keys - key);
    tile.any = true;
    tile.rows16 = align_up(pass.rows, kFractal);
    tile.keys16 = align_up(keys, kFractal);
    tile.kv = kv_;
    tile.p = p_;
    AscendC::WaitFlag<HardEvent::MTE1_MTE2>(kv_);
    load_keys(pass, key, keys);
    hand_over<HardEvent::MTE2_MTE1>(kv_);
    AscendC::WaitFlag<HardEvent::FIX_M>(s_index_);
    const int64_t steps = ceil_div(s_.d_qk16, s_.b.qk_k_block);
    for (int64_t step = 0; step < parts_ * steps; ++step) {
      const int64_t part = step / steps, c = step % steps * s_.b.qk_k_block;
      const int64_t depth = smaller(s_.b.qk_k_block, s_.d_qk16 - c);
      AscendC::WaitFlag<HardEvent::M_MTE1>(l0_);
      load_l0(l0a_[l0_], l1_.q[part][c * tile.rows16], tile.rows16, depth, tile.rows16);
      load_l0(l0b_[l0_], l1_.k[kv_][c * s_.b.kv_tile], tile.keys16, depth, s_.b.kv_tile);
      hand_over<HardEvent::MTE1_M>(l0_);
      multiply(scores_[s_index_], l0a_[l0_], l0b_[l0_], tile.rows16, tile.keys16, depth, step == 0);
      AscendC::SetFlag<HardEvent::M_MTE1>(l0_);
      l0_ ^= 1;
    }
    hand_over<HardEvent::M_FIX>(s_index_);
    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_SCORES_FREE);
    share_result(ub_.scores[s_index_], scores_[s_index_], tile.rows16, tile.keys16, s_.b.kv_tile);
    AscendC::CrossCoreSetFlag<kCoreMode, PIPE_FIX>(FIX_V_SCORES);
    AscendC::SetFlag<HardEvent::FIX_M>(s_index_);
    s_index_ = next_of(s_index_, s_.b.score_buffers);
    kv_ = next_of(kv_, s_.b.kv_buffers);
    p_ = next_of(p_, p_places(s_.b));
    return tile;
  }

  // P V of a tile, some columns at a time, to the AIVs; after it the tile's buffer is free.
  __aicore__ inline void output(const TileInFlight &tile) {
    const LocalTensor<T> &p = l1_.p[tile.p], &v = l1_.v[tile.kv];
    AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_MTE1>(MTE3_MTE1_P);
    for (int64_t c = 0; c < s_.d_v16; c += s_.b.pv_columns) {
      const int64_t columns = smaller(s_.b.pv_columns, s_.d_v16 - c);
      AscendC::WaitFlag<HardEvent::FIX_M>(kPv + out_);
      for (int64_t n0 = 0; n0 < columns; n0 += s_.b.pv_n_block) {
        const int64_t n = smaller(s_.b.pv_n_block, columns - n0);
        for (int64_t k0 = 0; k0 < tile.keys16; k0 += s_.b.pv_k_block) {
          const int64_t depth = smaller(s_.b.pv_k_block, tile.keys16 - k0);
          AscendC::WaitFlag<HardEvent::M_MTE1>(l0_);
          load_l0(l0a_[l0_], p[k0 * tile.rows16], tile.rows16, depth, tile.rows16);
          load_l0_transposed(l0b_[l0_], v[(c + n0) * s_.b.kv_tile + k0 * kFractal], depth, n, s_.b.kv_tile);
          hand_over<HardEvent::MTE1_M>(l0_);
          multiply(pv_[out_][n0 * tile.rows16], l0a_[l0_], l0b_[l0_], tile.rows16, n, depth, k0 == 0);
          AscendC::SetFlag<HardEvent::M_MTE1>(l0_);
          l0_ ^= 1;
        }
      }
      if (c + columns == s_.d_v16) {
        AscendC::CrossCoreSetFlag<kCoreMode, PIPE_MTE1>(MTE1_MTE3_P_FREE);
        AscendC::SetFlag<HardEvent::MTE1_MTE2>(tile.kv);
      }
      hand_over<HardEvent::M_FIX>(kPv + out_);
      for (int64_t u = 0; u < columns; u += s_.b.ub_columns) {
        AscendC::CrossCoreWaitFlag<kCoreMode, PIPE_FIX>(V_FIX_PV_FREE);
        share_result(ub_.pv[ub_out_], pv_[out_][u * tile.rows16], tile.rows16, smaller(s_.b.ub_columns, columns - u), s_.b.ub_columns);
        AscendC::CrossCoreSetFlag<kCoreMode, PIPE_FIX>(FIX_V_PV);
        ub_out_ = next_of(ub_out_, s_.b.ub_out_buffers);
      }
      AscendC::SetFlag<HardEvent::FIX_M>(kPv + out_);
      out_ = next_of(out_, s_.b.l0c_out_buffers);
    }
  }

 private:
  static constexpr int32_t kQuery = kMostKvBuffers;  // events: KV buffers come first
  static constexpr int32_t kPv = 2;                  // events: scores come first

  // Keys [key, key + keys) of the pass's sequence; rows that fill up a fractal are zero, so that P V sums nothing undefined.
  __aicore__ inline void load_keys(const Pass &pass, int64_t key, int64_t keys) {
    const KernelData &d = call_.d;
    const int64_t kv_tile = s_.b.kv_tile;
    if (call_.absorbed()) {
      const GlobalTensor<T> cache = call_.template input<T>(FlashMLAIn::kv_cache);
      for (int64_t at = 0; at < keys;) {  // a copy for each block of the cache
        const int64_t rows = smaller(call_.cache_run(key + at, keys - at), most_rows_);
        load_fractals(l1_.k[kv_][at * kFractal], cache[call_.cache_row(pass.sequence, key + at)], rows, s_.d_qk, d.cache.row_stride, kv_tile);
        at += rows;
      }
      most_rows_ = d.cache.page;
    } else {
      const int64_t row = (pass.head % d.round_heads) * d.round_keys + pass.key0 + key;
      load_fractals(l1_.k[kv_], call_.template buffer<T>(d.workspace.k_expanded)[row * call_.ld_q()], keys, s_.d_qk, call_.ld_q(), kv_tile);
      load_fractals(l1_.v[kv_], call_.template buffer<T>(d.workspace.v_expanded)[row * call_.ld_v()], keys, s_.d_v16, call_.ld_v(), kv_tile);
      zero_last_rows(l1_.v[kv_], zeros_, keys, s_.d_v16, kv_tile);
    }
    zero_last_rows(l1_.k[kv_], zeros_, keys, s_.d_qk16, kv_tile);
  }

  const Call<T> &call_;
  const AttentionShape<T> s_;
  const AttentionL1<T> l1_;
  const AttentionUb<T> ub_;
  const GlobalTensor<T> zeros_;
  const int64_t parts_;
  LocalTensor<T> l0a_[2], l0b_[2];
  LocalTensor<float> scores_[2], pv_[kMostL0CBuffers];
  int64_t most_rows_;  // of a copy; smaller ones for a core's first tile set its phase
  int32_t kv_ = 0, p_ = 0, l0_ = 0, s_index_ = 0, out_ = 0, ub_out_ = 0;
};

// Scores run one tile ahead of P V, or two where the KV buffers last for it: softmax of one tile and P V of the one before it then meet on
// the vector units, and the scores they wait for next are there already. With a single buffer P V of a tile comes before the next scores.
template <typename T>
__aicore__ inline void attend_cube(const Call<T> &call, const Schedule<T> &schedule) {
  AttentionCube<T> cube(call);
  const bool two_ahead = call.d.blocks.kv_buffers > 3 && call.d.blocks.score_buffers > 1;  // a buffer is left for the tile that is on its way
  TileInFlight before, long_before;
  schedule.for_core(AscendC::GetBlockIdx(), [&](const Segment &segment) {
    cube.load_query(segment.pass);
    for (int64_t t = segment.begin; t < segment.end; ++t) {
      const TileInFlight tile = cube.scores(segment.pass, t);
      if (call.d.blocks.kv_buffers == 1) {
        cube.output(tile);
        continue;
      }
      if (two_ahead) {
        if (long_before.any) cube.output(long_before);
        long_before = before;
      } else if (before.any) {
        cube.output(before);
      }
      before = tile;
    }
    cube.drop_query();
  });
  if (two_ahead && long_before.any) cube.output(long_before);
  if (before.any) cube.output(before);
  cube.finish();
  AscendC::PipeBarrier<PIPE_ALL>();  // products take the same events
}

}  // namespace flashmla
