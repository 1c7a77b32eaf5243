// A machine as tiling sees it: capacities in bytes, rates per cycle of one core. Filled from tiling/machines/*.yaml at build time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashmla {

enum MachineKind : int32_t { kCpu = 0, kAscend = 1 };

// A field that a kind of machine does not have stays 0. "per core": of one CPU core, or of one AI core (1 AIC, 2 AIV).
struct Machine {
  std::string name;
  MachineKind kind = kCpu;
  int32_t cores = 0;  // CPU cores, or AICs
  double freq_mhz = 0;
  double dram_gb_per_s = 0;             // all cores together, 1e9 bytes/s
  int64_t dram_bytes = 0;
  int64_t l2_bytes = 0;  // CPU: per core; Ascend: shared by all cores
  int64_t l1_bytes = 0;  // per core

  // CPU
  int64_t scratch_bytes = 0;     // memory beside weights and cache that a call may hold
  int32_t vector_lanes = 0;      // float32 lanes of a vector
  int32_t vector_registers = 0;  // CPU: of a core; Ascend: of an AIV
  int32_t accumulators = 0;      // vector registers that hold sums in QK, PV and GEMM
  int32_t flops_per_cycle = 0;   // float32, per core
  int32_t gemm_panel_cols = 0;   // outputs of a packed weight panel

  // Ascend
  int32_t vectors_per_core = 0;  // AIVs of an AI core
  int64_t l0a_bytes = 0;
  int64_t l0b_bytes = 0;
  int64_t l0c_bytes = 0;
  int64_t ub_bytes = 0;  // usable, per AIV
  int64_t bias_table_bytes = 0;
  int64_t fixpipe_bytes = 0;
  int32_t macs_per_cycle_b16 = 0;
  int32_t macs_per_cycle_b8 = 0;
  int32_t macs_per_cycle_b32 = 0;
  int32_t vector_bytes_per_cycle = 0;   // per AIV
  int32_t l1_l0_bytes_per_cycle = 0;    // L1 -> L0A, L0B
  int32_t l1_ub_bytes_per_cycle = 0;    // L1 <-> UB
  int32_t l0c_out_bytes_per_cycle = 0;  // L0C -> UB, L1
  int32_t l2_bytes_per_cycle = 0;       // per core, on a hit
  double hbm_efficiency = 0;
  int32_t startup_cube = 0;  // cycles, this and the following
  int32_t startup_vector = 0;
  int32_t startup_dma_gm = 0;
  int32_t startup_dma_onchip = 0;
  int32_t startup_fixpipe = 0;
  int32_t vector_slow_divisor = 0;  // exp, div and sqrt: share of vector_bytes_per_cycle
  int32_t event_cycles = 0;
  int32_t cross_core_flag_cycles = 0;
  int32_t barrier_cycles = 0;
  double launch_us = 0;

  // Peak of all cores in flops/s: float32 FMA on a CPU, products of 2-byte inputs on the cube of an Ascend.
  double peak_flops_per_s() const {
    double per_cycle = kind == kCpu ? flops_per_cycle : 2.0 * macs_per_cycle_b16;
    return cores * freq_mhz * 1e6 * per_cycle;
  }
};

// All machines, sorted by name.
const std::vector<Machine>& machines();

// The machine of that name, or nullptr.
const Machine* find_machine(const std::string& name);

}  // namespace flashmla
