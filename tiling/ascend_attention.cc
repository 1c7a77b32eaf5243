#include "tiling/ascend_attention.h"

#include <algorithm>

#include "tiling/int_math.h"

namespace flashmla {

using namespace int_math;

namespace {

constexpr int64_t kFractal = 16;
constexpr int64_t kHalf = 2;    // bytes of fp16, bf16
constexpr int64_t kSingle = 4;  // bytes of float32
constexpr int64_t kUbAlign = 32;

// Vector passes over a score: scale, row max, subtract, row sum, cast to P, mask or copy; exp apart.
constexpr double kScorePasses = 6;
// .. over an output element: one fused multiply-add.
constexpr double kOutputPasses = 1;
constexpr double kSoftmaxInstructions = 20;
constexpr int64_t kVectorFloats = 64;  // of a vector instruction's repeat
// Vectors of a row: maxima and sums of two passes, factors spread to a data block a row.
constexpr int64_t kRowState = 48;

enum Memory { kL1, kL0A, kL0B, kL0C, kUB, kMemories };
constexpr const char* kMemoryNames[kMemories] = {"L1", "L0A", "L0B", "L0C", "UB"};

int64_t capacity_of(Memory memory, const Machine& m) {
  const int64_t capacities[kMemories] = {m.l1_bytes, m.l0a_bytes, m.l0b_bytes, m.l0c_bytes, m.ub_bytes};
  return capacities[memory];
}

struct BufferSize {
  const char* name;
  int64_t copies, rows, cols, element;
  Memory memory;
  int64_t bytes() const { return copies * align_up(rows * cols * element, kUbAlign); }
};

// Calls add(BufferSize) for every buffer of a pass: the one place that knows them.
template <typename Add>
void visit_buffers(const PassShape& s, const AscendBlocks& b, const Machine& m, Add add) {
  const int64_t half_rows = ceil_div(b.rows, m.vectors_per_core);

  add({"q", s.v_is_k ? 1 : 2, b.rows, s.d_qk, kHalf, kL1});
  if (s.v_is_k) {
    add({"kv tile", b.kv_buffers, b.kv_tile, s.d_qk, kHalf, kL1});
  } else {
    add({"k tile", b.kv_buffers, b.kv_tile, s.d_qk, kHalf, kL1});
    add({"v tile", b.kv_buffers, b.kv_tile, s.d_v, kHalf, kL1});
  }
  if (!b.p_in_rope) add({"p", 2, b.rows, b.kv_tile, kHalf, kL1});

  add({"q or p step", 2, b.rows, std::max(b.qk_k_block, b.pv_k_block), kHalf, kL0A});
  const bool qk_larger = int64_t{b.kv_tile} * b.qk_k_block > int64_t{b.pv_k_block} * b.pv_n_block;
  add({"k or v step", 2, qk_larger ? b.kv_tile : b.pv_k_block, qk_larger ? b.qk_k_block : b.pv_n_block, kHalf, kL0B});

  add({"scores", 2, b.rows, b.kv_tile, kSingle, kL0C});
  add({"p v", b.l0c_out_buffers, b.rows, b.pv_columns, kSingle, kL0C});

  add({"scores", 2, half_rows, b.kv_tile, kSingle, kUB});
  add({"p", 2, half_rows, b.kv_tile, kHalf, kUB});
  add({"output", 1, half_rows, s.d_v, kSingle, kUB});
  add({"p v", b.ub_out_buffers, half_rows, std::max<int64_t>(b.pv_columns, 2 * kFractal), kSingle, kUB});
  add({"max, sum, scale", 1, kRowState, align_up(half_rows, 8), kSingle, kUB});
}

}  // namespace

void fill_l0_steps(const PassShape& shape, const Machine& m, AscendBlocks* b) {
  const int64_t half_a = m.l0a_bytes / 2 / kHalf, half_b = m.l0b_bytes / 2 / kHalf;  // elements of a buffer
  auto step = [](int64_t room, int64_t other, int64_t most) { return clamp(align_down(room / other, kFractal), kFractal, most); };
  b->qk_k_block = static_cast<int32_t>(std::min(step(half_a, b->rows, shape.d_qk), step(half_b, b->kv_tile, shape.d_qk)));
  b->pv_k_block = static_cast<int32_t>(step(half_a, b->rows, b->kv_tile));
  b->pv_n_block = static_cast<int32_t>(step(half_b, b->pv_k_block, b->pv_columns));
}

std::vector<Buffer> pass_buffers(const PassShape& shape, const AscendBlocks& b, const Machine& machine) {
  std::vector<Buffer> list;
  visit_buffers(shape, b, machine, [&](const BufferSize& size) {
    if (size.bytes() == 0) return;
    Buffer b;
    b.stage = shape.stage;
    b.name = size.name;
    b.shape = "[" + std::to_string(size.rows) + ", " + std::to_string(size.cols) + (size.element == kSingle ? "] float32" : "] 16-bit");
    b.bytes = size.bytes();
    b.memory = kMemoryNames[size.memory];
    b.capacity = capacity_of(size.memory, machine);
    b.copies = static_cast<int32_t>(size.copies);
    list.push_back(b);
  });
  return list;
}

bool pass_fits(const PassShape& shape, const AscendBlocks& b, const Machine& machine) {
  int64_t used[kMemories] = {};
  visit_buffers(shape, b, machine, [&](const BufferSize& size) { used[size.memory] += size.bytes(); });
  for (int memory = 0; memory < kMemories; ++memory) {
    if (used[memory] > capacity_of(static_cast<Memory>(memory), machine)) return false;
  }
  return true;
}

double tile_cycles(const PassShape& s, const AscendBlocks& b, const PassLoad& load, const Machine& m) {
  const double rows = b.rows, keys = b.kv_tile, half_rows = rows / m.vectors_per_core;
  const double tile_columns = s.v_is_k ? s.d_qk : s.d_qk + s.d_v;

  const double gm = kHalf * keys * tile_columns / load.gm_bytes_per_cycle + load.copies_a_tile * m.startup_dma_gm;

  const double qk_steps = ceil_div(s.d_qk, b.qk_k_block);
  const double pv_steps = ceil_div(b.kv_tile, b.pv_k_block) * ceil_div(s.d_v, b.pv_n_block);
  const double l0_bytes = kHalf * (rows * s.d_qk + keys * s.d_qk + rows * keys * ceil_div(s.d_v, b.pv_n_block) + keys * s.d_v);
  const double l0 = l0_bytes / m.l1_l0_bytes_per_cycle + 2 * (qk_steps + pv_steps) * m.startup_dma_onchip;

  const double macs = rows * keys * (s.d_qk + s.d_v);
  const double cube = macs / m.macs_per_cycle_b16 + (qk_steps + pv_steps) * m.startup_cube;

  const double column_steps = ceil_div(s.d_v, b.pv_columns);
  const double fix_bytes = kSingle * rows * (keys + s.d_v);
  const double fix = fix_bytes / m.l0c_out_bytes_per_cycle + (1 + column_steps) * m.startup_fixpipe;

  const double vector_bytes = kSingle * (half_rows * keys * (kScorePasses + m.vector_slow_divisor) + half_rows * s.d_v * kOutputPasses);
  const double column_instructions = ceil_div(b.pv_columns, kVectorFloats);
  const double vector = vector_bytes / m.vector_bytes_per_cycle + (kSoftmaxInstructions + column_steps * column_instructions) * m.startup_vector;
  // Some columns of P V go from the cube to the vector units and their buffer comes back; a second buffer hides half of that way.
  const double way = m.startup_fixpipe + kSingle * rows * b.pv_columns / m.l0c_out_bytes_per_cycle + 2 * m.cross_core_flag_cycles +
                     column_instructions * (m.startup_vector + half_rows);
  const double hand_overs = column_steps * way / b.ub_out_buffers;

  // P V of a tile comes after QK of the next one: two buffers are both taken then, and the copy of a third tile waits for both products.
  const double busiest = std::max({hand_overs, b.kv_buffers < 3 ? gm + std::max(cube, l0) : gm, l0, cube, fix, vector});
  // Every pipe waits for its input and its free buffer, and tells of both.
  return busiest + 4 * m.event_cycles;
}

}  // namespace flashmla
