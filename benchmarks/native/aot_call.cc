// An operator called as MindSpore calls it, without MindSpore: what is left of a call's time when the framework is taken away.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Stands in for mindspore::AotExtra: the same virtual functions in the same order, then the same two members.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual bool HasAttr(std::string name) { return ints.count(name) != 0 || floats.count(name) != 0; }
  virtual bool GetAttrBool(std::string name) { return ints.at(name) != 0; }
  virtual int64_t GetAttrInt(std::string name) { return ints.at(name); }
  virtual float GetAttrFloat(std::string name) { return floats.at(name); }
  virtual std::string GetAttrStr(std::string) { return {}; }
  virtual std::vector<int64_t> GetAttrIntVec(std::string) { return {}; }
  virtual std::vector<float> GetAttrFloatVec(std::string) { return {}; }
  virtual std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string) { return {}; }
  virtual std::vector<std::vector<float>> GetAttrFloat2DVec(std::string) { return {}; }

  std::vector<size_t> workspace;
  void *kernel_data = nullptr;
  std::map<std::string, int64_t> ints;
  std::map<std::string, float> floats;
};

using Init = int (*)(int *, int64_t **, const char **, void *);
using Kernel = int (*)(int, void **, int *, int64_t **, const char **, void *, void *);

template <typename F>
int reported(const F &f) {
  try {
    return f();
  } catch (const std::exception &e) {
    std::fprintf(stderr, "bench: %s\n", e.what());
    return 1;
  }
}

}  // namespace

EXPORT void *bench_attributes() { return new Attributes; }
EXPORT void bench_set_int(void *attributes, const char *name, int64_t value) { static_cast<Attributes *>(attributes)->ints[name] = value; }
EXPORT void bench_set_float(void *attributes, const char *name, float value) { static_cast<Attributes *>(attributes)->floats[name] = value; }

// 0, or what the operator's Init returned; 1 with the reason on stderr when it threw.
EXPORT int bench_init(void *init, int *ndims, int64_t **shapes, const char **dtypes, void *attributes) {
  return reported([&] { return reinterpret_cast<Init>(init)(ndims, shapes, dtypes, attributes); });
}

// Seconds that one call takes; negative when it failed, with the reason on stderr.
EXPORT double bench_call(void *kernel, int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *attributes) {
  const auto start = std::chrono::steady_clock::now();
  const int code = reported([&] { return reinterpret_cast<Kernel>(kernel)(count, data, ndims, shapes, dtypes, nullptr, attributes); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return code == 0 ? seconds : -1;
}
