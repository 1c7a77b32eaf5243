// What a run tells: time, and per pipe how long it worked and for whom it waited; the rows of a trace.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "op_impl/twin/engine/pipes.h"
#include "op_impl/twin/engine/site.h"
#include "tiling/machine.h"

namespace twin {

struct PipeTimes {
  double busy = 0;  // cycles
  int64_t operations = 0;
  std::map<std::string, double> waits;  // cause -> cycles
};

struct TraceRow {
  int block;
  uint8_t core, pipe;
  double start, end;  // cycles
  Site site;
  std::string cause;  // of a wait; "" for an operation
};

struct TensorTraffic {
  std::string name;
  bool workspace;
  int64_t read_bytes, written_bytes, l2_bytes;
  int64_t bytes, fresh_bytes;  // of the tensor; of the lines of it that were used
};

struct RunReport {
  double cycles = 0;             // launch apart
  double barrier_cycles = 0;     // of them, all cores in SyncAll
  double memory_busy_cycles = 0; // of them, some transfer from memory was under way
  int blocks = 0;                // simulated, of `launched`
  int launched = 0;
  int64_t macs = 0;              // what the cube was asked for, padding included
  std::vector<double> stage_ends;  // cycle at which each SyncAll let go
  PipeTimes pipes[kCoresPerBlock][kPipes];  // sums over blocks
  std::vector<TensorTraffic> traffic;
  std::vector<TraceRow> trace;
};

// As JSON: an object of the numbers above in us and bytes, and Chrome's trace event format.
std::string to_json(const RunReport& report, const flashmla::Machine& machine);
std::string trace_json(const RunReport& report, const flashmla::Machine& machine);

}  // namespace twin
