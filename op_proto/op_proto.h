// WHAT the operators are: inputs, outputs, attributes, legal dtypes, shape and dtype inference, argument checks.
// Framework-free: MindSpore's AOT entry, the Python registration and the CANN registration all read these lists.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "op_proto/op_list.h"

namespace flashmla {

using Shape = std::vector<int64_t>;  // -1 is a dimension not known yet, {-2} a rank not known yet

struct TensorDesc {
  bool present = false;
  int32_t dtype = kFloat32;  // DType, or -1 for one that no operator takes
  Shape shape;
};

// Shapes and dtypes of the outputs; inputs in the order of the list. They throw std::runtime_error with words that
// name the argument when a rank is wrong; unknown dimensions pass through.
Shape infer_flash_mla_shape(const Shape &hidden_states);
std::vector<Shape> infer_flash_mla_with_kvcache_shape(const Shape &q, int64_t head_dim_v);
std::vector<Shape> infer_merge_attention_states_shape(const Shape &out_a, const Shape &lse_a);

// The outputs' dtypes from the inputs', in the framework's own numbers: they pass through, and float32's is handed in.
template <typename Type>
Type infer_flash_mla_dtype(const std::vector<Type> &inputs) { return inputs[0]; }
template <typename Type>
std::vector<Type> infer_flash_mla_with_kvcache_dtype(const std::vector<Type> &inputs, Type float32) { return {inputs[0], float32}; }
template <typename Type>
std::vector<Type> infer_merge_attention_states_dtype(const std::vector<Type> &inputs, Type float32) { return {inputs[0], float32}; }

// Every argument's rank, shape and dtype, all dimensions known. "" when legal, else the text of the error.
std::string check_flash_mla(const std::vector<TensorDesc> &inputs, const FlashMLAAttrs &attrs);
std::string check_flash_mla_with_kvcache(const std::vector<TensorDesc> &inputs, const FlashMLAWithKVCacheAttrs &attrs);
std::string check_merge_attention_states(const std::vector<TensorDesc> &inputs);

// The arguments of every operator and the layout of packed weights as JSON: the Python side registers and packs by it.
const std::string &proto_json();

}  // namespace flashmla
