#include "tiling/tiling_c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>

#include "op_proto/json_writer.h"
#include "tiling/switches.h"
#include "tiling/tiling.h"

#define FM_EXPORT __attribute__((visibility("default")))

namespace flashmla {
namespace {

const Machine& machine_named(const char* name) {
  const Machine* machine = find_machine(name == nullptr ? "" : name);
  if (machine != nullptr) return *machine;
  std::string known;
  for (const Machine& m : machines()) known += (known.empty() ? "" : ", ") + m.name;
  throw std::invalid_argument("machine is '" + std::string(name == nullptr ? "" : name) + "'; it must be one of " + known);
}

void write_seq(JsonWriter& json, const SeqTiling& seq) {
  json.key("seq").begin_object();
  json.member("path", path_name(seq.path));
  json.member("num_splits", seq.num_splits).member("split_len", seq.split_len).member("qk_dim_pack", seq.qk_dim_pack);
  json.end_object();
}

void write_blocks(JsonWriter& json, const std::vector<NamedValue>& blocks) {
  json.key("blocks").begin_array();
  for (const NamedValue& block : blocks) {
    json.begin_object().member("name", block.name).member("value", block.value).member("meaning", block.meaning).end_object();
  }
  json.end_array();
}

void write_buffers(JsonWriter& json, const std::vector<Buffer>& buffers) {
  json.key("buffers").begin_array();
  for (const Buffer& b : buffers) {
    json.begin_object().member("stage", b.stage).member("name", b.name).member("shape", b.shape).member("bytes", b.bytes);
    json.member("memory", b.memory).member("capacity", b.capacity);
    json.member("share", static_cast<double>(b.bytes) / b.capacity).member("copies", b.copies).end_object();
  }
  json.end_array();
}

void write_stages(JsonWriter& json, const std::vector<StageBound>& stages) {
  json.key("stages").begin_array();
  for (const StageBound& s : stages) {
    json.begin_object().member("name", s.name).member("bytes", s.bytes).member("flops", s.flops).member("us", s.us);
    json.member("limited_by", s.limited_by).end_object();
  }
  json.end_array();
}

std::string report_json(const Machine& machine, const Problem& problem) {
  const TilingReport report = make_report(problem, machine);
  JsonWriter json;
  json.begin_object().member("machine", machine.name).member("kind", machine.kind == kCpu ? "cpu" : "ascend");
  json.member("cores", machine.cores).member("peak_gflops", machine.peak_flops_per_s() * 1e-9).member("gb_per_s", machine.dram_gb_per_s);
  write_seq(json, report.seq);
  write_blocks(json, report.blocks);
  write_buffers(json, report.buffers);
  json.key("reasons").begin_array();
  for (const std::string& reason : report.reasons) json.value(reason);
  json.end_array();
  write_stages(json, report.stages);
  json.member("least_bytes", report.least_bytes).member("bytes_read", report.bytes_read).member("flops", report.flops);
  json.member("bound_us", report.bound_us).end_object();
  return json.text();
}

int copy_text(const std::string& text, char* buf, int64_t buf_bytes) {
  const int64_t needs = static_cast<int64_t>(text.size()) + 1;
  if (buf != nullptr && needs <= buf_bytes) std::memcpy(buf, text.c_str(), needs);
  return static_cast<int>(needs);
}

std::string machines_json() {
  JsonWriter json;
  json.begin_array();
  for (const Machine& m : machines()) json.value(m.name);
  return json.end_array().text();
}

SeqTiling seq_of(const char* machine, const Problem& problem, int64_t s_q, int64_t s_kv, TilingData* tiling) {
  *tiling = make_tiling(problem, machine_named(machine));
  return make_seq_tiling(problem, *tiling, s_q, s_kv);
}

}  // namespace
}  // namespace flashmla

using namespace flashmla;

extern "C" {

FM_EXPORT const char* fm_machines(void) {
  static const std::string names = machines_json();
  return names.c_str();
}

FM_EXPORT int fm_tiling_json(const char* machine, const Problem* problem, char* buf, int64_t buf_bytes) {
  try {
    return copy_text(report_json(machine_named(machine), *problem), buf, buf_bytes);
  } catch (const std::exception& error) {
    return -copy_text(error.what(), buf, buf_bytes);
  }
}

FM_EXPORT int fm_seq_tiling(const char* machine, const Problem* problem, int64_t s_q, int64_t s_kv, SeqTiling* seq) {
  try {
    TilingData tiling;
    *seq = seq_of(machine, *problem, s_q, s_kv, &tiling);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

FM_EXPORT int64_t fm_tiles(const char* machine, const Problem* problem, int64_t s_q, int64_t s_kv, int64_t* triples, int64_t capacity) {
  try {
    TilingData tiling;
    const SeqTiling seq = seq_of(machine, *problem, s_q, s_kv, &tiling);
    int64_t count = 0;
    for (int32_t split = 0; split < seq.num_splits; ++split) {
      const Tile keys = split_at(seq, s_kv, split);
      for (int64_t i = 0; i < tile_count(keys.length, tiling.kv_tile); ++i, ++count) {
        if (count >= capacity) continue;
        const Tile tile = tile_at(keys.start, keys.length, tiling.kv_tile, i);
        triples[3 * count] = split;
        triples[3 * count + 1] = tile.start;
        triples[3 * count + 2] = tile.length;
      }
    }
    return count;
  } catch (const std::exception&) {
    return -1;
  }
}

FM_EXPORT void fm_causal_range(int64_t start, int64_t length, int64_t first_pos, int64_t last_pos, int64_t* range) {
  const CausalRange cut = causal_range({start, length}, first_pos, last_pos);
  range[0] = cut.start;
  range[1] = cut.unmasked_end;
  range[2] = cut.end;
}

FM_EXPORT void fm_add_gemm_rule(const GemmRule* rule) { add_rule(*rule); }
FM_EXPORT void fm_add_path_rule(const PathRule* rule) { add_rule(*rule); }
FM_EXPORT void fm_clear_rules(void) { clear_rules(); }

FM_EXPORT const char* fm_switches_error(void) {
  static thread_local std::string error;
  try {
    check_switches();
    error.clear();
  } catch (const std::exception& e) {
    error = e.what();
  }
  return error.c_str();
}

FM_EXPORT int fm_set_switch(const char* name, int on) {
  try {
    set_switch(name, on != 0);
    forget_tilings();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

FM_EXPORT int fm_choices(const char* machine, const Problem* problem, GemmChoice* choices, PathRule* path) {
  try {
    const TilingData tiling = tuned_tiling(*problem, machine_named(machine));
    std::copy(std::begin(tiling.gemm), std::end(tiling.gemm), choices);
    path->count = tiling.path_points;
    std::copy_n(tiling.path, tiling.path_points, path->points);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}  // extern "C"
