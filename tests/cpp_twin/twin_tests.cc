// Runs one case by name: `twin_tests NAME`, or lists them: `twin_tests --list`. A line of the list: name, and the fault that
// must be found ("none": the run must pass with the right numbers).
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "tests/cpp_twin/illegal.h"
#include "tests/cpp_twin/kernels.h"

namespace {

using twin::Engine;
using twin::Fault;
using twin::Options;
using twin::Role;

flashmla::Machine machine() { return *flashmla::find_machine("ascend950pr_9599"); }

void expect(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error("expected " + what);
}

twin::RunReport run_doubler(int blocks = 2, int tiles = 17) {
  std::vector<float> x(tiles * Doubler::kTile), y(x.size(), NAN);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) * 0.25f;
  Engine engine(machine(), Options(), blocks);
  engine.add_tensor("x", Role::kInput, x.data(), x.size() * 4);
  engine.add_tensor("y", Role::kOutput, y.data(), y.size() * 4);
  twin::RunReport report = engine.run(Doubler{reinterpret_cast<uint8_t*>(x.data()), reinterpret_cast<uint8_t*>(y.data()), tiles});
  for (size_t i = 0; i < x.size(); ++i) expect(y[i] == 2 * x[i], "y = 2 x at " + std::to_string(i));
  return report;
}

twin::RunReport run_hand_off() {
  using K = HandOff;
  std::mt19937 rng(1);
  std::normal_distribution<float> draw;
  auto filled = [&](int n) {
    std::vector<half> t(n);
    for (half& e : t) e = half(draw(rng));
    return t;
  };
  std::vector<half> a = filled(K::kM * K::kK), b = filled(K::kK * K::kN), w = filled(K::kN * K::kN);
  std::vector<float> c(K::kM * K::kN, NAN);
  Engine engine(machine(), Options(), 1);
  auto gm = [&](const char* name, Role role, auto& t) {
    engine.add_tensor(name, role, t.data(), t.size() * sizeof(t[0]));
    return reinterpret_cast<uint8_t*>(t.data());
  };
  twin::RunReport report = engine.run(HandOff{gm("a", Role::kInput, a), gm("b", Role::kInput, b), gm("w", Role::kInput, w), gm("c", Role::kOutput, c)});
  for (int m = 0; m < K::kM; ++m) {
    std::vector<double> probs(K::kN);
    for (int n = 0; n < K::kN; ++n) {
      double sum = 0;
      for (int k = 0; k < K::kK; ++k) sum += double(float(a[m * K::kK + k])) * double(float(b[k * K::kN + n]));
      probs[n] = double(float(half(float(2 * sum))));
    }
    for (int n = 0; n < K::kN; ++n) {
      double sum = 0;
      for (int k = 0; k < K::kN; ++k) sum += probs[k] * double(float(w[k * K::kN + n]));
      expect(std::fabs(sum - double(c[m * K::kN + n])) <= 0.1, "the product at " + std::to_string(m) + ", " + std::to_string(n));
    }
  }
  return report;
}

void run_one(const std::function<void()>& kernel, int blocks = 1) {
  static float data[4096];
  Engine engine(machine(), Options(), blocks);
  engine.add_tensor("data", Role::kInOut, data, sizeof data);
  illegal::gm = reinterpret_cast<uint8_t*>(data);
  engine.run(kernel);
}

// The clock on one copy, one vector instruction and one copy back: by hand from the machine file.
void clock_of_a_tile() {
  const flashmla::Machine m = machine();
  std::vector<float> x(Doubler::kTile), y(x.size());
  Engine engine(m, Options(), 1);
  engine.add_tensor("x", Role::kInput, x.data(), x.size() * 4);
  engine.add_tensor("y", Role::kOutput, y.data(), y.size() * 4);
  const twin::RunReport report = engine.run(Doubler{reinterpret_cast<uint8_t*>(x.data()), reinterpret_cast<uint8_t*>(y.data()), 1});
  const double port = std::min<double>(m.l2_bytes_per_cycle, m.dram_gb_per_s * 1e9 * m.hbm_efficiency / (m.freq_mhz * 1e6));
  const double copy = m.startup_dma_gm + 1024 / port, vector = m.startup_vector + 1024.0 / m.vector_bytes_per_cycle;
  const twin::PipeTimes& mte2 = report.pipes[twin::kAIV0][twin::kMTE2];
  expect(std::fabs(mte2.busy - copy) < 1e-6, "the copy to take " + std::to_string(copy) + " cycles, it took " + std::to_string(mte2.busy));
  expect(std::fabs(report.pipes[twin::kAIV0][twin::kV].busy - vector) < 1e-6, "the vector instruction to take " + std::to_string(vector));
  // Two credits, then: wait, copy, set, wait, vector, set, wait, copy back, and two sets and waits at the end.
  const double chain = 2 * copy + vector;
  expect(report.cycles >= chain && report.cycles <= chain + 12 * m.event_cycles, "the chain to take about " + std::to_string(chain) + ", it took " + std::to_string(report.cycles));
}

void memory_is_shared() {
  const double alone = run_doubler(1, 2).cycles;
  const twin::RunReport many = run_doubler(36, 36 * 2);
  expect(many.cycles > alone, "72 readers to be slower than 2");
  double bytes = 0;
  for (const twin::TensorTraffic& t : many.traffic) bytes += double(t.read_bytes) + double(t.written_bytes);
  expect(bytes == 2.0 * 36 * 2 * Doubler::kTile * 4, "every byte once");
}

void l2_serves_again() {
  std::vector<float> x(64 * 1024);
  Engine engine(machine(), Options(), 1);
  engine.add_tensor("x", Role::kInput, x.data(), x.size() * 4);
  const twin::RunReport report = engine.run([&] {
    if ASCEND_IS_AIV {
      GlobalTensor<float> gm;
      gm.SetGlobalBuffer(x.data());
      const LocalTensor<float> ub(TPosition::VECCALC, 0, 8192);
      for (int round = 0; round < 2; ++round) DataCopyPad(ub, gm, DataCopyExtParams(1, 32768, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 0, 0));
    }
  });
  expect(report.traffic[0].read_bytes <= 32768 + 512 && report.traffic[0].l2_bytes >= 3 * 32768 - 512, "one read of memory and three of L2");
}

struct Case { std::string name, fault; std::function<void()> run; };

std::vector<Case> cases() {
  std::vector<Case> list = {{"doubler", "none", [] { run_doubler(); }}, {"hand-off", "none", [] { run_hand_off(); }}, {"sync all", "none", [] { run_one(illegal::sync_all, 3); }},
                            {"scalar", "none", [] { run_one(illegal::scalar); }}, {"modes of flags", "none", [] { run_one(illegal::flag_modes, 2); }},
                            {"clock of a tile", "none", clock_of_a_tile}, {"memory is shared", "none", memory_is_shared}, {"L2 serves again", "none", l2_serves_again}};
  auto planted = [&](const char* kernel, const char* fault, const char* found, std::function<void()> run) {
    list.push_back({std::string(kernel) + ": " + fault, found, [=] { broken = fault; run(); }});
  };
  auto doubler = [&](const char* fault, const char* found) { planted("doubler", fault, found, [] { run_doubler(); }); };
  doubler("short buffer", "out of bounds");
  doubler("tail read", "out of bounds");
  doubler("swapped event", "deadlock|event misuse");
  doubler("swapped buffer", "data race");
  doubler("no wait for the buffer", "data race|event misuse");
  doubler("no wait for the input", "data race|event misuse");
  doubler("no set of the result", "deadlock");
  doubler("event left set", "event misuse");
  doubler("same output", "data race");
  auto hand_off = [&](const char* fault, const char* found) { planted("hand-off", fault, found, [] { run_hand_off(); }); };
  hand_off("wrong stride", "wrong layout|out of bounds");
  hand_off("not transposed", "wrong layout|out of bounds");
  hand_off("no wait for L0", "data race");
  hand_off("no credit", "event misuse");
  hand_off("no cross-core set", "deadlock");
  hand_off("no cross-core wait", "data race");
  hand_off("wrong cross-core flag", "deadlock");
  hand_off("wrong gap", "wrong layout|data race");
  for (const illegal::Call& call : illegal::calls()) list.push_back({std::string("illegal: ") + call.name, call.fault, [=] { run_one(call.kernel, 2); }});
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "--list";
  for (const Case& c : cases()) {
    if (wanted == "--list") {
      std::printf("%s\t%s\n", c.name.c_str(), c.fault.c_str());
    } else if (c.name == wanted) {
      try {
        c.run();
      } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        return 0;
      }
      std::printf("passed\n");
      return 0;
    }
  }
  return wanted == "--list" ? 0 : 2;
}
