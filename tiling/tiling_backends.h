// What each kind of machine decides; make_tiling and make_report pick by Machine::kind.
#pragma once

#include <vector>

#include "tiling/machine.h"
#include "tiling/tiling.h"

namespace flashmla {

TilingData make_cpu_tiling(const Problem& problem, const Machine& machine);
TilingData make_ascend_tiling(const Problem& problem, const Machine& machine);

// KV splits of s_kv keys when `work_items` are left for them: at least split_min keys each.
int64_t kv_splits(const TilingData& tiling, int64_t s_kv, int64_t work_items);

// Every buffer of the blocks in `tiling`, all stages.
std::vector<Buffer> cpu_buffers(const Problem& problem, const Machine& machine, const TilingData& tiling);
std::vector<Buffer> ascend_buffers(const Problem& problem, const Machine& machine, const TilingData& tiling);

// Fills blocks, reasons and bytes_read of a report whose tiling, seq, buffers and stages stand.
void explain_cpu(const Problem& problem, const Machine& machine, TilingReport* report);
void explain_ascend(const Problem& problem, const Machine& machine, TilingReport* report);

}  // namespace flashmla
