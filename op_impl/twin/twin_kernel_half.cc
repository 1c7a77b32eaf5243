#define DTYPE_HIDDEN_STATES half
#define flash_mla flash_mla_half
#include "op_impl/ascendc/op_kernel/flash_mla.cpp"
