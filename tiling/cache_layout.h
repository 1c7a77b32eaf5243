// The layouts of a latent cache of rows of d elements. MLA has one KV head; with n of them in memory its rows are those of the first one, which is
// how padded rows and sequences come about.
#pragma once

#include "tiling/tiling_data.h"

namespace flashmla {

// [blocks, page, d] behind a block table.
inline CacheLayout paged_cache(int64_t page, int64_t d) { return {page, page * d, d, 1}; }

// [B, S, n, d], no table.
inline CacheLayout bsnd_cache(int64_t s, int64_t n, int64_t d) { return {s, s * n * d, n * d, 0}; }

// [B, n, S, d], no table.
inline CacheLayout bnsd_cache(int64_t s, int64_t n, int64_t d) { return {s, n * s * d, d, 0}; }

}  // namespace flashmla
