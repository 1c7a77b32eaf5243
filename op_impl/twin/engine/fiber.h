// A core's program as a coroutine with a stack of its own.
#pragma once

#include <ucontext.h>

#include <exception>
#include <functional>

namespace twin {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();  // runs until it yields or ends; throws what the body threw
  void yield();   // called from inside
  bool ended() const { return ended_; }

 private:
  static void enter(unsigned low, unsigned high);
  std::function<void()> body_;
  ucontext_t inside_, outside_;
  void* stack_;
  bool ended_ = false;
  std::exception_ptr error_;
};

}  // namespace twin
