// What the silicon can do, measured: the rate of float32 multiply-adds out of registers, and the rate at which memory is read.
// Benchmark only; built by `build.sh bench` with -ffp-contract=fast, so that a * b + c is one instruction where the ISA has it.
#include <sys/mman.h>

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;
using Vec16 = float __attribute__((vector_size(64)));
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));
using Words = uint64_t __attribute__((vector_size(64)));

// Chains that do not depend on each other: more than latency times ports (8), and as many as leave two registers for the factors.
// The result is used, and no chain leaves the range of normal numbers.
#define FMA_LOOP(name, attribute, Vec, chains)                             \
  attribute float name(int64_t rounds, float factor, float term) {         \
    Vec sum[chains];                                                       \
    Vec a = factor - Vec{}, b = term - Vec{};                              \
    for (int j = 0; j < chains; ++j) sum[j] = b + static_cast<float>(j);   \
    for (int64_t i = 0; i < rounds; ++i) {                                 \
      _Pragma("GCC unroll 32")                                             \
      for (int j = 0; j < chains; ++j) sum[j] = sum[j] * a + b;            \
    }                                                                      \
    for (int j = 1; j < chains; ++j) sum[0] += sum[j];                     \
    return sum[0][0];                                                      \
  }

struct FmaLoop {
  const char *isa;
  float (*run)(int64_t rounds, float factor, float term);
  int64_t flops_per_round;
};

#if defined(__x86_64__)
FMA_LOOP(fma_avx512, __attribute__((target("avx512f,prefer-vector-width=512"))), Vec16, 24)
FMA_LOOP(fma_avx2, __attribute__((target("avx2,fma"))), Vec8, 12)
#endif
FMA_LOOP(fma_generic, , Vec4, 12)

const FmaLoop kFmaLoops[] = {
#if defined(__x86_64__)
    {"avx512", fma_avx512, 24 * 16 * 2},
    {"avx2", fma_avx2, 12 * 8 * 2},
#endif
    {"generic", fma_generic, 12 * 4 * 2},
};

// Four streams a thread, so that as many pages are in flight; each line is prefetched well ahead of the hardware's own guess.
#if defined(__x86_64__)
__attribute__((target("avx512f")))
#endif
uint64_t read_all(const char *data, int64_t bytes) {
  constexpr int kStreams = 4;
  constexpr int64_t kLine = 64, kAhead = 2048;
  const int64_t each = bytes / kStreams / kLine * kLine;
  Words sum[kStreams] = {};
  for (int64_t i = 0; i < each; i += kLine)
    for (int s = 0; s < kStreams; ++s) {
      const char *line = data + s * each + i;
      __builtin_prefetch(line + kAhead, 0, 3);
      sum[s] |= *reinterpret_cast<const Words *>(line);
    }
  for (int s = 1; s < kStreams; ++s) sum[0] |= sum[s];
  uint64_t out = 0;
  for (int i = 0; i < 8; ++i) out |= sum[0][i];
  return out;
}

// The t-th of the processors that this process may run on.
int processor(int t) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && t-- == 0) return cpu;
  return -1;
}

// Seconds from the moment when all threads have started until the last one is done. Each has a processor of its own: two that begin on one
// may stay there for longer than a measurement takes.
template <typename F>
double timed(int threads, const F &f) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t)
    team.emplace_back([&, t] {
      if (const int cpu = processor(t); cpu >= 0) {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpu, &own);
        sched_setaffinity(0, sizeof own, &own);  // of this thread
      }
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) {}
      f(t);
    });
  while (ready.load() < threads) std::this_thread::sleep_for(std::chrono::microseconds(50));  // spinning, it would take the processor of one
  const Clock::time_point start = Clock::now();
  go.store(true, std::memory_order_release);
  for (std::thread &thread : team) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

// GFLOP/s of float32 multiply-adds (two flops each) on `threads` threads with the instructions of `isa`; 0 for an unknown one.
EXPORT double bench_fma_gflops(const char *isa, int threads, int64_t rounds) {
  for (const FmaLoop &loop : kFmaLoops) {
    if (std::strcmp(loop.isa, isa) != 0) continue;
    std::atomic<float> sink{0};
    const double seconds = timed(threads, [&](int) { sink.store(loop.run(rounds, 0.5f, 1.0f)); });
    return double(threads) * rounds * loop.flops_per_round / seconds / 1e9;
  }
  return 0;
}

// Memory of its own pages: huge ones if asked for (a hint), else 4K ones for certain. Null when there is none. Every page is touched.
EXPORT void *bench_map(int64_t bytes, int huge) {
  constexpr int64_t kHuge = int64_t{2} << 20;
  void *mapped = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char *data = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(mapped) + kHuge - 1) / kHuge * kHuge);
  madvise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  for (int64_t i = 0; i < bytes; i += 4096) data[i] = static_cast<char>(i >> 12);
  return data;
}

// GB/s at which `threads` threads read all of `bytes` at data, each its own part.
EXPORT double bench_read_gb_per_s(const void *data, int64_t bytes, int threads) {
  std::atomic<uint64_t> sink{0};
  const int64_t each = bytes / threads / 4096 * 4096;
  const double seconds = timed(threads, [&](int t) { sink.fetch_or(read_all(static_cast<const char *>(data) + t * each, each)); });
  return double(each) * threads / seconds / 1e9;
}
