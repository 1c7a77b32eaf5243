// A JSON text built value by value; commas and quoting are taken care of.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace flashmla {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }

  JsonWriter& key(const std::string& name) {
    separate();
    quote(name);
    text_ += ": ";
    fresh_ = true;
    return *this;
  }

  JsonWriter& value(const std::string& text) {
    separate();
    quote(text);
    return *this;
  }
  JsonWriter& value(const char* text) { return value(std::string(text)); }
  JsonWriter& value(bool truth) { return raw(truth ? "true" : "false"); }
  JsonWriter& value(int64_t number) { return raw(std::to_string(number)); }
  JsonWriter& value(int32_t number) { return raw(std::to_string(number)); }
  JsonWriter& value(double number) {
    if (!std::isfinite(number)) return raw("null");  // JSON has no word for it
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.10g", number);
    return raw(digits);
  }

  template <typename T>
  JsonWriter& member(const char* name, const T& content) { return key(name).value(content); }

  const std::string& text() const { return text_; }

 private:
  void separate() {
    if (!fresh_) text_ += ", ";
    fresh_ = false;
  }
  JsonWriter& open(char bracket) {
    separate();
    text_ += bracket;
    fresh_ = true;
    return *this;
  }
  JsonWriter& close(char bracket) {
    text_ += bracket;
    fresh_ = false;
    return *this;
  }
  JsonWriter& raw(const std::string& token) {
    separate();
    text_ += token;
    return *this;
  }
  void quote(const std::string& text) {
    text_ += '"';
    for (char c : text) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\u%04x", c);
        text_ += escape;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  bool fresh_ = true;  // nothing stands before the next value in its bracket
};

}  // namespace flashmla
