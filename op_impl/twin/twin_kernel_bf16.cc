#define DTYPE_HIDDEN_STATES bfloat16_t
#define flash_mla flash_mla_bf16
#include "op_impl/ascendc/op_kernel/flash_mla.cpp"
