// Cycles of an operation by the constants of the machine file.
#pragma once

#include <algorithm>

#include "tiling/machine.h"

namespace twin {

struct Cost {
  double startup = 0;
  double cycles = 0;   // behind the start-up
  bool gm = false;     // and the bytes of its GM spans, at what L2 and memory give
};

class CostModel {
 public:
  explicit CostModel(const flashmla::Machine& m) : m_(m) {}
  Cost gm_copy() const { return {double(m_.startup_dma_gm), 0, true}; }
  Cost fixpipe_to_gm(double bytes) const { return {double(m_.startup_fixpipe), bytes / m_.l0c_out_bytes_per_cycle, true}; }
  Cost fixpipe(double bytes) const { return {double(m_.startup_fixpipe), bytes / m_.l0c_out_bytes_per_cycle}; }
  Cost l1_to_l0(double bytes) const { return {double(m_.startup_dma_onchip), bytes / m_.l1_l0_bytes_per_cycle}; }
  Cost ub_l1(double bytes) const { return {double(m_.startup_dma_onchip), bytes / m_.l1_ub_bytes_per_cycle}; }
  // The cube works on whole fractals of 16 x 16 x k0.
  Cost mmad(double m, double n, double k, int element_bytes) const {
    const double macs = element_bytes == 1 ? m_.macs_per_cycle_b8 : element_bytes == 2 ? m_.macs_per_cycle_b16 : m_.macs_per_cycle_b32;
    return {double(m_.startup_cube), m * n * k / macs};
  }
  // One vector instruction over `bytes` of its widest operand.
  Cost vector(double bytes, bool slow = false, int passes = 1) const {
    return {double(m_.startup_vector), passes * bytes * (slow ? m_.vector_slow_divisor : 1) / m_.vector_bytes_per_cycle};
  }
  double event() const { return m_.event_cycles; }
  double cross_flag() const { return m_.cross_core_flag_cycles; }
  double barrier() const { return m_.barrier_cycles; }
  double memory_bytes_per_cycle() const { return m_.dram_gb_per_s * 1e9 * m_.hbm_efficiency / (m_.freq_mhz * 1e6); }
  double l2_bytes_per_cycle() const { return m_.l2_bytes_per_cycle; }
  double us(double cycles) const { return cycles / m_.freq_mhz; }
  const flashmla::Machine& machine() const { return m_; }

 private:
  flashmla::Machine m_;
};

}  // namespace twin
