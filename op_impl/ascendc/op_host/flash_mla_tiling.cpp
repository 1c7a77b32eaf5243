// Tiling as CANN calls it: shapes and attributes to KernelData, size of the workspace, number of cores. The only host file that sees both
// CANN and the tiling.
#include <cstdio>
#include <exception>

#include "op_impl/ascendc/op_host/make_kernel_data.h"
#include "register/op_impl_registry.h"
#include "tiling/ascend_configs.h"
#include "tiling/platform/platform_ascendc.h"

namespace {

using flashmla::FlashMLAIn;

// All cores of a launch wait for each other at SyncAll: they must be there together.
constexpr uint32_t kBatchMode = 1;

struct CompileInfo {};

int32_t dtype_of(const gert::TilingContext *context, int input) {
  const gert::CompileTimeTensorDesc *desc = context->GetInputDesc(input);
  if (desc == nullptr) return flashmla::kFloat32;
  switch (desc->GetDataType()) {
    case ge::DT_FLOAT16: return flashmla::kFloat16;
    case ge::DT_BF16: return flashmla::kBFloat16;
    default: return flashmla::kFloat32;  // refused later, by name
  }
}

template <typename T>
bool read_attr(const gert::RuntimeAttrs *attrs, int index, T *value) {
  const T *stored = attrs->GetAttrPointer<T>(index);
  if (stored == nullptr) return false;
  *value = *stored;
  return true;
}

bool read_attrs(const gert::RuntimeAttrs *attrs, flashmla::FlashMLAAttrs *a) {
  if (attrs == nullptr) return false;
  int index = 0;
  bool complete = true;
#define FLASHMLA_READ_ATTR(name, type) complete = read_attr(attrs, index++, &a->name) && complete;
  FLASH_MLA_ATTRS(FLASHMLA_READ_ATTR)
#undef FLASHMLA_READ_ATTR
  return complete;
}

// [blocks, page, d] behind the block table; of four dimensions [B, S, 1, d], or [B, 1, S, d], where every sequence has a place of its own.
flashmla::CacheLayout layout_of(const gert::Shape &cache) {
  const int64_t d = cache.GetDim(cache.GetDimNum() - 1);
  if (cache.GetDimNum() < 4) return flashmla::paged_cache(cache.GetDim(1), d);
  return cache.GetDim(1) == 1 ? flashmla::bnsd_cache(cache.GetDim(2), 1, d) : flashmla::bsnd_cache(cache.GetDim(1), cache.GetDim(2), d);
}

// Memories and rates of the chip family, number of cores and size of L2 of this very chip.
flashmla::Machine machine_of(const gert::TilingContext *context) {
  flashmla::Machine machine = *flashmla::find_machine("ascend950pr_9599");
  const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
  machine.name = "this Ascend 950";
  machine.cores = static_cast<int32_t>(platform.GetCoreNumAic());
  uint64_t bytes = 0;
  platform.GetCoreMemSize(platform_ascendc::CoreMemType::L2, bytes);
  if (bytes > 0) machine.l2_bytes = static_cast<int64_t>(bytes);
  return machine;
}

ge::graphStatus tiling(gert::TilingContext *context) {
  flashmla::KernelCall call = {};
  const gert::StorageShape *shapes[FlashMLAIn::first_optional];
  for (int i = 0; i < FlashMLAIn::first_optional; ++i) {
    shapes[i] = context->GetInputShape(i);
    if (shapes[i] == nullptr) return ge::GRAPH_FAILED;
  }
  if (!read_attrs(context->GetAttrs(), &call.attrs)) return ge::GRAPH_FAILED;
  const gert::Shape &hidden = shapes[FlashMLAIn::hidden_states]->GetStorageShape(), &cache = shapes[FlashMLAIn::kv_cache]->GetStorageShape();
  const gert::Shape &table = shapes[FlashMLAIn::block_table]->GetStorageShape();
  call.hidden_size = hidden.GetDim(hidden.GetDimNum() - 1);
  call.num_tokens = hidden.GetDimNum() == 2 ? hidden.GetDim(0) : hidden.GetDim(0) * hidden.GetDim(1);
  call.batch = table.GetDim(0);
  call.max_blocks = table.GetDim(1);
  call.cache = layout_of(cache);
  call.act_dtype = dtype_of(context, FlashMLAIn::hidden_states);
  call.weight_dtype = dtype_of(context, FlashMLAIn::w_q);
  call.cache_dtype = dtype_of(context, FlashMLAIn::kv_cache);
  call.has_b_q_a = context->GetOptionalInputShape(FlashMLAIn::b_q_a) != nullptr;
  call.has_b_kv_a = context->GetOptionalInputShape(FlashMLAIn::b_kv_a) != nullptr;
  call.has_b_o = context->GetOptionalInputShape(FlashMLAIn::b_o) != nullptr;
  call.has_residual = context->GetOptionalInputShape(FlashMLAIn::residual) != nullptr;

  flashmla::KernelData *data = context->GetTilingData<flashmla::KernelData>();
  size_t *workspace = context->GetWorkspaceSizes(1);
  if (data == nullptr || workspace == nullptr) return ge::GRAPH_FAILED;
  try {
    *data = flashmla::make_kernel_data(call, machine_of(context));
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return ge::GRAPH_FAILED;
  }
  const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
  *workspace = static_cast<size_t>(data->workspace.total_bytes) + platform.GetLibApiWorkSpaceSize();
  context->SetTilingKey(flashmla::tiling_key(data->path, data->blocks.kv_tile));
  context->SetScheduleMode(kBatchMode);
  return context->SetBlockDim(static_cast<uint32_t>(data->cores));
}

ge::graphStatus tiling_parse(gert::TilingParseContext *) { return ge::GRAPH_SUCCESS; }

}  // namespace

namespace optiling {
IMPL_OP_OPTILING(FlashMLA).Tiling(tiling).TilingParse<CompileInfo>(tiling_parse);
}  // namespace optiling
