// The body of a translation unit that compiles the kernels for one ISA: it defines the table that dispatch.cc picks from.
#pragma once

#include "op_impl/cpu/dispatch.h"
#include "op_impl/cpu/flash_mla-inl.h"

namespace flashmla {
namespace FLASHMLA_NS {

extern const Kernels kKernels;
const Kernels kKernels = {flash_mla, flash_mla_with_kvcache, merge_attention_states};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
