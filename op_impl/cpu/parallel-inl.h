// The pool and the scratch memory as the kernels use them: a lambda over items.
#pragma once

#include "op_impl/cpu/scratch.h"
#include "op_impl/cpu/thread_pool.h"

namespace flashmla {
namespace FLASHMLA_NS {

class Workers {
 public:
  Workers(ThreadPool::Session &session, Scratch &scratch) : session_(session), scratch_(scratch) {}
  int threads() const { return session_.num_threads(); }
  Scratch &scratch() { return scratch_; }

  // f(item, thread) for item in [0, items), in parallel.
  template <typename F>
  void run(int64_t items, const F &f) {
    session_.run(items, [](const void *context, int64_t item, int thread) { (*static_cast<const F *>(context))(item, thread); },
                 &f);
  }

 private:
  ThreadPool::Session &session_;
  Scratch &scratch_;
};

}  // namespace FLASHMLA_NS
}  // namespace flashmla
