#include "op_impl/twin/engine/shadow.h"

#include <algorithm>

namespace twin {
namespace {
constexpr int64_t kFractalBytes = 512;
}

std::string text(const Layout& layout) {
  static const char* const names[] = {"any layout", "ND", "NZ", "ZN"};
  std::string words = names[static_cast<int>(layout.kind)];
  if (layout.stride != 0) words += " with " + std::to_string(layout.stride) + " bytes between column blocks";
  return words;
}

void Shadow::race(int64_t start, const Stamp& before, const char* did, const Stamp& now, const char* does) const {
  throw TwinError(Fault::kRace, memory_ + " byte " + std::to_string(start) + ": " + namer_(now.slot) + " " + does + " at " + text(now.site) +
                                    ", " + namer_(before.slot) + " " + did + " at " + text(before.site) + ", and nothing orders them");
}

// The range that starts at `at`, cut out of the one that holds it; end() when nothing at or behind `at` was ever touched.
Shadow::Ranges::iterator Shadow::split(int64_t at) {
  Ranges::iterator next = ranges_.lower_bound(at);
  if (next != ranges_.end() && next->first == at) return next;
  if (next == ranges_.begin()) return next;
  Ranges::iterator holder = std::prev(next);
  if (holder->second.end <= at) return next;
  Range tail = holder->second;
  holder->second.end = at;
  return ranges_.emplace_hint(next, at, std::move(tail));
}

void Shadow::read(const Span& span, const Stamp& who, const Clock& knows, const Layout& layout) {
  if (span.stride == span.bytes) return read_one(span.start, span.start + span.bytes * span.count, who, knows, layout);
  for (int64_t i = 0; i < span.count; ++i) {
    const int64_t start = span.start + i * span.stride;
    read_one(start, start + span.bytes, who, knows, layout);
  }
}

void Shadow::write(const Span& span, const Stamp& who, const Clock& knows, const Layout& layout) {
  if (span.stride == span.bytes) return write_one(span.start, span.start + span.bytes * span.count, who, knows, layout);
  for (int64_t i = 0; i < span.count; ++i) {
    const int64_t start = span.start + i * span.stride;
    write_one(start, start + span.bytes, who, knows, layout);
  }
}

void Shadow::read_one(int64_t start, int64_t end, const Stamp& who, const Clock& knows, const Layout& layout) {
  if (start >= end) return;
  Ranges::iterator at = split(start);
  split(end);
  int64_t covered = start;
  while (covered < end) {
    if (at == ranges_.end() || at->first > covered) {  // nobody was here yet
      const int64_t stop = at == ranges_.end() ? end : std::min(end, at->first);
      at = ranges_.emplace_hint(at, covered, Range{stop, {}, {who}, {}});
    } else {
      Range& range = at->second;
      if (range.written.slot >= 0 && knows[range.written.slot] < range.written.epoch) race(covered, range.written, "wrote it", who, "reads it");
      // Rows that fill up a fractal may hold whatever was there before: its first row tells.
      const int64_t fractal = start + (covered - start + kFractalBytes - 1) / kFractalBytes * kFractalBytes;
      if (fractal < range.end && fractal < end && !layout.reads(range.layout)) {
        fail(Fault::kLayout, who.site, memory_ + " byte " + std::to_string(covered) + " is read as " + text(layout) + ", but " +
                                           text(range.written.site) + " wrote it as " + text(range.layout));
      }
      bool found = false;
      for (Stamp& stamp : range.read) {
        if (stamp.slot == who.slot) stamp = who, found = true;
      }
      if (!found) {
        // A read that this one knows of adds nothing: whoever is ordered behind this one is ordered behind that one.
        range.read.erase(std::remove_if(range.read.begin(), range.read.end(), [&](const Stamp& s) { return knows[s.slot] >= s.epoch; }), range.read.end());
        range.read.push_back(who);
      }
    }
    covered = at->second.end;
    if (at != ranges_.begin()) {  // neighbours in the same state are one range
      Ranges::iterator left = std::prev(at);
      if (left->second.end == at->first && left->second.same(at->second)) {
        left->second.end = at->second.end;
        at = ranges_.erase(at);
        continue;
      }
    }
    ++at;
  }
}

void Shadow::write_one(int64_t start, int64_t end, const Stamp& who, const Clock& knows, const Layout& layout) {
  if (start >= end) return;
  Ranges::iterator at = split(start);
  split(end);
  while (at != ranges_.end() && at->first < end) {
    const Range& range = at->second;
    if (range.written.slot >= 0 && knows[range.written.slot] < range.written.epoch) race(at->first, range.written, "wrote it", who, "writes it");
    for (const Stamp& stamp : range.read) {
      if (knows[stamp.slot] < stamp.epoch) race(at->first, stamp, "read it", who, "writes it");
    }
    at = ranges_.erase(at);
  }
  ranges_.emplace_hint(at, start, Range{end, who, {}, layout});
}

}  // namespace twin
