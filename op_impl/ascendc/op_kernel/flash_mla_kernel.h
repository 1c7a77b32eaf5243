// The driver: prolog -> attention (for each KV tile qk -> online softmax -> pv) -> combine -> epilog.
#pragma once

#include "attention_cube.h"
#include "attention_vec.h"
#include "combine.h"
#include "epilog.h"
#include "expanded.h"
#include "prolog.h"
#include "query.h"

namespace flashmla {

// Between stages: what one core wrote, another reads.
__aicore__ inline void next_stage() { AscendC::SyncAll<false>(); }

// Weights do not wait for other cores: before a barrier a core loads what its next product begins with.
template <typename T>
__aicore__ inline void prolog(const Call<T> &call) {
  const KernelData &d = call.d;
  write_zeros(call);
  if (d.hidden % kFractal != 0) next_stage();  // the first product needs the zeros already
  project_hidden(call);
  SplitProduct<T> query = query_product(call);
  query.prefetch();
  next_stage();
  if ASCEND_IS_AIV { norm_and_append(call); }
  next_stage();
  query.run();
}

template <typename T>
__aicore__ inline void attend(const Call<T> &call, const Schedule<T> &schedule) {
  if ASCEND_IS_AIC { attend_cube(call, schedule); }
  if ASCEND_IS_AIV { attend_vec(call, schedule); }
}

template <typename T>
__aicore__ inline void attention_absorbed(const Call<T> &call) {
  Products<T> latent = absorb_product(call);
  latent.prefetch();
  next_stage();
  latent.run();
  if (queries_leave_finished(call)) {
    if ASCEND_IS_AIV { append_rope(call); }
  } else {
    next_stage();
    if ASCEND_IS_AIV { prepare_queries(call); }
  }
  next_stage();
  const Schedule<T> schedule(call, 0, 1);
  attend(call, schedule);
  Products<T> up = up_product(call);
  up.prefetch();
  next_stage();
  if ASCEND_IS_AIV { combine(call, schedule); }
  next_stage();
  up.run();
}

template <typename T>
__aicore__ inline void attention_expanded(const Call<T> &call) {
  next_stage();
  if ASCEND_IS_AIV { rotate_queries(call); }
  for (int64_t first = 0; first < call.d.heads; first += call.d.round_heads) {
    const int64_t heads = smaller(call.d.round_heads, call.d.heads - first);
    decompress(call, first, heads);
    next_stage();
    if ASCEND_IS_AIV { finish_keys(call, heads); }
    next_stage();
    const Schedule<T> schedule(call, first, heads);
    attend(call, schedule);
    next_stage();
    if ASCEND_IS_AIV { combine(call, schedule); }
    if (first + heads < call.d.heads) next_stage();
  }
}

template <typename T>
__aicore__ inline void epilog(const Call<T> &call) {
  OutputProduct<T> output(call);
  output.prefetch();
  next_stage();
  if (call.absorbed() && call.d.d_v % kFractal != 0) {
    if ASCEND_IS_AIV { compact_outputs(call); }
    next_stage();
  }
  output.run();
}

// T is half or bfloat16_t; arguments in the order of op_list.h, null where absent. A variant holds one path alone.
template <int32_t path, typename T>
__aicore__ inline void flash_mla_kernel(const Call<T> &call) {
  AscendC::InitSocState();
  prolog(call);
  if constexpr (path == kAbsorbed) attention_absorbed(call);
  else attention_expanded(call);
  epilog(call);
}

}  // namespace flashmla
