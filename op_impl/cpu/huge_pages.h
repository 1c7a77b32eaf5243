// Huge pages under memory that the framework allocated (load_checkpoint, a user's Tensor).
#pragma once

#include <cstdint>

namespace flashmla {

// Asks the system to move a buffer onto huge pages, the first time it is seen: 0.3-2 s a GiB once, after which it is read a third
// faster. A hint: where it fails nothing changes. Does nothing below 4 MiB, above kMostHintedBytes (the pause would be felt; memory of
// LatentKVCache asks by itself as it is written) and with MS_FLASHMLA_HUGE_PAGES=0.
inline constexpr int64_t kMostHintedBytes = int64_t{2} << 30;
void hint_huge_pages(const void *data /* [bytes] */, int64_t bytes);

}  // namespace flashmla
