#include "op_impl/twin/engine/fiber.h"

#include <sys/mman.h>

#include <new>

namespace twin {
namespace {
constexpr size_t kStackBytes = 512 * 1024;
}

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) throw std::bad_alloc();
  getcontext(&inside_);
  inside_.uc_stack.ss_sp = stack_;
  inside_.uc_stack.ss_size = kStackBytes;
  inside_.uc_link = &outside_;
  const auto self = reinterpret_cast<unsigned long long>(this);  // makecontext passes ints only
  makecontext(&inside_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
}

Fiber::~Fiber() { munmap(stack_, kStackBytes); }

void Fiber::enter(unsigned low, unsigned high) {
  Fiber* self = reinterpret_cast<Fiber*>(static_cast<unsigned long long>(high) << 32 | low);
  try {
    self->body_();
  } catch (...) {
    self->error_ = std::current_exception();
  }
  self->ended_ = true;
}

void Fiber::resume() {
  swapcontext(&outside_, &inside_);
  if (error_) std::rethrow_exception(error_);
}

void Fiber::yield() { swapcontext(&inside_, &outside_); }

}  // namespace twin
