// The twin for callers that have no C++, through ctypes.
#pragma once

#include <cstdint>

#include "tiling/tiling.h"

extern "C" {

// Runs FlashMLA for `problem` on a machine's twin by its clock alone and writes what it tells (to_json of engine/report.h) into `out`. `scale`
// multiplies assumed constants of the machine, "startup_cube=0.5,barrier_cycles=2"; `sample` cores stand for all when above 0; `check`: look for
// races too; `wanted`: rows, kv_tile and KV buffers of attention in place of the tiling's, 0 for its own; a trace goes to `trace_path` unless it is null or empty. Returns the bytes that the text needs with its 0: above out_bytes it was not
// written (the run has to be made again). Negative: minus that size, and the text says what was wrong.
int64_t fm_twin_profile(const char* machine_name, const flashmla::Problem* problem, const char* scale, int32_t sample, int32_t check, const int32_t* wanted, const char* trace_path, char* out, int64_t out_bytes);

}  // extern "C"
