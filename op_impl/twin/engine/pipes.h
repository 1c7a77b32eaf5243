// Names of cores, pipes and memories, and how they are numbered.
#pragma once

#include <cstdint>

namespace twin {

enum Pipe : uint8_t { kS, kV, kM, kMTE1, kMTE2, kMTE3, kFIX, kPipes };
inline const char* pipe_name(int pipe) {
  static const char* const names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "S writes"};
  return names[pipe];
}

// A vector clock has a component for every pipe of every core. What the scalar unit writes has one of its own: issuing an
// instruction orders what the scalar unit has read, but its stores may still be on their way.
inline constexpr int kScalarStores = kPipes;
inline constexpr int kSlots = kPipes + 1;

enum CoreKind : uint8_t { kAIC, kAIV0, kAIV1, kCoresPerBlock };
inline const char* core_name(int kind) {
  static const char* const names[] = {"AIC", "AIV0", "AIV1"};
  return names[kind];
}

enum Space : uint8_t { kGM, kL1, kL0A, kL0B, kL0C, kUB, kBT, kFB, kSpaces };
inline const char* space_name(int space) {
  static const char* const names[] = {"GM", "L1", "L0A", "L0B", "L0C", "UB", "bias table", "fixpipe buffer"};
  return names[space];
}

}  // namespace twin
