// A pool of our own: the framework calls from changing threads, and a pool tied to the caller's thread would be rebuilt
// on each call.
#pragma once

#include <cstdint>

namespace flashmla {

class ThreadPool {
 public:
  using Task = void (*)(const void *context, int64_t item, int thread);

  // The process-wide pool. It is never destroyed: a worker may still be asleep when static objects go away.
  static ThreadPool &instance();

  int num_threads() const;
  void set_num_threads(int n);  // 1..kMaxThreads, else std::invalid_argument

  // Holds the pool for one operator call; calls from several threads queue here.
  class Session {
   public:
    explicit Session(ThreadPool &pool);
    ~Session();
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;

    int num_threads() const { return threads_; }
    // Runs task(context, item, thread) for item in [0, items), handed out one by one; returns when all are done.
    // The caller is thread 0. What one run wrote is visible to the next.
    void run(int64_t items, Task task, const void *context);

   private:
    ThreadPool &pool_;
    int threads_;
  };

  static constexpr int kMaxThreads = 256;

 private:
  ThreadPool();
  struct State;
  State *state_;
};

}  // namespace flashmla
