// The operators' argument lists and the packed weights' layout as JSON: what the Python package knows of them.
#include "op_proto/json_writer.h"
#include "op_proto/op_proto.h"

namespace flashmla {
namespace {

struct Argument { const char *name; bool required; };
struct Attribute { const char *name, *type; };

void write_op(JsonWriter &json, const char *name, const std::vector<Argument> &inputs, const std::vector<Argument> &outputs,
              const std::vector<Attribute> &attrs) {
  json.begin_object().member("name", name);
  auto write_arguments = [&](const char *key, const std::vector<Argument> &arguments) {
    json.key(key).begin_array();
    for (const Argument &a : arguments) json.begin_object().member("name", a.name).member("required", a.required).end_object();
    json.end_array();
  };
  write_arguments("inputs", inputs);
  write_arguments("outputs", outputs);
  json.key("attrs").begin_array();
  for (const Attribute &a : attrs) json.begin_object().member("name", a.name).member("type", a.type).end_object();
  json.end_array().end_object();
}

#define FLASHMLA_ARGUMENT(name, required) {#name, required != 0},
#define FLASHMLA_ATTRIBUTE(name, type) {#name, #type},
#define FLASHMLA_WRITE_OP(name, OP) \
  write_op(json, name, {OP##_INPUTS(FLASHMLA_ARGUMENT)}, {OP##_OUTPUTS(FLASHMLA_ARGUMENT)}, {OP##_ATTRS(FLASHMLA_ATTRIBUTE)})

std::string build_proto_json() {
  JsonWriter json;
  json.begin_object().key("ops").begin_array();
  FLASHMLA_WRITE_OP("FlashMLA", FLASH_MLA);
  FLASHMLA_WRITE_OP("FlashMLAWithKVCache", FLASH_MLA_WITH_KVCACHE);
  FLASHMLA_WRITE_OP("MergeAttentionStates", MERGE_ATTENTION_STATES);
  json.end_array();
  json.key("packed_weights").begin_object().member("panel", kPanel).member("align", kPanelAlign).end_object();
  return json.end_object().text();
}

}  // namespace

const std::string &proto_json() {
  static const std::string json = build_proto_json();
  return json;
}

}  // namespace flashmla
