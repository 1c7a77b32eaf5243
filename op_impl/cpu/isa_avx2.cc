#define FLASHMLA_NS avx2
#include "op_impl/cpu/isa-inl.h"
