// The same calls on caches of other layouts: outputs and cache rows must be those of a paged cache with a page for each sequence (the page has its
// say in the tiling), bit for bit, and what no row owns must stay.
// `layouts` prints a line for each call; 1 and the difference when there is one.
#include <cstdio>
#include <cstring>
#include <string>

#include "tests/cpp_twin/layer_case.h"
#include "tiling/cache_layout.h"

namespace {

using namespace flashmla;

const LayerCase kCases[] = {
    {96, 6, 64, 32, 16, 32, 48, kRopeDecoupled, 0, true, {1500, 0, 130}, {1, 0, 2}},  // decode, split over cores
    {80, 40, 32, 16, 8, 16, 0, kRopeDecoupled, 0, false, {600, 37}, {2, 1}},          // several passes of rows
    {96, 3, 64, 32, 16, 32, 48, kRopeDecoupled, 0, true, {0, 33}, {290, 21}},         // prefill and a causal chunk, expanded
    {96, 3, 64, 32, 0, 32, 0, kRopeFull, 0, false, {90, 300}, {40, 1}},               // RoPE over the whole head
    {27, 3, 20, 10, 4, 6, 7, kRopeDecoupled, 0, true, {40, 3}, {1, 19}},               // nothing is a multiple of anything
};

struct Layout {
  const char* name;
  CacheLayout cache;
};

void expect(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// Rows of a paged cache move to another layout; what is between them is NaN.
template <typename T>
void run(LayerCase c, int32_t dtype, const char* dtype_name) {
  const Machine& machine = *find_machine("ascend950pr_950z");
  const int64_t width = c.width(), room = c.longest() + 5, batch = c.q_lens.size();
  c.page = static_cast<int32_t>(room);
  LayerData<T> paged(c, dtype);
  const std::vector<T> before = paged.cache;
  twin_flash_mla(paged.args, machine, twin::Options());
  const CacheLayout padded = {room, room * width + 48, width, 0};  // sequences apart from each other
  for (const Layout& layout : {Layout{"BSND", bsnd_cache(room, 1, width)}, Layout{"BNSD", bnsd_cache(room, 1, width)}, Layout{"BSND, every third head", bsnd_cache(room, 3, width)},
                               Layout{"BNSD, every second head", bnsd_cache(room, 2, width)}, Layout{"padded sequences", padded}}) {
    LayerData<T> other(c, dtype);
    std::vector<T> cache(batch * layout.cache.block_stride, T(NAN));
    const auto row = [&](int64_t b, int64_t position) { return cache.data() + b * layout.cache.block_stride + position * layout.cache.row_stride; };
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t key = 0; key < c.contexts[b]; ++key) std::copy_n(&before[c.slot(b, key) * width], width, row(b, key));
    std::vector<T> expected = cache;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t key = 0; key < c.contexts[b] + c.q_lens[b]; ++key)
        std::copy_n(&paged.cache[c.slot(b, key) * width], width, expected.data() + (row(b, key) - cache.data()));
    other.args.cache.data.data = cache.data();
    other.args.batch.block_table = nullptr;
    other.args.batch.max_blocks = 0;
    twin_flash_mla(other.args, machine, twin::Options(), &layout.cache);
    const std::string where = std::string(dtype_name) + ", " + layout.name;
    expect(std::memcmp(other.out.data(), paged.out.data(), paged.out.size() * sizeof(T)) == 0, "outputs differ: " + where);
    expect(std::memcmp(cache.data(), expected.data(), cache.size() * sizeof(T)) == 0, "cache rows differ: " + where);
    std::printf("%s\n", where.c_str());
  }
}

}  // namespace

int main() {
  try {
    for (const LayerCase& c : kCases) {
      run<half>(c, kFloat16, "float16");
      run<bfloat16_t>(c, kBFloat16, "bfloat16");
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
