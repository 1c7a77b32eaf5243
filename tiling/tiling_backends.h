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

// Passes over the keys of a sequence; where a head's K is decompressed, each of its passes decompresses it.
int64_t key_passes(const Problem& problem, const TilingData& tiling, int32_t path, int64_t s_q);

// Flops of a path with these blocks: rows that only fill up a vector count, and so does what is decompressed again.
double path_cost(const Problem& problem, const TilingData& tiling, int32_t path, int64_t s_q, int64_t s_kv);

// The path that leaves V in the latent, where the machine has it for this problem; kExpanded otherwise.
int32_t latent_path(const Problem& problem, const TilingData& tiling);

// Every buffer of the blocks in `tiling`, all stages.
std::vector<Buffer> cpu_buffers(const Problem& problem, const Machine& machine, const TilingData& tiling);
std::vector<Buffer> ascend_buffers(const Problem& problem, const Machine& machine, const TilingData& tiling);

// Fills blocks, reasons and bytes_read of a report whose tiling, seq, buffers and stages stand.
void explain_cpu(const Problem& problem, const Machine& machine, TilingReport* report);
void explain_ascend(const Problem& problem, const Machine& machine, TilingReport* report);

}  // namespace flashmla
