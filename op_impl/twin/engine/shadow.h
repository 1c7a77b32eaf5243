// The race detector: for every byte of a memory, who wrote it last, who has read it since, and the layout it was written in.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "op_impl/twin/engine/clock.h"
#include "op_impl/twin/engine/site.h"

namespace twin {

// Layout of a region: a kind, and the distance in bytes between neighbours of the outer dimension, 0 when there is only one.
enum class LayoutKind : uint8_t { kAny, kND, kNZ, kZN };
struct Layout {
  LayoutKind kind = LayoutKind::kAny;
  uint32_t stride = 0;
  bool operator==(const Layout& o) const { return kind == o.kind && stride == o.stride; }
  bool reads(const Layout& o) const {
    if (kind == LayoutKind::kAny || o.kind == LayoutKind::kAny) return true;
    return kind == o.kind && (stride == o.stride || stride == 0 || o.stride == 0);
  }
};
std::string text(const Layout& layout);

// `count` ranges of `bytes` each, `stride` bytes apart.
struct Span {
  int64_t start = 0;
  int64_t bytes = 0;
  int64_t count = 1;
  int64_t stride = 0;
};

struct Stamp {
  int32_t slot = -1;  // component of the vector clock
  uint32_t epoch = 0;
  Site site;
  bool operator==(const Stamp& o) const { return slot == o.slot && epoch == o.epoch; }
};

class Shadow {
 public:
  // `names` turns a clock component into words.
  using Namer = std::string (*)(int slot);
  Shadow(std::string memory, Namer namer) : memory_(std::move(memory)), namer_(namer) {}

  // Throws a data race with both places, or a wrong layout.
  void read(const Span& span, const Stamp& who, const Clock& knows, const Layout& layout);
  void write(const Span& span, const Stamp& who, const Clock& knows, const Layout& layout);

 private:
  struct Range {
    int64_t end;
    Stamp written;
    std::vector<Stamp> read;  // since then, the last one of each pipe
    Layout layout;
    bool same(const Range& o) const { return written == o.written && layout == o.layout && read == o.read; }
  };
  using Ranges = std::map<int64_t, Range>;

  Ranges::iterator split(int64_t at);
  void read_one(int64_t start, int64_t end, const Stamp& who, const Clock& knows, const Layout& layout);
  void write_one(int64_t start, int64_t end, const Stamp& who, const Clock& knows, const Layout& layout);
  [[noreturn]] void race(int64_t start, const Stamp& before, const char* did, const Stamp& now, const char* does) const;

  std::string memory_;
  Namer namer_;
  Ranges ranges_;
};

}  // namespace twin
