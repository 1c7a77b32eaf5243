// Entry point of the custom operator FlashMLA for ascend950.
#include "flash_mla_kernel.h"

using flashmla::FlashMLAIn;

#define FLASHMLA_PARAMETER(name, required) GM_ADDR name,
#define FLASHMLA_ARGUMENT(name, required) name,

extern "C" __global__ __aicore__ void flash_mla(FLASH_MLA_INPUTS(FLASHMLA_PARAMETER) GM_ADDR out, GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(flashmla::KernelData);
  GET_TILING_DATA_WITH_STRUCT(flashmla::KernelData, data, tiling);
  const flashmla::Call<DTYPE_HIDDEN_STATES> call = {data, {FLASH_MLA_INPUTS(FLASHMLA_ARGUMENT)}, out, AscendC::GetUserWorkspace(workspace)};
  flashmla::flash_mla_kernel(call);
}
