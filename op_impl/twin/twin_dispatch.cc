// The twin in the place of the CPU's instruction sets: the library's operators are MindSpore's, what runs them is the AscendC kernel.
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "op_impl/cpu/dispatch.h"
#include "op_impl/twin/twin_launch.h"

namespace flashmla {
namespace {

void flash_mla_on_twin(const LayerArgs& args, ThreadPool::Session&) {
  static std::mutex one_device;
  std::lock_guard<std::mutex> lock(one_device);
  twin_flash_mla(args, twin_machine(), twin::Options());
}

[[noreturn]] void only_flash_mla(const char* op) {
  throw std::runtime_error(std::string(op) + ": the Ascend package holds FlashMLA alone; set MS_FLASHMLA_IMPL=cpu for this operator");
}
void no_attention(const AttendArgs&, ThreadPool::Session&) { only_flash_mla("FlashMLAWithKVCache"); }
void no_merge(const MergeArgs&, ThreadPool::Session&) { only_flash_mla("MergeAttentionStates"); }
void no_gemm(const GemmArgs&, ThreadPool::Session&) { only_flash_mla("the product with packed weights"); }

const Kernels kTwinKernels = {flash_mla_on_twin, no_attention, no_merge, no_gemm};

}  // namespace

const Machine& twin_machine() {
  const char* wanted = std::getenv("MS_FLASHMLA_TWIN_MACHINE");
  const std::string name = wanted != nullptr && *wanted != '\0' ? wanted : "ascend950pr_9599";
  const Machine* machine = find_machine(name);
  if (machine == nullptr || machine->kind != kAscend) throw std::runtime_error("MS_FLASHMLA_TWIN_MACHINE is '" + name + "', expected an Ascend machine of tiling/machines");
  return *machine;
}

const Isa& chosen_isa() {
  static const Isa isa = {"twin", twin_machine().name.c_str(), &kTwinKernels};
  return isa;
}

}  // namespace flashmla
