// prolog: project, norm, rope, append to cache.
#pragma once

#include "split.h"

namespace flashmla {

// The zeros that fill up fractals.
template <typename T>
__aicore__ inline void write_zeros(const Call<T> &call) {
  if ASCEND_IS_AIC { return; }
  if (AscendC::GetBlockIdx() != 0) return;
  LocalTensor<T> zeros(TPosition::VECCALC, 0, kFractal * kZeroColumns);
  AscendC::Duplicate(zeros, T(0), kFractal * kZeroColumns);
  hand_over<HardEvent::V_MTE3>();
  store_runs(call.template buffer<T>(call.d.workspace.zeros), zeros, 1, kFractal * kZeroColumns, 0);
}

// q [T, heads, ld_q] = in W_q. Heads of whole panels lie one after the other, as one wide product.
template <typename T>
__aicore__ inline GemmJob<T> query_job(const Call<T> &call, int64_t k) {
  const KernelData &d = call.d;
  const bool whole_panels = (d.d_n + d.d_r) % kPanel == 0;
  GemmJob<T> job{};
  job.parts = 1;
  job.m = d.num_tokens;
  job.w = call.template input<T>(FlashMLAIn::w_q);
  job.groups = whole_panels ? 1 : d.heads;
  job.n = whole_panels ? d.heads * call.ld_q() : d.d_n + d.d_r;
  job.k = k;
  job.ldc = d.heads * call.ld_q();
  job.c_stride = call.ld_q();
  job.rounded = true;
  return job;
}

// [c | k_pe] = x W_kva, beside it the first product on the way to a low-rank q.
template <typename T>
__aicore__ inline void project_hidden(const Call<T> &call) {
  const KernelData &d = call.d;
  const GlobalTensor<T> x = call.template input<T>(FlashMLAIn::hidden_states);
  const GemmJob<T> jobs[2] = {
      {{x, x}, 1, d.hidden, 0, d.num_tokens, call.template input<T>(FlashMLAIn::w_kv_a), 1, d.rank + d.d_r, d.hidden,
       call.workspace + d.workspace.kv_raw, call.ld_kv(), 0, false},
      {{x, x}, 1, d.hidden, 0, d.num_tokens, call.template input<T>(FlashMLAIn::w_q_a), 1, d.q_rank, d.hidden,
       call.workspace + d.workspace.q_a_raw, call.ld_q_a(), 0, false}};
  Products<T>(call, jobs, d.q_rank > 0 ? 2 : 1, d.products.hidden, false).run();
}

template <typename T>
__aicore__ inline SplitProduct<T> query_product(const Call<T> &call) {
  const KernelData &d = call.d;
  GemmJob<T> job = query_job(call, d.q_rank > 0 ? d.q_rank : d.hidden);
  if (d.q_rank > 0) {
    call.set_parts(job.a, d.workspace.q_a);
    job.parts = d.parts;
    job.lda = call.ld_q_a();
  } else {
    job.a[0] = call.template input<T>(FlashMLAIn::hidden_states);
    job.lda = d.hidden;
  }
  return SplitProduct<T>(call, job, d.workspace.q, d.products.query);
}

// A small vector of the weights as float32; `staging` is as long.
template <typename T>
__aicore__ inline void load_vector(const LocalTensor<float> &dst, const LocalTensor<T> &staging, const GlobalTensor<T> &source, int64_t n) {
  load_runs(staging, source, 1, n, 0);
  hand_over<HardEvent::MTE2_V>();
  widen(dst, staging, n);
  hand_over<HardEvent::V_MTE2>();
}

// Rows that are normed together: strides of a vector instruction end at 255 blocks.
__aicore__ inline int64_t norm_rows(int64_t ld) { return ld > 2040 ? 1 : clamp(16384 / ld, 1, 16); }

struct NormBuffers {
  LocalTensor<float> x, weight, bias;
  NormScratch scratch;
  template <typename T>
  __aicore__ inline LocalTensor<T> take(Region &ub, int64_t rows, int64_t ld) {  // returns [rows, ld] of T
    x = ub.take<float>(rows * ld);
    weight = ub.take<float>(ld);
    bias = ub.take<float>(ld);
    scratch.squares = ub.take<float>(rows * ld);
    scratch.sums = ub.take<float>(kFractal);
    scratch.part = ub.take<float>(kFractal);
    scratch.blocks = ub.take<float>(kFractal * kFloatsOfBlock);
    return ub.take<T>(rows * ld);
  }
};

// q_a = norm(x W_qa + bias) * q_lora_scale.
template <typename T>
__aicore__ inline void norm_query(const Call<T> &call, const Share &share) {
  const KernelData &d = call.d;
  if (share.begin == share.end) return;
  const int64_t ld = call.ld_q_a(), batch = norm_rows(ld);
  Region ub(TPosition::VECCALC);
  NormBuffers b;
  const LocalTensor<T> rounded = b.template take<T>(ub, batch, ld);
  load_vector(b.weight, rounded, call.template input<T>(FlashMLAIn::q_norm), d.q_rank);
  if (d.has_b_q_a) load_vector(b.bias, rounded, call.template input<T>(FlashMLAIn::b_q_a), d.q_rank);
  const GlobalTensor<float> raw = call.template buffer<float>(d.workspace.q_a_raw);
  GlobalTensor<T> result[2];
  call.set_parts(result, d.workspace.q_a);
  for (int64_t t = share.begin; t < share.end; t += batch) {
    const int64_t rows = smaller(batch, share.end - t);
    load_runs(b.x, raw[t * ld], 1, rows * ld, 0);
    hand_over<HardEvent::MTE2_V>();
    if (d.has_b_q_a) {
      add_row(b.x, b.bias, rows, d.q_rank, ld);
      v_barrier();
    }
    rms_norm_rows(b.x, b.weight, rows, d.q_rank, ld, d.q_norm_eps, d.q_lora_scale, b.scratch);
    for (int32_t part = 0; part < d.parts; ++part) {
      narrow(rounded, b.x, rows * ld);
      hand_over<HardEvent::V_MTE3>();
      store_runs(result[part][t * ld], rounded, 1, rows * ld, 0);
      if (part + 1 < d.parts) take_away(b.x, rounded, b.scratch.squares, rows * ld);
      hand_over<HardEvent::MTE3_V>();
    }
    hand_over<HardEvent::V_MTE2>();
  }
}

// The cache rows of the new tokens: [norm(c) * scale | rope(k_pe)].
template <typename T>
__aicore__ inline void append(const Call<T> &call, const Share &share) {
  const KernelData &d = call.d;
  if (share.begin == share.end) return;
  const int64_t ld = call.ld_kv(), batch = norm_rows(ld), half = d.d_r / 2, pitch = rope_pitch(half);
  const int64_t gap_blocks = (pitch - align_up(half, kFloatsOfBlock)) / kFloatsOfBlock;
  Region ub(TPosition::VECCALC);
  NormBuffers b;
  const LocalTensor<T> rounded = b.template take<T>(ub, batch, ld);
  RopeScratch rope;
  rope.take(ub, batch, batch, larger(pitch, kFractal));
  const LocalTensor<float> bias_first = ub.take<float>(larger(pitch, kFractal)), bias_second = ub.take<float>(larger(pitch, kFractal));
  const LocalTensor<T> first = ub.take<T>(batch * larger(pitch, kFractal)), second = ub.take<T>(batch * larger(pitch, kFractal));

  load_vector(b.weight, rounded, call.template input<T>(FlashMLAIn::kv_norm), d.rank);
  if (d.has_b_kv_a) {
    const GlobalTensor<T> bias = call.template input<T>(FlashMLAIn::b_kv_a);
    load_vector(b.bias, rounded, bias, d.rank);
    if (half > 0) load_vector(bias_first, rounded, bias[d.rank], half);
    if (half > 0) load_vector(bias_second, rounded, bias[d.rank + half], half);
  }
  const GlobalTensor<float> raw = call.template buffer<float>(d.workspace.kv_raw);
  const GlobalTensor<T> cache = call.template input<T>(FlashMLAIn::kv_cache);
  TokenCursor<T> cursor(call);
  for (int64_t t = share.begin; t < share.end; t += batch) {
    const int64_t rows = smaller(batch, share.end - t);
    load_runs(b.x, raw[t * ld], 1, rows * ld, 0);
    if (half > 0) {
      load_runs(rope.first, raw[t * ld + d.rank], rows, half, ld - half, gap_blocks);
      load_runs(rope.second, raw[t * ld + d.rank + half], rows, half, ld - half, gap_blocks);
      TokenCursor<T> table = cursor;
      for (int64_t i = 0, run; i < rows; i += run) {
        table.seek(t + i);
        run = smaller(rows - i, table.left());
        load_rope_rows(call, rope, table.position(), run, i);
      }
    }
    hand_over<HardEvent::MTE2_V>();
    if (d.has_b_kv_a) {
      add_row(b.x, b.bias, rows, d.rank, ld);
      if (half > 0) add_row(rope.first, bias_first, rows, half, pitch);
      if (half > 0) add_row(rope.second, bias_second, rows, half, pitch);
      v_barrier();
    }
    rms_norm_rows(b.x, b.weight, rows, d.rank, ld, d.kv_norm_eps, d.kv_lora_scale, b.scratch);
    narrow(rounded, b.x, rows * ld);
    if (half > 0) {
      rotate_rows(rope, rows, pitch, false);
      narrow(first, rope.first, rows * pitch);
      narrow(second, rope.second, rows * pitch);
    }
    hand_over<HardEvent::V_MTE3>();
    for (int64_t i = 0, run; i < rows; i += run) {  // tokens of one page leave together
      cursor.seek(t + i);
      run = call.cache_run(cursor.position(), smaller(rows - i, cursor.left()));
      const GlobalTensor<T> row = cache[call.cache_row(cursor.sequence(), cursor.position())];
      const int64_t row_stride = d.cache.row_stride;
      store_runs(row, rounded[i * ld], run, d.rank, row_stride - d.rank, (ld - align_up(d.rank, kFractal)) / kFractal);
      if (half > 0) store_runs(row[d.rank], first[i * pitch], run, half, row_stride - half, (pitch - align_up(half, kFractal)) / kFractal);
      if (half > 0) store_runs(row[d.rank + half], second[i * pitch], run, half, row_stride - half, (pitch - align_up(half, kFractal)) / kFractal);
    }
    hand_over<HardEvent::MTE3_V>();
    hand_over<HardEvent::V_MTE2>();
  }
}

// Both norms. Of few tokens each AIV of a core takes one, for what they wait for is the way to memory; of many, all tokens are shared twice.
template <typename T>
__aicore__ inline void norm_and_append(const Call<T> &call) {
  const KernelData &d = call.d;
  if (d.q_rank > 0 && d.num_tokens <= 2 * d.cores) {
    const Share share = Share::of_core(d.num_tokens, d.cores);
    if (AscendC::GetSubBlockIdx() == 0) append(call, share);
    else norm_query(call, share);
    return;
  }
  const Share share(d.num_tokens, d.cores);
  append(call, share);
  if (d.q_rank == 0) return;
  AscendC::PipeBarrier<PIPE_ALL>();
  norm_query(call, share);
}

}  // namespace flashmla
