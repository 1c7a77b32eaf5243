#include "op_impl/twin/api/vector.h"

#include "op_impl/twin/api/operand.h"

namespace AscendC {

using twin::Access;
using twin::Engine;

void twin_repeat_limits(int64_t mask, int64_t most, int64_t repeat, const Site& site) {
  if (mask < 1 || mask > most) twin::fail(Fault::kIllegal, site, "a mask of " + std::to_string(mask) + " elements, 1 to " + std::to_string(most) + " are allowed");
  if (repeat < 0 || repeat > 255) twin::fail(Fault::kIllegal, site, std::to_string(repeat) + " repeats, 0 to 255 are allowed");
}

void twin_vector_access(const TwinOperand& operand, bool write, int64_t mask, int64_t repeat, const Site& site, std::vector<Access>* list) {
  Engine& engine = Engine::current();
  require_core(engine, false, site);
  const TwinLocal& at = operand.at;
  if (at.space != twin::kUB) twin::fail(Fault::kIllegal, site, std::string("a vector operand in ") + twin::space_name(at.space));
  const uint8_t core = engine.core();
  if (repeat == 0) {
    twin::require(mask >= 1, Fault::kIllegal, site, "no elements");
    require_inside(at, mask * at.element, site);
    list->push_back({twin::kUB, core, write, {at.address, mask * at.element, 1, 0}, {}});
    return;
  }
  const int64_t a_block = 32 / at.element, blocks = (mask + a_block - 1) / a_block;
  twin::require(operand.block_stride <= 255 && operand.repeat_stride <= 255, Fault::kIllegal, site, "a stride is above 255 blocks");
  require_inside(at, ((repeat - 1) * operand.repeat_stride + (blocks - 1) * operand.block_stride) * 32 + (mask - (blocks - 1) * a_block) * at.element, site);
  const int64_t repeats = operand.repeat_stride == 0 ? 1 : repeat, step = operand.repeat_stride * 32;
  if (operand.block_stride == 1) {
    list->push_back({twin::kUB, core, write, {at.address, mask * at.element, repeats, step}, {}});
    return;
  }
  twin::require(!write || operand.block_stride > 0 || blocks == 1, Fault::kIllegal, site, "all blocks of the destination are the same");
  for (int64_t b = 0; b < (operand.block_stride == 0 ? 1 : blocks); ++b) {
    const int64_t bytes = std::min<int64_t>(32, (mask - b * a_block) * at.element);
    list->push_back({twin::kUB, core, write, {at.address + b * operand.block_stride * 32, bytes, repeats, step}, {}});
  }
}

uint8_t* twin_vector_memory(const TwinLocal& at, const Site& site) {
  Engine& engine = Engine::current();
  require_core(engine, false, site);
  uint8_t* memory = engine.memory(twin::kUB, engine.core());
  return memory == nullptr ? nullptr : memory + at.address;
}

void twin_vector_issue(const Site& site, double bytes, bool slow, std::vector<Access> accesses, std::function<void()> effect) {
  Engine& engine = Engine::current();
  engine.issue(twin::kV, site, engine.cost().vector(bytes, slow), std::move(accesses), std::move(effect));
}

void twin_reduce(const TwinLocal& dst, const TwinLocal& src, bool maximum, int64_t mask, int64_t repeat, int64_t dst_stride, int64_t src_block, int64_t src_repeat, const Site& site) {
  twin_repeat_limits(mask, 64, repeat, site);
  if (repeat == 0) return;
  const TwinOperand in = {src, src_block, src_repeat};
  std::vector<Access> accesses;
  twin_vector_access(in, false, mask, repeat, site, &accesses);
  twin::require(dst.space == twin::kUB, Fault::kIllegal, site, "the destination is not in UB");
  twin::require(dst.address % 4 == 0 && dst.address + ((repeat - 1) * dst_stride + 1) * 4 <= dst.end, Fault::kBounds, site, "beyond the end of the destination");
  accesses.push_back({twin::kUB, Engine::current().core(), true, {dst.address, 4, repeat, dst_stride * 4}, {}});
  const float* from = reinterpret_cast<const float*>(twin_vector_memory(src, site));
  float* to = reinterpret_cast<float*>(twin_vector_memory(dst, site));
  twin_vector_issue(site, 256.0 * repeat, false, std::move(accesses), [=] {
    for (int64_t r = 0; r < repeat; ++r) {
      float total = maximum ? -INFINITY : 0.0f;
      for (int64_t i = 0; i < mask; ++i) {
        const float x = from[in.offset(r, i)];
        total = maximum ? (x > total || std::isnan(x) ? x : total) : total + x;
      }
      to[r * dst_stride] = total;
    }
  });
}

void twin_brcb(const TwinLocal& dst, const TwinLocal& src, int64_t repeat, const BrcbRepeatParams& p, const Site& site) {
  twin_repeat_limits(1, 1, repeat, site);
  if (repeat == 0) return;
  const TwinOperand out = {dst, p.dstBlkStride, p.dstRepStride};
  std::vector<Access> accesses;
  twin_vector_access({src, 1, 1}, false, 8 * repeat, 0, site, &accesses);
  twin_vector_access(out, true, 256 / dst.element, repeat, site, &accesses);
  const uint8_t* from = twin_vector_memory(src, site);
  uint8_t* to = twin_vector_memory(dst, site);
  const int element = dst.element;
  const int64_t per_block = 32 / element;
  twin_vector_issue(site, 256.0 * repeat, false, std::move(accesses), [=] {
    for (int64_t r = 0; r < repeat; ++r) {
      for (int64_t j = 0; j < 8; ++j) {
        for (int64_t i = 0; i < per_block; ++i) std::memcpy(to + out.offset(r, j * per_block + i) * element, from + (8 * r + j) * element, element);
      }
    }
  });
}

}  // namespace AscendC
