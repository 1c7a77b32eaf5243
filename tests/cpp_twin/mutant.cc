// Runs a few calls of the kernel on the twin and writes what they leave: outputs and caches as float32. A fault that the twin finds goes to stdout
// and ends the program with 3. Calls: both paths, both kinds of RoPE, splits, tails of every kind, padded dimensions, biases and a residual.
#include <cstdio>

#include "tests/cpp_twin/layer_case.h"

extern "C" void flash_mla_bf16(uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*,
                               uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*) {}  // half alone is run here

namespace {

using namespace flashmla;

const LayerCase kCases[] = {
    {96, 6, 64, 32, 16, 32, 48, kRopeDecoupled, 16, true, {1500, 0, 130}, {1, 0, 2}},   // absorbed, split over cores
    {80, 40, 32, 16, 8, 16, 0, kRopeDecoupled, 16, false, {600, 37}, {2, 1}},           // absorbed, several passes of rows
    {96, 3, 64, 32, 16, 32, 48, kRopeDecoupled, 16, true, {0, 33}, {290, 21}},          // expanded prefill
    {96, 3, 64, 32, 0, 32, 0, kRopeFull, 16, false, {90, 300}, {40, 1}},                // RoPE over the whole head
    {27, 3, 20, 10, 4, 6, 7, kRopeDecoupled, 7, true, {40, 3}, {1, 19}},                // nothing is a multiple of anything
    {600, 4, 128, 64, 32, 64, 0, kRopeDecoupled, 64, true, {20}, {150}},                // wide projections: several blocks of rows and columns
};

void run(const LayerCase& c, std::FILE* file) {
  LayerData<half> data(c, kFloat16);
  twin_flash_mla(data.args, *find_machine("ascend950pr_950z"), twin::Options());
  for (const std::vector<half>* values : {&data.out, &data.cache}) {
    for (half x : *values) {
      const float wide = x;
      std::fwrite(&wide, 4, 1, file);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::FILE* file = std::fopen(argv[1], "wb");
  try {
    for (const LayerCase& c : kCases) run(c, file);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    std::fclose(file);
    return 3;
  }
  std::fclose(file);
  return 0;
}
