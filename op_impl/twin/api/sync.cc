#include "op_impl/twin/api/sync.h"

namespace AscendC {
namespace {

using twin::Pipe;

struct Pair { Pipe from, to; };

// In the order of HardEvent.
constexpr Pair kEvents[] = {
    {twin::kMTE2, twin::kMTE1}, {twin::kMTE1, twin::kMTE2}, {twin::kMTE1, twin::kM}, {twin::kM, twin::kMTE1}, {twin::kMTE2, twin::kV}, {twin::kV, twin::kMTE2},
    {twin::kMTE3, twin::kV}, {twin::kV, twin::kMTE3}, {twin::kM, twin::kV}, {twin::kV, twin::kM}, {twin::kV, twin::kV}, {twin::kMTE3, twin::kMTE1},
    {twin::kMTE1, twin::kMTE3}, {twin::kMTE1, twin::kV}, {twin::kMTE2, twin::kM}, {twin::kM, twin::kMTE2}, {twin::kV, twin::kMTE1}, {twin::kM, twin::kFIX},
    {twin::kFIX, twin::kM}, {twin::kMTE3, twin::kMTE2}, {twin::kMTE2, twin::kMTE3}, {twin::kS, twin::kV}, {twin::kV, twin::kS}, {twin::kS, twin::kMTE2},
    {twin::kMTE2, twin::kS}, {twin::kS, twin::kMTE3}, {twin::kMTE3, twin::kS}, {twin::kMTE2, twin::kFIX}, {twin::kFIX, twin::kMTE2}, {twin::kFIX, twin::kS},
    {twin::kM, twin::kS}, {twin::kFIX, twin::kMTE3}, {twin::kMTE1, twin::kFIX}, {twin::kFIX, twin::kMTE1}, {twin::kFIX, twin::kFIX}};

bool has_pipe(twin::CoreKind core, Pipe pipe) {
  const bool cube = pipe == twin::kM || pipe == twin::kMTE1 || pipe == twin::kFIX;
  const bool vector = pipe == twin::kV || pipe == twin::kMTE3;
  return core == twin::kAIC ? !vector : !cube;
}

Pair pair_of(HardEvent event, int id, const Site& site) {
  const Pair pair = kEvents[static_cast<int>(event)];
  const twin::CoreKind core = twin::Engine::current().core();
  if (id < 0 || id > 7) twin::fail(Fault::kEvent, site, "event id " + std::to_string(id) + ", there are 0 to 7");
  if (!has_pipe(core, pair.from) || !has_pipe(core, pair.to)) {
    twin::fail(Fault::kIllegal, site, std::string("event ") + twin::pipe_name(pair.from) + "_" + twin::pipe_name(pair.to) + " on " + twin::core_name(core) + ", which lacks one of the pipes");
  }
  return pair;
}

Pipe pipe_of(pipe_t pipe, const Site& site) {
  switch (pipe) {
    case PIPE_S: return twin::kS;
    case PIPE_V: return twin::kV;
    case PIPE_M: return twin::kM;
    case PIPE_MTE1: return twin::kMTE1;
    case PIPE_MTE2: return twin::kMTE2;
    case PIPE_MTE3: return twin::kMTE3;
    case PIPE_FIX: return twin::kFIX;
    default: twin::fail(Fault::kIllegal, site, "no single pipe");
  }
}

Pipe cross_pipe(int mode, pipe_t pipe, int id, bool setting, const Site& site) {
  const twin::CoreKind core = twin::Engine::current().core();
  if (mode != 0 && mode != 1 && mode != 2 && mode != 4) twin::fail(Fault::kIllegal, site, "cross-core mode " + std::to_string(mode) + ", there are 0, 1, 2 and 4");
  if (mode == 1 && core == twin::kAIC) twin::fail(Fault::kIllegal, site, "mode 1 is between the AIVs of a block");
  const bool in_range = mode != 4 ? id >= 0 && id <= 15 : core == twin::kAIC ? (id >= 0 && id <= 10) || (id >= 16 && id <= 26) : id >= 0 && id <= 10;
  if (!in_range) twin::fail(Fault::kEvent, site, "cross-core flag " + std::to_string(id) + " does not exist in mode " + std::to_string(mode) + " on " + twin::core_name(core));
  const Pipe at = pipe_of(pipe, site);
  if (at == twin::kS && mode != 4 && setting) twin::fail(Fault::kIllegal, site, "the scalar pipe sets flags of mode 4 only");
  if (!has_pipe(core, at)) twin::fail(Fault::kIllegal, site, std::string(twin::core_name(core)) + " has no pipe " + twin::pipe_name(at));
  return at;
}

}  // namespace

bool twin_on_aic() { return twin::Engine::current().core() == twin::kAIC; }
uint64_t& twin_tiling_key() {
  static uint64_t key = 0;
  return key;
}

void twin_set_flag(HardEvent event, int id, const Site& site) {
  const Pair pair = pair_of(event, id, site);
  twin::Engine::current().set_flag(pair.from, pair.to, id, site);
}
void twin_wait_flag(HardEvent event, int id, const Site& site) {
  const Pair pair = pair_of(event, id, site);
  twin::Engine::current().wait_flag(pair.from, pair.to, id, site);
}
void twin_cross_set(int mode, pipe_t pipe, int id, const Site& site) {
  twin::Engine::current().cross_set(mode, cross_pipe(mode, pipe, id, true, site), id, site);
}
void twin_cross_wait(int mode, pipe_t pipe, int id, const Site& site) {
  twin::Engine::current().cross_wait(mode, cross_pipe(mode, pipe, id, false, site), id, site);
}
// A pipe works in order by itself; only the barrier over all of them waits for something.
void twin_pipe_barrier(pipe_t pipe, const Site& site) {
  if (pipe == PIPE_ALL) return twin::Engine::current().pipe_barrier_all(site);
  const Pipe at = pipe_of(pipe, site);
  if (!has_pipe(twin::Engine::current().core(), at)) twin::fail(Fault::kIllegal, site, std::string("a barrier of pipe ") + twin::pipe_name(at) + " on a core without it");
}

twin::Space twin_space(TPosition position, const Site& site) {
  switch (position) {
    case TPosition::A1: case TPosition::B1: case TPosition::C1: return twin::kL1;
    case TPosition::A2: return twin::kL0A;
    case TPosition::B2: return twin::kL0B;
    case TPosition::CO1: return twin::kL0C;
    case TPosition::C2: return twin::kBT;
    case TPosition::C2PIPE2GM: return twin::kFB;
    case TPosition::VECIN: case TPosition::VECOUT: case TPosition::VECCALC: return twin::kUB;
    default: twin::fail(Fault::kIllegal, site, "a local tensor in no local memory");
  }
}

void twin_check_capacity(twin::Space space, uint32_t address, uint64_t bytes, const Site& site) {
  const int64_t capacity = twin::Engine::current().capacity(space);
  if (address + bytes > static_cast<uint64_t>(capacity)) {
    twin::fail(Fault::kCapacity, site.named("LocalTensor"), "ends at byte " + std::to_string(address + bytes) + " of " + twin::space_name(space) + ", which has " + std::to_string(capacity));
  }
  if (address % 32 != 0) twin::fail(Fault::kAlignment, site.named("LocalTensor"), "starts at byte " + std::to_string(address) + ", not a multiple of 32");
}

}  // namespace AscendC

namespace {

struct HalfTable {
  float value[65536];
  HalfTable() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
      uint32_t wide;
      if (exponent == 31) {
        wide = 0x7F800000u | fraction << 13;
      } else if (exponent != 0) {
        wide = (exponent + 112) << 23 | fraction << 13;
      } else {
        const float small = static_cast<float>(fraction) / 16777216.0f;
        std::memcpy(&wide, &small, 4);
      }
      wide |= sign;
      std::memcpy(&value[bits], &wide, 4);
    }
  }
};
const HalfTable kHalfTable;

}  // namespace

half::operator float() const { return kHalfTable.value[bits]; }

half::half(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  const uint32_t sign = wide >> 16 & 0x8000u, magnitude = wide & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    bits = static_cast<uint16_t>(sign | 0x7E00u);
  } else if (magnitude >= 0x477FF000u) {  // 65520 and above round to infinity
    bits = static_cast<uint16_t>(sign | 0x7C00u);
  } else if (magnitude < 0x38800000u) {  // below the smallest normal: the float adder rounds
    float small;
    std::memcpy(&small, &magnitude, 4);
    small += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &small, 4);
    bits = static_cast<uint16_t>(sign | (rounded - 0x3F000000u));
  } else {
    bits = static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13);
  }
}
