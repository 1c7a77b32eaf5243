#define FLASHMLA_NS generic
#include "op_impl/cpu/isa-inl.h"
