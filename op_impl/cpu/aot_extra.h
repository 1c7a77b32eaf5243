// How an operator reads its attributes. MindSpore hands the kernel an object whose virtual functions stand in this order;
// only they are called, so nothing else of the framework's class has to be known and nothing of its headers is needed.
#pragma once

#include <cstdint>
#include <string>

class AotExtra {
 public:
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;
  virtual bool GetAttrBool(std::string name) = 0;
  virtual int64_t GetAttrInt(std::string name) = 0;
  virtual float GetAttrFloat(std::string name) = 0;
};
