// Shape and dtype of the output: those of hidden_states.
#include "op_proto/op_list.h"
#include "register/op_impl_registry.h"

namespace {

ge::graphStatus infer_shape(gert::InferShapeContext *context) {
  const gert::Shape *hidden = context->GetInputShape(flashmla::FlashMLAIn::hidden_states);
  gert::Shape *out = context->GetOutputShape(0);
  if (hidden == nullptr || out == nullptr) return ge::GRAPH_FAILED;
  *out = *hidden;
  return ge::GRAPH_SUCCESS;
}

ge::graphStatus infer_data_type(gert::InferDataTypeContext *context) {
  return context->SetOutputDataType(0, context->GetInputDataType(flashmla::FlashMLAIn::hidden_states));
}

}  // namespace

namespace ops {
IMPL_OP(FlashMLA).InferShape(infer_shape).InferDataType(infer_data_type);
}  // namespace ops
