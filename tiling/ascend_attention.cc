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

// Passes over the scores row by row: maximum, scale and shift, sum, cast to P; exp apart.
constexpr double kRowPasses = 4;
constexpr double kSoftmaxInstructions = 12;  // on one value a row
constexpr int64_t kVectorFloats = 64;  // of a vector instruction's repeat
// Floats a row: maxima, sums and scales of two passes, factors spread to a data block a row.
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
  if (!b.p_in_rope) add({"p", b.p_buffers, b.rows, b.kv_tile, kHalf, kL1});

  add({"q or p step", 2, b.rows, std::max(b.qk_k_block, b.pv_k_block), kHalf, kL0A});
  const bool qk_larger = int64_t{b.kv_tile} * b.qk_k_block > int64_t{b.pv_k_block} * b.pv_n_block;
  add({"k or v step", 2, qk_larger ? b.kv_tile : b.pv_k_block, qk_larger ? b.qk_k_block : b.pv_n_block, kHalf, kL0B});

  add({"scores", b.score_buffers, b.rows, b.kv_tile, kSingle, kL0C});
  add({"p v", b.l0c_out_buffers, b.rows, b.pv_columns, kSingle, kL0C});

  add({"scores", b.score_buffers, half_rows, b.kv_tile, kSingle, kUB});
  add({"p", b.p_buffers, half_rows, b.kv_tile, kHalf, kUB});
  add({"output", 1, half_rows, s.d_v, kSingle, kUB});
  add({"p v", b.ub_out_buffers, half_rows, std::max<int64_t>(b.ub_columns, 2 * kFractal), kSingle, kUB});
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
  // A pipe waits for its input and tells that it has read it.
  const double events = 2 * m.event_cycles;

  // While one core's copy starts up the others have its share of the memory, but for the first copy of a tile, which waits for its buffer; by the
  // twin's clock 0.3 of the start-ups of the others show.
  const double gm = kHalf * keys * tile_columns / load.gm_bytes_per_cycle + (1.5 + 0.3 * load.copies_a_tile) * m.startup_dma_gm;

  const double blocks = ceil_div(s.d_v, b.pv_columns), pieces = ceil_div(s.d_v, b.ub_columns), n_steps = blocks * ceil_div(b.pv_columns, b.pv_n_block);
  const double steps = ceil_div(s.d_qk, b.qk_k_block) + ceil_div(b.kv_tile, b.pv_k_block) * n_steps;
  const double l0_bytes = kHalf * (rows * s.d_qk + keys * s.d_qk + rows * keys * n_steps + keys * s.d_v);
  const double l0 = l0_bytes / m.l1_l0_bytes_per_cycle + steps * (2 * m.startup_dma_onchip + events) + 2 * events;

  const double macs = rows * keys * (s.d_qk + s.d_v);
  const double cube = macs / m.macs_per_cycle_b16 + steps * (m.startup_cube + events) + (1 + blocks) * events;

  const double fix_bytes = kSingle * rows * (keys + s.d_v);
  const double fix = fix_bytes / m.l0c_out_bytes_per_cycle + (1 + pieces) * (m.startup_fixpipe + events) + (1 + blocks) * events;

  // Rows are reduced, shifted and rounded by instructions of 64 columns that take a cycle a row.
  const double slices = ceil_div(b.kv_tile, kVectorFloats), o_slices = pieces * ceil_div(b.ub_columns, kVectorFloats);
  const double row_work = m.startup_vector + half_rows;
  const double exponents = m.startup_vector + kSingle * half_rows * keys * m.vector_slow_divisor / m.vector_bytes_per_cycle;
  const double softmax = kRowPasses * slices * row_work + exponents + kSoftmaxInstructions * m.startup_vector + 3 * events;
  const double vector = softmax + o_slices * row_work + pieces * events;

  // Some columns of P V go from the cube to the vector units and their buffer comes back; further buffers hide that way.
  const double way = m.startup_fixpipe + kSingle * rows * b.ub_columns / m.l0c_out_bytes_per_cycle + 2 * (m.cross_core_flag_cycles + events) +
                     ceil_div(b.ub_columns, kVectorFloats) * row_work;
  const double hand_overs = pieces * way / b.ub_out_buffers;
  // From S to P and back to the cube; scores that are two tiles ahead hide it.
  const bool two_ahead = b.kv_buffers > 3 && b.score_buffers > 1;
  const double chain = (softmax + 0.5 * o_slices * row_work + fix - pieces * (m.startup_fixpipe + events) - kSingle * rows * s.d_v / m.l0c_out_bytes_per_cycle +
                        3 * m.cross_core_flag_cycles + m.startup_dma_onchip + kHalf * half_rows * keys / m.l1_ub_bytes_per_cycle) /
                       (two_ahead ? 2 : 1);

  // P V of a tile comes after QK of the next one: two buffers are both taken then, and the copy of a third tile waits for both products.
  const double copies = b.kv_buffers < 3 ? gm + std::max(cube, l0) : gm;
  // Copies of P V that hold little of it tie the cube to the vector units; by the twin's clock 0.4 of their work for a tile's width too few.
  const double room = double(b.l0c_out_buffers) * b.pv_columns + double(b.ub_out_buffers) * b.ub_columns;
  const double tied = 0.4 * vector * std::max(0.0, 1.25 - room / s.d_v);
  const double core = tied + std::max({hand_overs, chain, l0, cube, fix, vector});
  // Of equal ones the one with less work: a pipe that is nearly full stumbles over its neighbours.
  return std::max(copies, core) + 0.05 * core;
}

}  // namespace flashmla
