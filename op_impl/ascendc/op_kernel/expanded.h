// The expanded path: K and V of some heads are decompressed from the latent into a workspace, K rotated there when RoPE turns the whole head.
#pragma once

#include "products.h"
#include "vec.h"

namespace flashmla {

// Keys [key, key + keys) of a sequence, row `row` of every head's K and V in the workspace.
struct KeyBlock {
  int64_t sequence, key, keys, row;
};

// Keys that the cube decompresses together, however few tokens are new.
constexpr int64_t kKeyRows = 128;

// f(block) for the keys of all sequences that have new tokens, `most` keys at a time.
template <typename T, typename F>
__aicore__ inline void for_key_blocks(const Call<T> &call, int64_t most, const F &f) {
  int64_t row = 0;
  for (int64_t b = 0; b < call.d.batch; ++b) {
    const int64_t tokens = call.q_len(b), all = tokens > 0 ? call.context(b) + tokens : 0;
    for (int64_t key = 0; key < all; key += most) f(KeyBlock{b, key, smaller(most, all - key), row + key});
    row += all;
  }
}

// Rows of the latent cache are A; a copy for each of its blocks.
template <typename T>
struct LatentRows {
  const Call<T> &call;
  KeyBlock block;
  __aicore__ inline int64_t rows(const GemmItem &item) const { return item.m; }
  __aicore__ inline bool load_a(const LocalTensor<T> &tile, const GemmItem &item, int64_t k0, int64_t k, int64_t tile_rows) const {
    const KernelData &d = call.d;
    const GlobalTensor<T> cache = call.template input<T>(FlashMLAIn::kv_cache);
    for (int64_t at = 0; at < item.m;) {
      const int64_t key = block.key + at, rows = call.cache_run(key, item.m - at);
      load_fractals(tile[at * kFractal], cache[call.cache_row(block.sequence, key) + k0], rows, k, d.cache.row_stride, tile_rows);
      at += rows;
    }
    return false;
  }
};

// K = c W_UK^T of a head: W_UK [d_n, rank] holds the columns of B as rows.
template <typename T>
struct KeySource : LatentRows<T> {
  static constexpr bool kRowsAreColumns = true;
  int64_t head;
  __aicore__ inline KeySource(const Call<T> &call, const KeyBlock &block, int64_t h) : LatentRows<T>{call, block}, head(h) {}
  __aicore__ inline void load_b(const LocalTensor<T> &tile, const GemmItem &item, int64_t k0, int64_t k) const {
    const KernelData &d = this->call.d;
    const int64_t rank16 = this->call.ld_latent(), k_end = k0 + align_up(k, kFractal), rows = smaller(item.n, d.d_n - item.n0);
    const GlobalTensor<T> w = this->call.template input<T>(FlashMLAIn::w_uk)[head * rank16 * d.d_n];
    for (int64_t at = k0; at < k_end;) {
      const int64_t panel = at / kPanel * kPanel, width = smaller(kPanel, rank16 - panel), end = smaller(panel + width, k_end);
      load_fractals(tile[(at - k0) * item.n], w[panel * d.d_n + item.n0 * width + (at - panel)], rows, end - at, width, item.n);
      at = end;
    }
  }
};

template <typename T>
struct ValueSource : LatentRows<T> {
  static constexpr bool kRowsAreColumns = false;
  int64_t head;
  GlobalTensor<T> zeros;
  __aicore__ inline ValueSource(const Call<T> &call, const KeyBlock &block, int64_t h)
      : LatentRows<T>{call, block}, head(h), zeros(call.template buffer<T>(call.d.workspace.zeros)) {}
  __aicore__ inline void load_b(const LocalTensor<T> &tile, const GemmItem &item, int64_t k0, int64_t k) const {
    const KernelData &d = this->call.d;
    const int64_t n_padded = this->call.ld_v();
    load_packed(tile, this->call.template input<T>(FlashMLAIn::w_uv)[head * n_padded * d.rank], zeros, n_padded, d.rank, item.n0, item.n, k0, k);
  }
};

// Whether K of a head can leave the cube as it is to be read.
template <typename T>
__aicore__ inline bool keys_leave_finished(const Call<T> &call) {
  return call.d.rope_mode == kRopeDecoupled && call.d.d_n % kFractal == 0;
}

// K and V of heads [first, first + heads) for all keys.
template <typename T>
__aicore__ inline void decompress(const Call<T> &call, int64_t first, int64_t heads) {
  if ASCEND_IS_AIV { return; }
  const KernelData &d = call.d;
  const bool finished = keys_leave_finished(call);
  const int64_t d_n16 = align_up(d.d_n, kFractal);
  const int64_t width = d.products.keys.columns;
  GemmCube<T> cube(d.products.keys, 1);
  cube.begin();
  int64_t index = 0;
  const auto mine = [&] { return index++ % d.cores == AscendC::GetBlockIdx(); };
  for_key_blocks(call, kKeyRows, [&](const KeyBlock &block) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row = h * d.round_keys + block.row;
      GemmJob<T> job{};  // only where the result goes
      for (int64_t n0 = 0; n0 < d_n16; n0 += width) {
        if (!mine()) continue;
        const GemmItem item = {0, 0, block.keys, n0, smaller(width, d_n16 - n0)};
        job.rounded = finished;
        job.ldc = finished ? call.ld_q() : d_n16;
        job.c = call.workspace + (finished ? d.workspace.k_expanded + row * call.ld_q() * int64_t(sizeof(T)) : d.workspace.k_raw + row * d_n16 * int64_t(sizeof(float)));
        cube.run(KeySource<T>(call, block, first + h), GlobalSink<T>{job}, item, d.rank);
      }
      for (int64_t n0 = 0; n0 < call.ld_v(); n0 += width) {
        if (!mine()) continue;
        const GemmItem item = {0, 0, block.keys, n0, smaller(width, call.ld_v() - n0)};
        job.rounded = true;
        job.ldc = call.ld_v();
        job.c = call.workspace + d.workspace.v_expanded + row * call.ld_v() * int64_t(sizeof(T));
        cube.run(ValueSource<T>(call, block, first + h), GlobalSink<T>{job}, item, d.rank);
      }
    }
  });
  cube.finish();
}

// What the cube does not do for K: rotate the whole head, or put k_pe of the cache beside it.
template <typename T>
class KeyFinish {
 public:
  static constexpr int64_t kRows = 32;

  __aicore__ inline explicit KeyFinish(const Call<T> &call) : call_(call), half_(call.rope_dim() / 2), pitch_(rope_pitch(half_)) {
    Region ub(TPosition::VECCALC);
    rope_.take(ub, kRows, kRows, pitch_);
    first_ = ub.take<T>(kRows * pitch_);
    second_ = ub.take<T>(kRows * pitch_);
    raw_ = ub.take<float>(kRows * align_up(call.d.d_n, kFractal));
    rounded_ = ub.take<T>(kRows * align_up(call.d.d_n, kFractal));
    pe_ = ub.take<T>(kRows * align_up(larger(call.d.d_r, 1), kFractal));
  }

  __aicore__ inline void run(const KeyBlock &block, int64_t head) {
    const KernelData &d = call_.d;
    const int64_t row = head * d.round_keys + block.row, ld_raw = align_up(d.d_n, kFractal), ld = call_.ld_q();
    const GlobalTensor<float> raw = call_.template buffer<float>(d.workspace.k_raw)[row * ld_raw];
    const GlobalTensor<T> k = call_.template buffer<T>(d.workspace.k_expanded)[row * ld];
    if (d.rope_mode == kRopeFull) {
      const int64_t gap_blocks = (pitch_ - align_up(half_, kFloatsOfBlock)) / kFloatsOfBlock;
      load_runs(rope_.first, raw, block.keys, half_, ld_raw - half_, gap_blocks);
      load_runs(rope_.second, raw[half_], block.keys, half_, ld_raw - half_, gap_blocks);
      load_rope_rows(call_, rope_, block.key, block.keys, 0);
      hand_over<HardEvent::MTE2_V>();
      rotate_rows(rope_, block.keys, pitch_, false);
      narrow(first_, rope_.first, block.keys * pitch_);
      narrow(second_, rope_.second, block.keys * pitch_);
      hand_over<HardEvent::V_MTE3>();
      store_runs(k, first_, block.keys, half_, ld - half_);
      store_runs(k[half_], second_, block.keys, half_, ld - half_);
      hand_over<HardEvent::MTE3_V>();
      hand_over<HardEvent::V_MTE2>();
      return;
    }
    if (!keys_leave_finished(call_)) {
      load_runs(raw_, raw, 1, block.keys * ld_raw, 0);
      hand_over<HardEvent::MTE2_V>();
      narrow(rounded_, raw_, block.keys * ld_raw);
      hand_over<HardEvent::V_MTE3>();
      store_runs(k, rounded_, block.keys, d.d_n, ld - d.d_n);
      hand_over<HardEvent::MTE3_V>();
      hand_over<HardEvent::V_MTE2>();
    }
    const int64_t pitch = align_up(d.d_r, kFractal);
    const GlobalTensor<T> cache = call_.template input<T>(FlashMLAIn::kv_cache);
    for (int64_t at = 0; at < block.keys;) {
      const int64_t key = block.key + at, rows = call_.cache_run(key, block.keys - at);
      load_runs(pe_[at * pitch], cache[call_.cache_row(block.sequence, key) + d.rank], rows, d.d_r, d.cache.row_stride - d.d_r);
      at += rows;
    }
    hand_over<HardEvent::MTE2_MTE3>();
    store_runs(k[d.d_n], pe_, block.keys, d.d_r, ld - d.d_r);
    hand_over<HardEvent::MTE3_MTE2>();
  }

 private:
  const Call<T> &call_;
  int64_t half_, pitch_;
  RopeScratch rope_;
  LocalTensor<float> raw_;
  LocalTensor<T> first_, second_, rounded_, pe_;
};

template <typename T>
__aicore__ inline void finish_keys(const Call<T> &call, int64_t heads) {
  KeyFinish<T> finish(call);
  const int64_t parts = 2 * call.d.cores, own = AscendC::GetBlockIdx();
  int64_t index = 0;
  for_key_blocks(call, KeyFinish<T>::kRows, [&](const KeyBlock &block) {
    for (int64_t h = 0; h < heads; ++h)
      if (index++ % parts == own) finish.run(block, h);
  });
}

}  // namespace flashmla
