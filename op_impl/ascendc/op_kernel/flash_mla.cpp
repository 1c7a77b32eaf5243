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
  // A variant for each configuration of tiling/ascend_configs.h: path and kv_tile are constants in it. CANN's compiler reads the keys as numbers.
#define FLASHMLA_VARIANT(path_of_key, keys) \
  data.path = path_of_key;                  \
  data.blocks.kv_tile = keys;               \
  flashmla::flash_mla_kernel<path_of_key>(call)
  if (TILING_KEY_IS(1016)) {
    FLASHMLA_VARIANT(flashmla::kAbsorbed, 16);
  } else if (TILING_KEY_IS(1032)) {
    FLASHMLA_VARIANT(flashmla::kAbsorbed, 32);
  } else if (TILING_KEY_IS(1064)) {
    FLASHMLA_VARIANT(flashmla::kAbsorbed, 64);
  } else if (TILING_KEY_IS(1096)) {
    FLASHMLA_VARIANT(flashmla::kAbsorbed, 96);
  } else if (TILING_KEY_IS(1128)) {
    FLASHMLA_VARIANT(flashmla::kAbsorbed, 128);
  } else if (TILING_KEY_IS(1256)) {
    FLASHMLA_VARIANT(flashmla::kAbsorbed, 256);
  } else if (TILING_KEY_IS(2016)) {
    FLASHMLA_VARIANT(flashmla::kExpanded, 16);
  } else if (TILING_KEY_IS(2032)) {
    FLASHMLA_VARIANT(flashmla::kExpanded, 32);
  } else if (TILING_KEY_IS(2064)) {
    FLASHMLA_VARIANT(flashmla::kExpanded, 64);
  } else if (TILING_KEY_IS(2096)) {
    FLASHMLA_VARIANT(flashmla::kExpanded, 96);
  } else if (TILING_KEY_IS(2128)) {
    FLASHMLA_VARIANT(flashmla::kExpanded, 128);
  } else if (TILING_KEY_IS(2256)) {
    FLASHMLA_VARIANT(flashmla::kExpanded, 256);
  }
#undef FLASHMLA_VARIANT
}
