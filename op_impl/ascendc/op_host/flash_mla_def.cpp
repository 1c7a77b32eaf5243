// The operator as CANN knows it: names and order are those of op_list.h, which MindSpore's registration is built from too.
#include "op_proto/op_list.h"
#include "register/op_def_registry.h"

namespace ops {

class FlashMLA : public OpDef {
 public:
  explicit FlashMLA(const char *name) : OpDef(name) {
    const std::vector<ge::DataType> floats = {ge::DT_FLOAT16, ge::DT_BF16};
    const std::vector<ge::DataType> int32s = {ge::DT_INT32, ge::DT_INT32};
    const std::vector<ge::DataType> float32s = {ge::DT_FLOAT, ge::DT_FLOAT};
    const std::vector<ge::Format> formats = {ge::FORMAT_ND, ge::FORMAT_ND};
    const auto types_of = [&](int input) -> const std::vector<ge::DataType> & {
      switch (input) {
        case flashmla::FlashMLAIn::block_table:
        case flashmla::FlashMLAIn::q_seq_lens:
        case flashmla::FlashMLAIn::context_lens: return int32s;
        case flashmla::FlashMLAIn::rope_table: return float32s;
        default: return floats;
      }
    };
#define FLASHMLA_INPUT(name, required)                                                                              \
  this->Input(#name).ParamType(required ? REQUIRED : OPTIONAL).DataType(types_of(flashmla::FlashMLAIn::name)).Format(formats) \
      .UnknownShapeFormat(formats).AutoContiguous();
#define FLASHMLA_OUTPUT(name, required) \
  this->Output(#name).ParamType(REQUIRED).DataType(floats).Format(formats).UnknownShapeFormat(formats);
#define FLASHMLA_ATTR_int Int
#define FLASHMLA_ATTR_float Float
#define FLASHMLA_ATTR(name, type) this->Attr(#name).AttrType(REQUIRED).FLASHMLA_ATTR_##type();
    FLASH_MLA_INPUTS(FLASHMLA_INPUT)
    FLASH_MLA_OUTPUTS(FLASHMLA_OUTPUT)
    FLASH_MLA_ATTRS(FLASHMLA_ATTR)
#undef FLASHMLA_INPUT
#undef FLASHMLA_OUTPUT
#undef FLASHMLA_ATTR
    OpAICoreConfig config;
    config.DynamicCompileStaticFlag(true).DynamicRankSupportFlag(true).DynamicShapeSupportFlag(true).NeedCheckSupportFlag(false);
    this->AICore().AddConfig("ascend950", config);
  }
};

OP_ADD(FlashMLA);

}  // namespace ops
