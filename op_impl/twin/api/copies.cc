#include "op_impl/twin/api/copies.h"

#include <algorithm>

#include "op_impl/twin/api/operand.h"

namespace AscendC {

using twin::Access;
using twin::Engine;
using twin::Layout;
using twin::LayoutKind;
using twin::Span;

void twin_nd2nz(const TwinLocal& dst, int64_t src, const Nd2NzParams& p, const Site& site) {
  Engine& engine = Engine::current();
  if (p.ndNum == 0 || p.nValue == 0 || p.dValue == 0) return;
  require_core(engine, true, site);
  require_path(dst.space == twin::kL1, "GM", twin::space_name(dst.space), site);
  twin::require(p.ndNum <= 4095 && (p.ndNum == 1 || (p.srcNdMatrixStride <= 65535 && p.dstNzMatrixStride <= 16384)), Fault::kIllegal, site,
                "the number of matrices or their distance is out of its range");
  twin::require(p.dstNzNStride == 1, Fault::kIllegal, site, "the twin knows dstNzNStride 1 only");
  twin::require(p.nValue <= 16384 && p.dValue <= 65535 && p.srcDValue >= 1 && p.srcDValue <= 65535 && p.dstNzC0Stride >= 1 && p.dstNzC0Stride <= 16384, Fault::kIllegal, site,
                "a parameter is out of its range");
  twin::require(p.srcDValue >= p.dValue, Fault::kIllegal, site, "a source row is shorter than what is copied of it");
  const int64_t element = dst.element, c0 = 32 / element;
  const int64_t rows = p.nValue, columns = p.dValue, blocks = (columns + c0 - 1) / c0, block_stride = int64_t{p.dstNzC0Stride} * 32;
  twin::require(blocks == 1 || p.dstNzC0Stride >= rows, Fault::kLayout, site, "dstNzC0Stride is smaller than the number of rows: column blocks overlap");
  const int64_t matrices = p.ndNum, to_matrix = int64_t(p.dstNzMatrixStride) * element, from_matrix = int64_t(p.srcNdMatrixStride) * element;
  twin::require(matrices == 1 || (to_matrix >= blocks * block_stride && to_matrix % 32 == 0), Fault::kLayout, site, "the matrices overlap in L1");
  require_inside(dst, (matrices - 1) * to_matrix + (blocks - 1) * block_stride + rows * 32, site);
  // Matrices side by side are one tile of more columns.
  const bool side_by_side = matrices > 1 && to_matrix == blocks * block_stride;
  const Layout layout = {LayoutKind::kNZ, blocks > 1 || side_by_side ? static_cast<uint32_t>(block_stride) : 0};
  std::vector<Access> accesses;
  for (int64_t i = 0; i < matrices; ++i) {
    accesses.push_back({twin::kGM, 0, false, {src + i * from_matrix, columns * element, rows, int64_t(p.srcDValue) * element}, {}});
    accesses.push_back({twin::kL1, twin::kAIC, true, {dst.address + i * to_matrix, rows * 32, blocks, block_stride}, layout});
  }
  uint8_t* data = engine.memory(twin::kL1, twin::kAIC) + dst.address;
  engine.issue(twin::kMTE2, site, engine.cost().gm_copy(), std::move(accesses), [=] {
    for (int64_t i = 0; i < matrices; ++i) {
      for (int64_t n = 0; n < rows; ++n) {
        const uint8_t* row = reinterpret_cast<const uint8_t*>(src) + i * from_matrix + n * p.srcDValue * element;
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t bytes = std::min<int64_t>(32, columns * element - b * 32);
          uint8_t* out = data + i * to_matrix + b * block_stride + n * 32;
          std::memcpy(out, row + b * 32, bytes);
          std::memset(out + bytes, 0, 32 - bytes);
        }
      }
    }
  });
}

void twin_gm_to_local(const TwinLocal& dst, int64_t src, int64_t blocks, int64_t block_bytes, int64_t src_gap, int64_t dst_gap, const Site& site) {
  Engine& engine = Engine::current();
  if (blocks == 0 || block_bytes == 0) return;
  require_path(dst.space == twin::kUB || dst.space == twin::kL1, "GM", twin::space_name(dst.space), site);
  require_core(engine, dst.space == twin::kL1, site);
  twin::require(blocks <= 4095 && block_bytes < 2097152, Fault::kIllegal, site, "a parameter is out of its range");
  const int64_t room = twin_round_up(block_bytes, 32), to_stride = room + dst_gap, from_stride = block_bytes + src_gap;
  require_inside(dst, (blocks - 1) * to_stride + room, site);
  const int owner = engine.core();
  uint8_t* data = engine.memory(dst.space, owner) + dst.address;
  engine.issue(twin::kMTE2, site, engine.cost().gm_copy(),
               {{twin::kGM, 0, false, {src, block_bytes, blocks, from_stride}, {}}, {dst.space, uint8_t(owner), true, {dst.address, room, blocks, to_stride}, {}}}, [=] {
                 for (int64_t i = 0; i < blocks; ++i) {
                   std::memcpy(data + i * to_stride, reinterpret_cast<const uint8_t*>(src) + i * from_stride, block_bytes);
                   std::memset(data + i * to_stride + block_bytes, 0xFF, room - block_bytes);  // undefined on the chip: NaN here
                 }
               });
}

void twin_local_to_gm(int64_t dst, const TwinLocal& src, int64_t blocks, int64_t block_bytes, int64_t src_gap, int64_t dst_gap, const Site& site) {
  Engine& engine = Engine::current();
  if (blocks == 0 || block_bytes == 0) return;
  require_path(src.space == twin::kUB, twin::space_name(src.space), "GM", site);
  require_core(engine, false, site);
  twin::require(blocks <= 4095 && block_bytes < 2097152, Fault::kIllegal, site, "a parameter is out of its range");
  const int64_t from_stride = twin_round_up(block_bytes, 32) + src_gap, to_stride = block_bytes + dst_gap;
  require_inside(src, (blocks - 1) * from_stride + block_bytes, site);
  const int owner = engine.core();
  const uint8_t* data = engine.memory(twin::kUB, owner) + src.address;
  engine.issue(twin::kMTE3, site, engine.cost().gm_copy(),
               {{twin::kUB, uint8_t(owner), false, {src.address, block_bytes, blocks, from_stride}, {}}, {twin::kGM, 0, true, {dst, block_bytes, blocks, to_stride}, {}}}, [=] {
                 for (int64_t i = 0; i < blocks; ++i) std::memcpy(reinterpret_cast<uint8_t*>(dst) + i * to_stride, data + i * from_stride, block_bytes);
               });
}

void twin_local_to_local(const TwinLocal& dst, const TwinLocal& src, const DataCopyParams& p, const Site& site) {
  Engine& engine = Engine::current();
  if (p.blockCount == 0 || p.blockLen == 0) return;
  require_path(src.space == twin::kUB && dst.space == twin::kL1, twin::space_name(src.space), twin::space_name(dst.space), site);
  require_core(engine, false, site);
  twin::require(p.blockCount <= 4095, Fault::kIllegal, site, "blockCount is above 4095");
  const int64_t blocks = p.blockCount, bytes = p.blockLen * 32, from_stride = bytes + p.srcGap * 32, to_stride = bytes + p.dstGap * 32;
  require_inside(src, (blocks - 1) * from_stride + bytes, site);
  require_inside(dst, (blocks - 1) * to_stride + bytes, site);
  const int owner = engine.core();
  const uint8_t* from = engine.memory(twin::kUB, owner) + src.address;
  uint8_t* to = engine.memory(twin::kL1, twin::kAIC) + dst.address;
  // The blocks are column blocks of an NZ matrix when there are several: the reader's stride has to be theirs.
  const Layout layout = {LayoutKind::kNZ, blocks > 1 ? static_cast<uint32_t>(to_stride) : 0};
  engine.issue(twin::kMTE3, site, engine.cost().ub_l1(double(blocks) * bytes),
               {{twin::kUB, uint8_t(owner), false, {src.address, bytes, blocks, from_stride}, {}}, {twin::kL1, twin::kAIC, true, {dst.address, bytes, blocks, to_stride}, layout}}, [=] {
                 for (int64_t i = 0; i < blocks; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
               });
}

void twin_load(const TwinLocal& dst, const TwinLocal& src, const LoadData2DParamsV2& p, const Site& site) {
  Engine& engine = Engine::current();
  if (p.mStep == 0 || p.kStep == 0) return;
  require_core(engine, true, site);
  require_path(src.space == twin::kL1 && (dst.space == twin::kL0A || dst.space == twin::kL0B), twin::space_name(src.space), twin::space_name(dst.space), site);
  twin::require(!p.ifTranspose || dst.space == twin::kL0B, Fault::kIllegal, site, "transposing L1 -> L0A does not exist on this chip");
  twin::require(p.mStep <= 255 && p.kStep <= 255 && p.srcStride >= 0, Fault::kIllegal, site, "a parameter is out of its range");
  twin::require(dst.address % 512 == 0, Fault::kAlignment, site, "the destination is not a multiple of 512 bytes");
  const int64_t m = p.mStep, k = p.kStep, src_stride = int64_t{p.srcStride} * 512, dst_stride = int64_t{p.dstStride} * 512;
  const int64_t start = src.address + (int64_t{p.kStartPosition} * p.srcStride + p.mStartPosition) * 512;
  const int64_t inner = p.ifTranspose ? k : m, outer = p.ifTranspose ? m : k;  // of the destination
  twin::require(outer == 1 || p.dstStride >= inner, Fault::kLayout, site, "dstStride is smaller than the fractals of a column: they overlap");
  twin::require(start + (k - 1) * src_stride + m * 512 <= src.end, Fault::kBounds, site, "reads beyond the end of the source");
  require_inside(dst, (outer - 1) * dst_stride + inner * 512, site);
  const Layout from = {LayoutKind::kNZ, k > 1 ? static_cast<uint32_t>(src_stride) : 0};
  const Layout to = {dst.space == twin::kL0A ? LayoutKind::kNZ : LayoutKind::kZN, outer > 1 ? static_cast<uint32_t>(dst_stride) : 0};
  const uint16_t* in = reinterpret_cast<const uint16_t*>(engine.memory(twin::kL1, twin::kAIC) + start);
  uint16_t* out = reinterpret_cast<uint16_t*>(engine.memory(dst.space, twin::kAIC) + dst.address);
  const bool transpose = p.ifTranspose;
  engine.issue(twin::kMTE1, site, engine.cost().l1_to_l0(double(m * k * 512)),
               {{twin::kL1, twin::kAIC, false, {start, m * 512, k, src_stride}, from}, {dst.space, twin::kAIC, true, {dst.address, inner * 512, outer, dst_stride}, to}}, [=] {
                 for (int64_t i = 0; i < k; ++i) {
                   if (!transpose) {
                     std::memcpy(out + i * dst_stride / 2, in + i * src_stride / 2, m * 512);
                     continue;
                   }
                   for (int64_t j = 0; j < m; ++j) {
                     const uint16_t* fractal = in + i * src_stride / 2 + j * 256;
                     uint16_t* turned = out + j * dst_stride / 2 + i * 256;
                     for (int r = 0; r < 16; ++r) for (int c = 0; c < 16; ++c) turned[c * 16 + r] = fractal[r * 16 + c];
                   }
                 }
               });
}

}  // namespace AscendC
