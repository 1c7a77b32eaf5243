// The merge of what the KV splits of a sequence found.
#pragma once

#include "op_impl/cpu/paged_attention-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

// out = sum_s w_s O_s / sum_s w_s l_s with w_s = exp(m_s - max m): the splits of one row become its output. Returns the
// natural-log sum of exponentials; a row without keys gives 0 and +inf.
static float combine(const AttentionRequest &r, int64_t row, float *out /* [ldo] */, int64_t ldo) {
  float top = kMinusInf;
  for (int64_t s = 0; s < r.seq.num_splits; ++s)
    if (r.l[s * r.rows + row] > 0.0f || r.l[s * r.rows + row] != r.l[s * r.rows + row])
      top = r.m[s * r.rows + row] > top ? r.m[s * r.rows + row] : top;
  float sum = 0.0f;
  bool any = false;
  for (int64_t s = 0; s < r.seq.num_splits; ++s) {
    const float l = r.l[s * r.rows + row];
    if (l == 0.0f) continue;
    const float weight = __builtin_expf(r.m[s * r.rows + row] - top);
    const float *o = r.o + (s * r.rows + row) * ldo;  // [ldo]
    const VF w = set1(weight);
    for (int64_t i = 0; i < ldo; i += kLanes) store(out + i, any ? fma(w, load(o + i), load(out + i)) : mul(w, load(o + i)));
    sum += weight * l;
    any = true;
  }
  if (!any) {
    zero_row(out, ldo);
    return __builtin_inff();
  }
  const VF inverse = set1(1.0f / sum);
  for (int64_t i = 0; i < ldo; i += kLanes) store(out + i, mul(load(out + i), inverse));
  return top + __builtin_logf(sum);
}

}  // namespace FLASHMLA_NS
}  // namespace flashmla
