#include "op_impl/twin/api/cube.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "op_impl/twin/api/operand.h"

#if defined(__x86_64__)
#define TWIN_FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TWIN_FAST
#endif

namespace AscendC {
namespace {

using twin::Engine;
using twin::Layout;
using twin::LayoutKind;

template <typename T>
float widen(uint16_t bits) {
  T x;
  x.bits = bits;
  return x;
}

// c [rows, 16] += a [rows, k] b [k, 16], one column block of the result; rows of c lie 16 apart.
TWIN_FAST void multiply(const float* a, const float* b, float* c, int rows, int k) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) {
    float sums[4][16];
    for (int r = 0; r < 4; ++r) for (int j = 0; j < 16; ++j) sums[r][j] = c[(row + r) * 16 + j];
    for (int i = 0; i < k; ++i) {
      for (int r = 0; r < 4; ++r) {
        const float x = a[(row + r) * k + i];
        for (int j = 0; j < 16; ++j) sums[r][j] += x * b[i * 16 + j];
      }
    }
    for (int r = 0; r < 4; ++r) for (int j = 0; j < 16; ++j) c[(row + r) * 16 + j] = sums[r][j];
  }
  for (; row < rows; ++row) {
    float sums[16];
    for (int j = 0; j < 16; ++j) sums[j] = c[row * 16 + j];
    for (int i = 0; i < k; ++i) {
      const float x = a[row * k + i];
      for (int j = 0; j < 16; ++j) sums[j] += x * b[i * 16 + j];
    }
    for (int j = 0; j < 16; ++j) c[row * 16 + j] = sums[j];
  }
}

template <typename T>
void product(const uint16_t* a, const uint16_t* b, float* c, int m, int n, int k, bool init) {
  const int m16 = static_cast<int>(twin_round_up(m, 16)), n16 = static_cast<int>(twin_round_up(n, 16));
  static std::vector<float> rows, columns;  // one operation at a time
  rows.resize(static_cast<size_t>(m) * k);
  columns.resize(static_cast<size_t>(k) * 16);
  for (int r = 0; r < m; ++r) {
    for (int i = 0; i < k; ++i) rows[static_cast<size_t>(r) * k + i] = widen<T>(a[(static_cast<size_t>(i / 16) * m16 + r) * 16 + i % 16]);
  }
  for (int block = 0; block < n16 / 16; ++block) {
    for (int i = 0; i < k; ++i) {
      const uint16_t* fractal = b + (static_cast<size_t>(i / 16) * n16 + block * 16) * 16 + i % 16;
      for (int j = 0; j < 16; ++j) columns[i * 16 + j] = widen<T>(fractal[j * 16]);
    }
    float* out = c + static_cast<size_t>(block) * m16 * 16;
    if (init) {
      std::fill(out, out + m * 16, 0.0f);
      std::fill(out + m * 16, out + m16 * 16, NAN);  // undefined on the chip
    }
    multiply(rows.data(), columns.data(), out, m, k);
  }
}

template <typename T>
void narrow(float x, uint8_t* out) {
  const T y(x);
  std::memcpy(out, &y, sizeof(T));
}

// What the fixpipe writes of one value; casts saturate.
void put(float x, QuantMode_t mode, uint8_t* out) {
  if (mode == F322F16) return narrow<half>(std::min(std::max(x, -65504.0f), 65504.0f) + (std::isnan(x) ? x : 0.0f), out);
  if (mode == F322BF16) {
    constexpr float kMost = 3.3895313892515355e38f;
    return narrow<bfloat16_t>(std::isnan(x) ? x : std::min(std::max(x, -kMost), kMost), out);
  }
  std::memcpy(out, &x, 4);
}

void check_fixpipe(const TwinLocal& src, bool half_dst, bool bfloat16_dst, int element, const FixpipeParamsArch3510<>& p, const Site& site) {
  require_core(Engine::current(), true, site);
  require_path(src.space == twin::kL0C, twin::space_name(src.space), "fixpipe", site);
  twin::require(src.is_float, Fault::kIllegal, site, "the source is not float32");
  const QuantMode_t wanted = half_dst ? F322F16 : bfloat16_dst ? F322BF16 : NoQuant;
  twin::require(p.quantPre == wanted && (half_dst || bfloat16_dst || element == 4), Fault::kIllegal, site, "quantPre does not belong to the destination's type");
  twin::require(p.nSize <= 4095 && p.nSize % 16 == 0, Fault::kIllegal, site, "nSize is not a multiple of 16, or above 4095");
  twin::require(p.params.ndNum == 1, Fault::kIllegal, site, "the twin knows ndNum 1 only");
  twin::require(!p.reluEn && p.unitFlag == 0 && !p.isChannelSplit, Fault::kIllegal, site, "the twin knows neither relu nor unit flags nor channel split");
  twin::require(p.dstStride >= p.nSize, Fault::kLayout, site, "rows of the destination overlap");
  twin::require(p.srcStride >= twin_round_up(p.mSize, 16) || p.nSize <= 16, Fault::kLayout, site, "srcStride is smaller than the rows");
  require_inside(src, (int64_t{p.nSize} / 16 - 1) * p.srcStride * 64 + int64_t{p.mSize} * 64, site, 64);
}

twin::Access fixpipe_source(const TwinLocal& src, const FixpipeParamsArch3510<>& p) {
  const int64_t stride = int64_t{p.srcStride} * 64;
  return {twin::kL0C, twin::kAIC, false, {src.address, int64_t{p.mSize} * 64, p.nSize / 16, stride}, {LayoutKind::kNZ, p.nSize > 16 ? static_cast<uint32_t>(stride) : 0}};
}

// Rows [first, first + rows) of the source to `out`.
void fixpipe_rows(const float* in, uint8_t* out, int element, int first, int rows, const FixpipeParamsArch3510<>& p) {
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < p.nSize; ++n) {
      put(in[(int64_t{n} / 16 * p.srcStride + first + r) * 16 + n % 16], p.quantPre, out + (int64_t{r} * p.dstStride + n) * element);
    }
  }
}

}  // namespace

void twin_mmad(const TwinLocal& dst, const TwinLocal& a, const TwinLocal& b, const MmadParams& p, const Site& site) {
  Engine& engine = Engine::current();
  if (p.m == 0 || p.n == 0 || p.k == 0) return;
  require_core(engine, true, site);
  twin::require(dst.space == twin::kL0C && a.space == twin::kL0A && b.space == twin::kL0B, Fault::kIllegal, site, "the operands are not L0C, L0A, L0B");
  twin::require(dst.is_float && ((a.is_half && b.is_half) || (a.is_bfloat16 && b.is_bfloat16)), Fault::kIllegal, site, "the cube has no product of these types that the twin knows");
  twin::require(p.m <= 4095 && p.n <= 4095 && p.k <= 4095, Fault::kIllegal, site, "a dimension is above 4095");
  twin::require(!p.cmatrixSource && !p.isBias && p.unitFlag == 0, Fault::kIllegal, site, "the twin knows neither a bias nor unit flags");
  twin::require(p.m > 1 || p.disableGemv, Fault::kLayout, site, "m = 1 reads L0A as a vector unless disableGemv is set");
  const int64_t m16 = twin_round_up(p.m, 16), n16 = twin_round_up(p.n, 16), k16 = twin_round_up(p.k, 16);
  require_inside(a, m16 * k16 * 2, site, 512);
  require_inside(b, n16 * k16 * 2, site, 512);
  require_inside(dst, m16 * n16 * 4, site, 1024);
  auto access = [&](const TwinLocal& t, bool write, int64_t bytes, LayoutKind kind, int64_t stride, bool one) -> twin::Access {
    return {t.space, twin::kAIC, write, {t.address, bytes, 1, 0}, {kind, one ? 0 : static_cast<uint32_t>(stride)}};
  };
  std::vector<twin::Access> accesses = {access(a, false, m16 * k16 * 2, LayoutKind::kNZ, m16 * 32, k16 == 16), access(b, false, n16 * k16 * 2, LayoutKind::kZN, n16 * 32, k16 == 16)};
  if (!p.cmatrixInitVal) accesses.push_back(access(dst, false, m16 * n16 * 4, LayoutKind::kNZ, m16 * 64, n16 == 16));
  accesses.push_back(access(dst, true, m16 * n16 * 4, LayoutKind::kNZ, m16 * 64, n16 == 16));
  const uint16_t* in_a = reinterpret_cast<const uint16_t*>(engine.memory(twin::kL0A, twin::kAIC) + a.address);
  const uint16_t* in_b = reinterpret_cast<const uint16_t*>(engine.memory(twin::kL0B, twin::kAIC) + b.address);
  float* out = reinterpret_cast<float*>(engine.memory(twin::kL0C, twin::kAIC) + dst.address);
  const bool is_half = a.is_half;
  const int m = p.m, n = p.n, k = p.k;
  const bool init = p.cmatrixInitVal;
  engine.issue(twin::kM, site, engine.cost().mmad(double(m16), double(n16), double(k16), 2), std::move(accesses),
               [=] { is_half ? product<half>(in_a, in_b, out, m, n, k, init) : product<bfloat16_t>(in_a, in_b, out, m, n, k, init); }, m16 * n16 * k16);
}

void twin_fixpipe_gm(int64_t dst, int element, bool half_dst, bool bfloat16_dst, const TwinLocal& src, const FixpipeParamsArch3510<>& p, const Site& site) {
  if (p.mSize == 0 || p.nSize == 0) return;
  Engine& engine = Engine::current();
  check_fixpipe(src, half_dst, bfloat16_dst, element, p, site);
  twin::require(p.dualDstCtl == 0, Fault::kIllegal, site, "two destinations exist in UB only");
  const float* in = reinterpret_cast<const float*>(engine.memory(twin::kL0C, twin::kAIC) + src.address);
  const FixpipeParamsArch3510<> params = p;
  engine.issue(twin::kFIX, site, engine.cost().fixpipe_to_gm(4.0 * p.mSize * p.nSize),
               {fixpipe_source(src, p), {twin::kGM, 0, true, {dst, int64_t{p.nSize} * element, p.mSize, int64_t{p.dstStride} * element}, {}}},
               [=] { fixpipe_rows(in, reinterpret_cast<uint8_t*>(dst), element, 0, params.mSize, params); });
}

void twin_fixpipe_ub(const TwinLocal& dst, const TwinLocal& src, const FixpipeParamsArch3510<>& p, const Site& site) {
  if (p.mSize == 0 || p.nSize == 0) return;
  Engine& engine = Engine::current();
  check_fixpipe(src, dst.is_half, dst.is_bfloat16, dst.element, p, site);
  require_path(dst.space == twin::kUB, "L0C", twin::space_name(dst.space), site);
  twin::require(p.dualDstCtl <= 1, Fault::kIllegal, site, "the twin knows the split over M only");
  const bool dual = p.dualDstCtl == 1;
  twin::require(!dual || p.mSize % 2 == 0, Fault::kIllegal, site, "mSize is odd, and both AIVs get half of the rows");
  twin::require(p.nSize * dst.element % 32 == 0 && p.dstStride * dst.element % 32 == 0, Fault::kAlignment, site, "rows in UB are not multiples of 32 bytes");
  const int rows = dual ? p.mSize / 2 : p.mSize, element = dst.element;
  require_inside(dst, (int64_t{rows} - 1) * p.dstStride * element + int64_t{p.nSize} * element, site);
  std::vector<twin::Access> accesses = {fixpipe_source(src, p)};
  uint8_t* out[2] = {nullptr, nullptr};
  for (int side = 0; side < 2; ++side) {
    if (!dual && side != int(p.subBlockId)) continue;
    const int core = twin::kAIV0 + side;
    accesses.push_back({twin::kUB, uint8_t(core), true, {dst.address, int64_t{p.nSize} * element, rows, int64_t{p.dstStride} * element}, {}});
    out[side] = engine.memory(twin::kUB, core) + dst.address;
  }
  const float* in = reinterpret_cast<const float*>(engine.memory(twin::kL0C, twin::kAIC) + src.address);
  const FixpipeParamsArch3510<> params = p;
  uint8_t *first = out[0], *second = out[1];
  engine.issue(twin::kFIX, site, engine.cost().fixpipe(4.0 * p.mSize * p.nSize), std::move(accesses), [=] {
    if (first != nullptr) fixpipe_rows(in, first, element, 0, rows, params);
    if (second != nullptr) fixpipe_rows(in, second, element, dual ? rows : 0, rows, params);
  });
}

}  // namespace AscendC
