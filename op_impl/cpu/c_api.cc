#include "op_impl/cpu/c_api.h"

#include <exception>
#include <stdexcept>

#include "op_impl/cpu/check.h"
#include "op_impl/cpu/dispatch.h"
#include "op_proto/op_proto.h"
#include "tiling/tiling.h"

#define FLASHMLA_EXPORT __attribute__((visibility("default")))

namespace {

// f() as a value; on a failure its text is kept and `failed` returned.
template <typename T, typename F>
T guarded(T failed, const F &f) {
  try {
    return f();
  } catch (const std::exception &e) {
    flashmla::set_last_error(e.what());
    return failed;
  }
}

int report(const std::string &error) {
  if (error.empty()) return 0;
  flashmla::set_last_error(error);
  return 1;
}

}  // namespace

extern "C" {

FLASHMLA_EXPORT const char *fm_last_error() { return flashmla::last_error(); }

FLASHMLA_EXPORT int fm_set_num_threads(int n) {
  return guarded(1, [&] {
    flashmla::ThreadPool::instance().set_num_threads(n);
    return 0;
  });
}

FLASHMLA_EXPORT int fm_num_threads() {
  return guarded(0, [] { return flashmla::ThreadPool::instance().num_threads(); });
}

FLASHMLA_EXPORT const char *fm_isa() {
  return guarded<const char *>(nullptr, [] { return flashmla::chosen_isa().name; });
}

FLASHMLA_EXPORT const char *fm_proto_json() { return flashmla::proto_json().c_str(); }

FLASHMLA_EXPORT int fm_check_batch(int64_t num_blocks, int64_t block_size, int64_t batch, int64_t max_blocks, const int32_t *block_table,
                                   const int32_t *q_seq_lens, const int32_t *context_lens, int64_t num_tokens,
                                   int64_t tokens_per_seq, int64_t max_positions, int64_t index_topk) {
  return guarded(1, [&] {
    flashmla::BatchLimits limits;
    limits.num_tokens = num_tokens;
    limits.tokens_per_seq = tokens_per_seq;
    limits.max_positions = max_positions;
    limits.index_topk = index_topk;
    return report(flashmla::check_batch({num_blocks, block_size}, {batch, max_blocks, block_table, q_seq_lens, context_lens}, limits));
  });
}

FLASHMLA_EXPORT int fm_gemm(int64_t rows, int64_t groups, int64_t n, int64_t k, const float *a, const void *w, int dtype, float *c,
                            int gemv_rows, int flat_rows) {
  return guarded(1, [&] {
    // A layer whose o_proj this is: the tiling's blocks for projections depend on the machine alone.
    const int32_t width = static_cast<int32_t>(n), depth = static_cast<int32_t>(k);
    const flashmla::Machine *machine = flashmla::find_machine(flashmla::chosen_isa().machine);
    if (machine == nullptr) throw std::runtime_error("no machine file for this ISA");
    const flashmla::Problem problem = {width, 1, 1, 0, 16, depth, 0, depth, flashmla::kRopeFull, flashmla::kFloat32, dtype, flashmla::kFloat32, 64, 1, 1, 1};
    flashmla::GemmArgs args = {rows, groups, n, k, a, {w, dtype}, c, flashmla::make_tiling(problem, *machine)};
    for (flashmla::GemmChoice &choice : args.tiling.gemm) choice = {width, depth, gemv_rows, flat_rows};
    flashmla::ThreadPool::Session session(flashmla::ThreadPool::instance());
    flashmla::chosen_isa().kernels->gemm(args, session);
    return 0;
  });
}

}  // extern "C"
