#include "op_impl/cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace flashmla {

#define FLASHMLA_DECLARE(ns) namespace ns { extern const Kernels kKernels; }
FLASHMLA_DECLARE(generic)
#ifdef FLASHMLA_HAVE_AVX2
FLASHMLA_DECLARE(avx2)
#endif
#ifdef FLASHMLA_HAVE_AVX512
FLASHMLA_DECLARE(avx512)
#endif

namespace {

struct Candidate {
  Isa isa;
  bool (*supported)();
};

#ifdef FLASHMLA_HAVE_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma");
}
#endif
#ifdef FLASHMLA_HAVE_AVX2
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif
bool always() { return true; }

const Candidate kCandidates[] = {
#ifdef FLASHMLA_HAVE_AVX512
    {{"avx512", "cpu_avx512", &avx512::kKernels}, has_avx512},
#endif
#ifdef FLASHMLA_HAVE_AVX2
    {{"avx2", "cpu_avx2", &avx2::kKernels}, has_avx2},
#endif
    {{"generic", "cpu_generic", &generic::kKernels}, always},
};

const Isa &choose() {
  const char *wanted = std::getenv("MS_FLASHMLA_ISA");
  std::string names;
  for (const Candidate &c : kCandidates) {
    if (wanted == nullptr || *wanted == '\0') {
      if (c.supported()) return c.isa;
    } else if (std::string(wanted) == c.isa.name) {
      if (c.supported()) return c.isa;
      throw std::runtime_error(std::string("MS_FLASHMLA_ISA is '") + wanted + "', which this processor does not support");
    }
    names += (names.empty() ? "" : ", ") + std::string(c.isa.name);
  }
  throw std::runtime_error(std::string("MS_FLASHMLA_ISA is '") + wanted + "', expected one of " + names);
}

}  // namespace

const Isa &chosen_isa() {
  static const Isa &isa = choose();
  return isa;
}

}  // namespace flashmla
