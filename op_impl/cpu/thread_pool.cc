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

// Moves the calling thread off processor `cpu` if it is there. A worker that wakes beside its caller would take turns with it until the system
// balances the load, which takes longer than a decode step (2048 keys: 403 us with both there, 281 apart; a short sleep in place of the
// mask did not part them). The mask is put back only while it is still the one set here: of somebody else a new mask stays, save in the microsecond between.
void leave_processor(int cpu) {
  if (cpu < 0 || sched_getcpu() != cpu) return;
  cpu_set_t allowed, others, now;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  if (sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &others)) sched_setaffinity(0, sizeof allowed, &allowed);
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int default_threads() {
  if (const char *text = std::getenv("MS_FLASHMLA_NUM_THREADS"); text != nullptr && *text != '\0') {
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

// One job at a time, behind a gate: 32 bits of generation, a bit that says closed, and how many workers are inside. The caller
// opens the gate for a job and closes it when no item is left, so that it never waits for a worker that has not come yet:
// on a busy machine it does the job alone. Nobody reads the job without being inside, so it can be set up while closed.
struct ThreadPool::State {
  static constexpr uint64_t kClosed = uint64_t{1} << 31;
  static constexpr uint64_t kInside = kClosed - 1;

  std::mutex session;                  // one operator call at a time
  std::atomic<int> threads{0};         // 0: not decided yet
  int started = 0;                     // workers that exist, guarded by session

  std::atomic<uint64_t> gate{kClosed};
  std::atomic<int64_t> next{0};        // next item
  int64_t items = 0;
  int active = 0;                      // threads that may take part, the caller included
  Task task = nullptr;
  const void *context = nullptr;

  std::atomic<int> caller_cpu{-1};     // the processor the caller is on

  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<int> asleep{0};

  static uint32_t generation(uint64_t gate) { return static_cast<uint32_t>(gate >> 32); }

  void work(int thread) {
    for (int64_t item = next.fetch_add(1, std::memory_order_relaxed); item < items;
         item = next.fetch_add(1, std::memory_order_relaxed))
      task(context, item, thread);
  }

  // The caller: lets workers in, and gets them out again.
  void open() {
    const uint64_t now = gate.load(std::memory_order_relaxed);
    gate.store(static_cast<uint64_t>(generation(now) + 1) << 32);
    if (asleep.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      wake.notify_all();
    }
  }
  void close() {
    gate.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int rounds = 0; (gate.load(std::memory_order_acquire) & kInside) != 0; ++rounds) {
      if (rounds < kSpinRounds) pause_cpu(); else std::this_thread::yield();
    }
  }

  // A worker: waits for a generation it has not seen, goes in while the gate is open.
  uint32_t wait_for_next(uint32_t seen) {
    for (int rounds = 0; rounds < kSpinRounds; ++rounds) {
      if (generation(gate.load(std::memory_order_acquire)) != seen) return generation(gate.load(std::memory_order_acquire));
      pause_cpu();
    }
    std::unique_lock<std::mutex> lock(mutex);
    asleep.fetch_add(1);
    wake.wait(lock, [&] { return generation(gate.load()) != seen; });
    asleep.fetch_sub(1);
    return generation(gate.load());
  }
  bool enter(uint32_t wanted) {
    uint64_t now = gate.load(std::memory_order_acquire);
    while (generation(now) == wanted && (now & kClosed) == 0)
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
    return false;
  }
  void worker(int thread, uint32_t seen) {
    for (;;) {
      seen = wait_for_next(seen);
      leave_processor(caller_cpu.load(std::memory_order_relaxed));
      if (!enter(seen)) continue;
      if (thread < active) work(thread);
      gate.fetch_sub(1, std::memory_order_acq_rel);
    }
  }
};

ThreadPool::ThreadPool() : state_(new State) {}

ThreadPool &ThreadPool::instance() {
  static ThreadPool *pool = new ThreadPool;
  static const int hooked = pthread_atfork(nullptr, nullptr, [] {
    // The child has this thread alone, and locks that others may have held.
    State *old = pool->state_;
    pool->state_ = new State;
    pool->state_->threads.store(old->threads.load());
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
      std::thread(&State::worker, &s, thread, State::generation(s.gate.load())).detach();
    } catch (const std::system_error &) {
      threads_ = thread;  // the system gives no more threads: go on with those there are
      break;
    }
    ++s.started;
  }
}

ThreadPool::Session::~Session() { pool_.state_->session.unlock(); }

void ThreadPool::Session::run(int64_t items, Task task, const void *context) {
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
  s.caller_cpu.store(sched_getcpu(), std::memory_order_relaxed);
  s.open();
  s.work(0);
  s.close();
}

}  // namespace flashmla
