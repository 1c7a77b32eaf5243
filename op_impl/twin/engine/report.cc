#include "op_impl/twin/engine/report.h"

#include <cstdio>

#include "op_impl/twin/engine/cost.h"
#include "op_proto/json_writer.h"

namespace twin {

std::string to_json(const RunReport& report, const flashmla::Machine& machine) {
  const CostModel cost(machine);
  flashmla::JsonWriter json;
  json.begin_object().member("machine", machine.name).member("us", cost.us(report.cycles)).member("launch_us", machine.launch_us);
  json.member("cores", int64_t{report.launched}).member("simulated_cores", int64_t{report.blocks}).member("barrier_us", cost.us(report.barrier_cycles)).member("memory_busy_us", cost.us(report.memory_busy_cycles));
  // Counts of a sample stand for all cores.
  const double scale = double(report.launched) / report.blocks;
  auto all = [&](int64_t count) { return static_cast<int64_t>(count * scale); };
  json.member("issued_macs", all(report.macs));
  json.key("stage_ends_us").begin_array();
  for (double end : report.stage_ends) json.value(cost.us(end));
  json.end_array();
  // Means over the blocks of the launch: a pipe's busy and waiting times and what is left of `us` add up to it.
  json.key("pipes").begin_array();
  for (int core = 0; core < kCoresPerBlock; ++core) {
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      const PipeTimes& times = report.pipes[core][pipe];
      if (times.operations == 0) continue;
      json.begin_object().member("core", core_name(core)).member("pipe", pipe_name(pipe)).member("operations", times.operations);
      json.member("busy_us", cost.us(times.busy / report.blocks)).key("wait_us").begin_object();
      for (const auto& wait : times.waits) json.member(wait.first.c_str(), cost.us(wait.second / report.blocks));
      json.end_object().end_object();
    }
  }
  json.end_array().key("tensors").begin_array();
  for (const TensorTraffic& t : report.traffic) {
    json.begin_object().member("name", t.name).member("workspace", int32_t{t.workspace}).member("read_bytes", all(t.read_bytes));
    json.member("written_bytes", all(t.written_bytes)).member("l2_bytes", all(t.l2_bytes)).end_object();
  }
  json.end_array().end_object();
  return json.text();
}

std::string trace_json(const RunReport& report, const flashmla::Machine& machine) {
  const CostModel cost(machine);
  std::string out = "{\"traceEvents\": [\n";
  bool first = true;
  auto line = [&](const std::string& text) {
    out += (first ? "" : ",\n") + text;
    first = false;
  };
  char buffer[512];
  for (int block = 0; block < report.blocks; ++block) {
    for (int core = 0; core < kCoresPerBlock; ++core) {
      for (int pipe = 0; pipe < kPipes; ++pipe) {
        if (report.pipes[core][pipe].operations == 0) continue;
        std::snprintf(buffer, sizeof buffer, "{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": \"%s %s\"}}", block, core * kPipes + pipe,
                      core_name(core), pipe_name(pipe));
        line(buffer);
      }
    }
    std::snprintf(buffer, sizeof buffer, "{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": \"core %d\"}}", block, block);
    line(buffer);
  }
  for (const TraceRow& row : report.trace) {
    const std::string name = row.cause.empty() ? row.site.call : "wait for " + row.cause;
    std::snprintf(buffer, sizeof buffer, "{\"name\": \"%s\", \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %d, \"tid\": %d, \"ts\": %.4f, \"dur\": %.4f, \"args\": {\"at\": \"%s\"}}", name.c_str(),
                  row.cause.empty() ? "work" : "wait", row.block, row.core * kPipes + row.pipe, cost.us(row.start), cost.us(row.end - row.start), text(row.site).c_str());
    line(buffer);
  }
  return out + "\n]}\n";
}

}  // namespace twin
