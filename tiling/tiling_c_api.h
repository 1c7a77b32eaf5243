// The tiling for callers that have no C++: the command line and the tests, through ctypes.
#pragma once

#include <cstdint>

#include "tiling/tiling_data.h"
#include "tiling/tune.h"

extern "C" {

// JSON list of the names that fm_tiling_json and the others take.
const char* fm_machines(void);

// Writes the report of `problem` on `machine` into buf as JSON, closed by a 0 byte: machine, kind, path, blocks, buffers, reasons,
// stages, bytes, flops, bound_us. Returns the bytes that the whole text needs with its 0: above buf_bytes nothing was written, call
// again with more. Negative: minus that size, and the text is not JSON but what was wrong (an unknown machine, an illegal field).
int fm_tiling_json(const char* machine, const flashmla::Problem* problem, char* buf, int64_t buf_bytes);

// How one sequence of s_q new tokens and s_kv keys is cut. 0 when *seq is filled, 1 for an unknown machine or an illegal problem.
int fm_seq_tiling(const char* machine, const flashmla::Problem* problem, int64_t s_q, int64_t s_kv, flashmla::SeqTiling* seq);

// The KV tiles of that sequence as the kernel walks them: triples (split, start, length) into triples [capacity][3].
// Returns the number of tiles, which may exceed capacity (then the first `capacity` are written), or -1 as above.
int64_t fm_tiles(const char* machine, const flashmla::Problem* problem, int64_t s_q, int64_t s_kv, int64_t* triples, int64_t capacity);

// causal_range of tiling/tiles.h: range [3] = start, unmasked_end, end.
void fm_causal_range(int64_t start, int64_t length, int64_t first_pos, int64_t last_pos, int64_t* range);

// Rules of the process in place of the cost model's choices (tiling/tune.h).
void fm_add_gemm_rule(const flashmla::GemmRule* rule);
void fm_add_path_rule(const flashmla::PathRule* rule);
void fm_clear_rules(void);

// A switch of tiling/switches.h by its name. 0, or 1 for an unknown one.
int fm_set_switch(const char* name, int on);
// What is wrong with MS_FLASHMLA_OFF, "" when nothing is.
const char* fm_switches_error(void);

// The choices in force for a problem on a machine: choices [kProjections], and the path rule (count 0: the cost model). 0, or 1 as above.
int fm_choices(const char* machine, const flashmla::Problem* problem, flashmla::GemmChoice* choices, flashmla::PathRule* path);

}  // extern "C"
