// The operators of the library called as MindSpore calls them, without MindSpore.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

// Stands in for mindspore::AotExtra: the same virtual functions in the same order, then the same two members.
class AotExtra {
 public:
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) { return ints.count(name) || floats.count(name); }
  virtual bool GetAttrBool(std::string name) { return GetAttrInt(name) != 0; }
  virtual int64_t GetAttrInt(std::string name) { return ints.at(name); }
  virtual float GetAttrFloat(std::string name) { return floats.at(name); }
  virtual std::string GetAttrStr(std::string) { throw std::out_of_range("no string attributes"); }
  virtual std::vector<int64_t> GetAttrIntVec(std::string) { return {}; }
  virtual std::vector<float> GetAttrFloatVec(std::string) { return {}; }
  virtual std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string) { return {}; }
  virtual std::vector<std::vector<float>> GetAttrFloat2DVec(std::string) { return {}; }

  std::vector<size_t> workspace;
  void* kernel_data = nullptr;
  std::map<std::string, int64_t> ints;  // behind the two members, which the library may use
  std::map<std::string, float> floats;
};

using Init = int(int*, int64_t**, const char**, AotExtra*);
using Kernel = int(int, void**, int*, int64_t**, const char**, void*, void*);

extern "C" {
Init FlashMLAInit, FlashMLAWithKVCacheInit, MergeAttentionStatesInit;
Kernel FlashMLA, FlashMLAWithKVCache, MergeAttentionStates;
const char* fm_last_error(void);
const char* fm_isa(void);
int fm_set_num_threads(int);
int fm_num_threads();
}

using Rng = std::mt19937;

enum class Type { f32, f16, bf16, i32, none };

inline int bytes_of(Type type) { return type == Type::f32 || type == Type::i32 ? 4 : type == Type::none ? 0 : 2; }

inline const char* name_of(Type type) {
  static const char* const names[] = {"float32", "float16", "bfloat16", "int32", "none"};
  return names[static_cast<int>(type)];
}

// Memory of exactly the tensor's size on the heap of its own, so that AddressSanitizer sees one element too many.
struct Tensor {
  Type type = Type::none;
  std::vector<int64_t> shape;
  std::vector<unsigned char> data;

  Tensor() = default;
  Tensor(Type type_, std::vector<int64_t> shape_, float fill = 0.0f) : type(type_), shape(std::move(shape_)) {
    data = std::vector<unsigned char>(size() * bytes_of(type));
    for (int64_t i = 0; i < size(); ++i) set(i, fill);
  }
  static Tensor ints(const std::vector<int32_t>& values, std::vector<int64_t> shape) {
    Tensor out(Type::i32, std::move(shape));
    if (!values.empty()) std::memcpy(out.data.data(), values.data(), values.size() * 4);
    return out;
  }
  static Tensor normal(Type type, std::vector<int64_t> shape, Rng& rng, float scale = 1.0f, float mean = 0.0f) {
    Tensor out(type, std::move(shape));
    std::normal_distribution<float> draw(mean, scale);
    for (int64_t i = 0; i < out.size(); ++i) out.set(i, draw(rng));
    return out;
  }
  int64_t size() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  float get(int64_t i) const {
    if (type == Type::f32) return read<float>(i);
    if (type == Type::i32) return static_cast<float>(read<int32_t>(i));
    uint16_t bits = read<uint16_t>(i);
    if (type == Type::f16) {
      int exponent = bits >> 10 & 31;
      float fraction = static_cast<float>(bits & 1023) / 1024;
      float x = exponent == 31 ? (fraction != 0 ? NAN : INFINITY) : exponent ? std::ldexp(1 + fraction, exponent - 15) : std::ldexp(fraction, -14);
      return bits >> 15 ? -x : x;
    }
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  void set(int64_t i, float x) {
    if (type == Type::f32) return write(i, x);
    if (type == Type::i32) return write(i, static_cast<int32_t>(x));
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (type == Type::bf16) return write(i, static_cast<uint16_t>(bits >> 16));
    if (std::isnan(x)) return write(i, static_cast<uint16_t>(0x7E00));
    int exponent;  // test data is normal in float16 or tiny: truncation and a flush to zero do
    float fraction = std::frexp(std::fabs(x), &exponent);
    uint16_t half = x == 0 || exponent < -13 ? 0 : static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(fraction * 2048) & 1023));
    write(i, static_cast<uint16_t>(half | (bits >> 31) << 15));
  }

 private:
  template <class T>
  T read(int64_t i) const {
    T x;
    std::memcpy(&x, &data.at(i * sizeof(T)), sizeof(T));
    return x;
  }
  template <class T>
  void write(int64_t i, T x) {
    std::memcpy(&data.at(i * sizeof(T)), &x, sizeof(T));
  }
};

// One call as the framework makes it: absent inputs are null with dtype "none"; outputs are filled with NaN first, so that an element nobody wrote shows.
inline void call(Init init, Kernel kernel, AotExtra& extra, std::vector<Tensor*> tensors) {
  std::vector<void*> params;
  std::vector<int> ndims;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  static unsigned char empty[1];
  for (Tensor* t : tensors) {
    params.push_back(t->type == Type::none ? nullptr : t->data.empty() ? empty : t->data.data());
    ndims.push_back(static_cast<int>(t->shape.size()));
    shapes.push_back(t->shape.data());
    dtypes.push_back(name_of(t->type));
  }
  int code = init(ndims.data(), shapes.data(), dtypes.data(), &extra);
  if (code == 0) code = kernel(static_cast<int>(params.size()), params.data(), ndims.data(), shapes.data(), dtypes.data(), nullptr, &extra);
  if (code != 0) throw std::runtime_error("the operator returned " + std::to_string(code));
}
