#include "op_impl/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace flashmla {
namespace {

// Between two stages of one call a worker spins, since waking a sleeper costs about 50 us here; between calls it sleeps.
constexpr int kSpinRounds = 20000;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int default_threads() {
  if (const char *text = std::getenv("MS_FLASHMLA_NUM_THREADS")) {
    char *end = nullptr;
    const long n = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && n >= 1 && n <= ThreadPool::kMaxThreads) return static_cast<int>(n);
    throw std::invalid_argument(std::string("MS_FLASHMLA_NUM_THREADS is '") + text + "', expected 1 to " +
                                std::to_string(ThreadPool::kMaxThreads));
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::min(CPU_COUNT(&set), ThreadPool::kMaxThreads);
  return std::max(1u, std::min(std::thread::hardware_concurrency(), unsigned(ThreadPool::kMaxThreads)));
}

}  // namespace

// One job at a time. generation names it; a worker takes part when its index is below `threads`.
struct ThreadPool::State {
  std::mutex session;                  // one operator call at a time
  std::atomic<int> threads{0};         // 0: not decided yet
  int started = 0;                     // workers that exist, guarded by session

  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> generation{0};
  std::atomic<int64_t> next{0};        // next item
  std::atomic<int> running{0};         // workers that have not finished this generation
  int64_t items = 0;
  int active = 0;                      // threads of this generation, the caller included
  Task task = nullptr;
  void *context = nullptr;

  void work(int thread) {
    for (int64_t item = next.fetch_add(1, std::memory_order_relaxed); item < items;
         item = next.fetch_add(1, std::memory_order_relaxed))
      task(context, item, thread);
  }

  void worker(int thread, uint64_t seen) {
    for (;;) {
      int rounds = 0;
      while (generation.load(std::memory_order_acquire) == seen) {
        if (++rounds < kSpinRounds) {
          pause_cpu();
        } else {
          std::unique_lock<std::mutex> lock(mutex);
          wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
        }
      }
      // Every worker reports for every generation, so that none can still look at a job when the next is set up.
      seen = generation.load(std::memory_order_acquire);
      if (thread < active) work(thread);
      running.fetch_sub(1, std::memory_order_acq_rel);
    }
  }
};

ThreadPool::ThreadPool() : state_(new State) {}

ThreadPool &ThreadPool::instance() {
  static ThreadPool *pool = new ThreadPool;
  static const int hooked = pthread_atfork(nullptr, nullptr, [] {
    // The child has this thread alone, and locks that others may have held.
    pool->state_ = new State;
  });
  (void)hooked;
  return *pool;
}

int ThreadPool::num_threads() const {
  int n = state_->threads.load();
  if (n == 0) {
    n = default_threads();
    int undecided = 0;
    if (!state_->threads.compare_exchange_strong(undecided, n)) n = undecided;
  }
  return n;
}

void ThreadPool::set_num_threads(int n) {
  if (n < 1 || n > kMaxThreads)
    throw std::invalid_argument("num_threads is " + std::to_string(n) + ", expected 1 to " + std::to_string(kMaxThreads));
  state_->threads.store(n);
}

ThreadPool::Session::Session(ThreadPool &pool) : pool_(pool), threads_(pool.num_threads()) {
  State &s = *pool.state_;
  s.session.lock();
  while (s.started < threads_ - 1) {
    const int thread = s.started + 1;
    try {
      std::thread(&State::worker, &s, thread, s.generation.load()).detach();
    } catch (const std::system_error &) {
      threads_ = thread;  // the system gives no more threads: go on with those there are
      break;
    }
    ++s.started;
  }
}

ThreadPool::Session::~Session() { pool_.state_->session.unlock(); }

void ThreadPool::Session::run(int64_t items, Task task, void *context) {
  State &s = *pool_.state_;
  if (items <= 1 || threads_ == 1) {
    for (int64_t item = 0; item < items; ++item) task(context, item, 0);
    return;
  }
  s.items = items;
  s.task = task;
  s.context = context;
  s.active = threads_;
  s.next.store(0, std::memory_order_relaxed);
  s.running.store(s.started, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.generation.fetch_add(1, std::memory_order_acq_rel);
  }
  s.wake.notify_all();
  s.work(0);
  for (int rounds = 0; s.running.load(std::memory_order_acquire) != 0; ++rounds) {
    if (rounds < kSpinRounds) pause_cpu(); else std::this_thread::yield();
  }
}

}  // namespace flashmla
