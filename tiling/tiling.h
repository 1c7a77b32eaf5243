// HOW MUCH at a time: pure functions of (Problem, Machine). The kernels call make_tiling and make_seq_tiling; people
// read make_report (`python -m ms_flashmla tiling`).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tiling/machine.h"
#include "tiling/tiles.h"
#include "tiling/tiling_data.h"

namespace flashmla {

// Blocks for a layer on a machine. On a CPU they do not depend on batch, s_q or s_kv, so a sequence's bits do not
// either; on Ascend the configuration is chosen by the shape of the call.
// Throws std::invalid_argument that names the field for an illegal Problem, or a dtype that the machine does not do.
TilingData make_tiling(const Problem& problem, const Machine& machine);

// Blocks of an Ascend's attention that are asked for in place of the selected ones, to measure what a choice brings; 0: as selected.
struct WantedBlocks {
  int32_t rows = 0, kv_tile = 0;
  int32_t kv_buffers = 0;  // 1: nothing is loaded ahead
};

// The blocks of a path with these in them. Throws std::invalid_argument that says by how many bytes they do not fit.
AscendBlocks wanted_blocks(const Problem& problem, const Machine& machine, const TilingData& tiling, int32_t path, const WantedBlocks& wanted);

// Memory that a stage holds at one time. `bytes` counts all copies.
struct Buffer {
  std::string stage;   // buffers of one stage live together; stages follow each other
  std::string name;
  std::string shape;   // "[64, 576] float32"
  int64_t bytes = 0;
  std::string memory;
  int64_t capacity = 0;  // bytes of that memory
  int32_t copies = 1;    // 2: double-buffered
};

// A stage waits for the one before it; its least time is max(bytes / bandwidth, flops / peak).
struct StageBound {
  std::string name;
  double bytes = 0;  // least bytes from memory: each input once, each output once
  double flops = 0;  // causal multiply-adds, x2
  double us = 0;
  std::string limited_by;  // "memory" or "compute"
};

struct NamedValue {
  std::string name;
  int64_t value = 0;
  std::string meaning;
};

struct TilingReport {
  TilingData tiling;
  SeqTiling seq;
  std::vector<NamedValue> blocks;
  std::vector<Buffer> buffers;
  std::vector<std::string> reasons;  // why a larger block does not fit, why this path
  std::vector<StageBound> stages;
  double least_bytes = 0;
  double bytes_read = 0;  // from memory by these blocks; above least_bytes where something is read again
  double flops = 0;
  double bound_us = 0;
};

TilingReport make_report(const Problem& problem, const Machine& machine);

// Multiply-adds x2 of attention over all heads of one sequence, and of what turns latents into heads, by path. Causal:
// token i of s_q sees s_kv - s_q + i + 1 keys. Formulas: arXiv 2405.04434 (MLA), with the matrices absorbed or not.
struct AttentionFlops {
  double scores = 0;
  double values = 0;
  double by_key = 0;    // K and V decompressed once
  double by_token = 0;  // q and outputs through what is absorbed
};
AttentionFlops attention_flops(const Problem& problem, int32_t path, int64_t s_q, int64_t s_kv);

// "absorbed", "expanded" or "value-absorbed".
const char* path_name(int32_t path);

// Throws std::invalid_argument naming the field, its value and what is allowed.
void check_problem(const Problem& problem);

// "576.0 KiB"
std::string kib_text(int64_t bytes);

// How a buffer list stands against its capacities: "needs 576.0 KiB of L1 (attention), capacity 512.0 KiB" for the first
// memory that a stage overflows, "" when all fit.
std::string overflow(const std::vector<Buffer>& buffers);

}  // namespace flashmla
