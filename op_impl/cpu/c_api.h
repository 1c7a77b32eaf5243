// What Python calls through ctypes. Every function is safe to call from any thread and never throws.
#pragma once

#include <cstdint>

extern "C" {

const char *fm_last_error();         // the text of the last failure in the process, "" before any
int fm_set_num_threads(int n);       // 0, or 1 when n is not in 1..256
int fm_num_threads();                // threads a call uses; 0 when MS_FLASHMLA_NUM_THREADS cannot be read
const char *fm_isa();                // "avx512", "avx2" or "generic", "twin" in the twin's library; null when MS_FLASHMLA_ISA names another
const char *fm_proto_json();         // inputs, outputs and attributes of every operator

// The check that the kernel runs before it writes a byte: 0 when the call is legal, else 1. The limits are those of
// BatchLimits (check.h): -1 leaves num_tokens, tokens_per_seq and max_positions unchecked, 0 index_topk.
int fm_check_batch(int64_t num_blocks, int64_t block_size, int64_t batch, int64_t max_blocks,
                   const int32_t *block_table,   // [batch, max_blocks]
                   const int32_t *q_seq_lens,    // [batch]
                   const int32_t *context_lens,  // [batch]
                   int64_t num_tokens, int64_t tokens_per_seq, int64_t max_positions, int64_t index_topk);

// C = A W once, by the loop that gemv_rows and flat_rows choose (GemmChoice). For measuring. 0, or 1 with the reason in fm_last_error.
int fm_gemm(int64_t rows, int64_t groups, int64_t n, int64_t k,
            const float *a,            // [rows, k]
            const void *w, int dtype,  // packed [groups][n, k] of that DType
            float *c,                  // [rows, groups * ceil(n / 16) * 16]
            int gemv_rows, int flat_rows);

// The `extra` of an operator's entry (FlashMLA, ...) for a caller that has no MindSpore object; integers are exact to 2^53. It lives as
// long as the process; null when there is no memory.
void *fm_new_attrs(const char *const *names /* [count] */, const double *values /* [count] */, int count);
}
