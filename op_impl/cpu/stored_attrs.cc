// Attributes of an operator that is called without the framework's graph: the kernels' entry reads them as it reads MindSpore's.
#include <map>
#include <string>

#include "op_impl/cpu/aot_extra.h"
#include "op_impl/cpu/c_api.h"

namespace {

class StoredAttrs final : public AotExtra {
 public:
  StoredAttrs(const char *const *names, const double *values, int count) {
    for (int i = 0; i < count; ++i) values_[names[i]] = values[i];
  }
  bool HasAttr(std::string name) override { return values_.count(name) > 0; }
  bool GetAttrBool(std::string name) override { return values_.at(name) != 0; }
  int64_t GetAttrInt(std::string name) override { return static_cast<int64_t>(values_.at(name)); }
  float GetAttrFloat(std::string name) override { return static_cast<float>(values_.at(name)); }

 private:
  std::map<std::string, double> values_;  // not written after construction: calls on several threads read it
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void *fm_new_attrs(const char *const *names, const double *values, int count) {
  try {
    return static_cast<AotExtra *>(new StoredAttrs(names, values, count));
  } catch (const std::exception &) {
    return nullptr;
  }
}
