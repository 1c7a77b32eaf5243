#define FLASHMLA_NS avx512
#include "op_impl/cpu/isa-inl.h"
