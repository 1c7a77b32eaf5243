// A PyNative call that goes straight to the kernels' entry. The framework's ops.Custom costs 90-490 us a call and hands the work to
// a thread of its own while the caller waits in a loop; here a call costs about 15 us and, where the framework has nothing left to
// do, the kernel runs on the calling thread. Built against MindSpore's headers by pynative.py.
#include "ms_extension/api.h"

#include "include/runtime/pipeline/pipeline.h"
#include "include/utils/pynative/grad_state.h"

namespace {

using mindspore::runtime::Pipeline;
using Shape = std::vector<int64_t>;
using Tensors = std::vector<ms::Tensor>;
constexpr int kMostTensors = 32;  // of one call

using Entry = int (*)(int, void **, int *, int64_t **, const char **, void *, void *);
using CheckBatch = int (*)(int64_t, int64_t, int64_t, int64_t, const int32_t *, const int32_t *, const int32_t *, int64_t, int64_t, int64_t, int64_t);
using LastError = const char *(*)();

template <typename F>
F function_at(uint64_t address) { return reinterpret_cast<F>(address); }

const char *dtype_name(ms::TypeId dtype) {
  switch (dtype) {
    case mindspore::kNumberTypeFloat32: return "float32";
    case mindspore::kNumberTypeFloat16: return "float16";
    case mindspore::kNumberTypeBFloat16: return "bfloat16";
    case mindspore::kNumberTypeInt32: return "int32";
    default: return "another dtype";
  }
}

// Nothing is waiting or at work in the framework's queues. A task leaves its queue when it is done, and what it hands on is in the
// next queue before that, so in this order an empty pipeline is seen only when it is one.
bool idle() {
  Pipeline &pipeline = Pipeline::Get();
  return pipeline.frontend_stage()->Empty() && pipeline.bprop_stage()->Empty() && pipeline.backend_stage()->Empty() &&
         pipeline.launch_stage()->Empty();
}

void wait_until_idle() {
  if (idle()) return;
  py::gil_scoped_release release;
  Pipeline::Get().WaitAll();
}

// An operator of the library: its entry, its shape and dtype inference, its attributes.
struct Operator {
  std::string name;
  uint64_t entry, infer_shape, infer_type;
  void *extra;
  int num_inputs, num_outputs;

  Tensors outputs(const Tensors &inputs) const {
    int ndims[kMostTensors];
    int64_t *shapes[kMostTensors];
    std::vector<int> dtypes;
    for (size_t i = 0; i < inputs.size(); ++i) {  // inference takes the list without the absent ones
      ndims[i] = static_cast<int>(inputs[i].shape().size());
      shapes[i] = const_cast<int64_t *>(inputs[i].shape().data());
      dtypes.push_back(inputs[i].data_type());
    }
    if (num_outputs == 1) {
      const Shape shape = function_at<Shape (*)(int *, int64_t **, void *)>(infer_shape)(ndims, shapes, extra);
      const int dtype = function_at<int (*)(std::vector<int>, void *)>(infer_type)(dtypes, extra);
      return {ms::Tensor(static_cast<ms::TypeId>(dtype), shape)};
    }
    const std::vector<Shape> many = function_at<std::vector<Shape> (*)(int *, int64_t **, void *)>(infer_shape)(ndims, shapes, extra);
    const std::vector<int> types = function_at<std::vector<int> (*)(std::vector<int>, void *)>(infer_type)(dtypes, extra);
    Tensors out;
    for (size_t i = 0; i < many.size(); ++i) out.emplace_back(static_cast<ms::TypeId>(types[i]), many[i]);
    return out;
  }
};

// The arguments of a call; slots[i] is the place of tensors[i] among the operator's inputs.
struct Arguments {
  Tensors tensors;
  std::vector<int> slots;

  void add(int slot, const py::handle &value) {
    if (value.is_none()) return;
    slots.push_back(slot);
    tensors.push_back(value.cast<ms::Tensor>());
  }
};

class Runner : public ms::pynative::PyboostRunner {
 public:
  Runner(const Operator *op, std::vector<int> slots, bool here)
      : PyboostRunner(op->name), operator_(op), slots_(std::move(slots)), here_(here) {}

  void LaunchKernel() override {
    void *data[kMostTensors] = {};
    int ndims[kMostTensors] = {};
    int64_t *shapes[kMostTensors] = {};
    const char *dtypes[kMostTensors];
    std::fill(dtypes, dtypes + kMostTensors, "none");  // an absent input keeps its place
    const auto put = [&](int place, const ms::Tensor &tensor) {
      data[place] = tensor.GetDataPtr();
      ndims[place] = static_cast<int>(tensor.shape().size());
      shapes[place] = const_cast<int64_t *>(tensor.shape().data());
      dtypes[place] = dtype_name(tensor.data_type());
    };
    for (size_t i = 0; i < slots_.size(); ++i) put(slots_[i], inputs()[i]);
    const int count = operator_->num_inputs + static_cast<int>(outputs().size());
    for (int i = operator_->num_inputs; i < count; ++i) put(i, outputs()[i - operator_->num_inputs]);
    function_at<Entry>(operator_->entry)(count, data, ndims, shapes, dtypes, nullptr, operator_->extra);
  }

 protected:
  void _Run() override {
    if (!here_) return PyboostRunner::_Run();
    _PrepareStream();
    _PrepareDeviceAddress();
    _MallocDeviceAddress();
    LaunchKernel();
  }

  // The framework's own CPU operators run on the thread that hands out memory, and would overtake a kernel in the queue after it.
  void _DispatchLaunchTask() override {
    Pipeline::Get().launch_stage()->Wait();
    LaunchKernel();
  }

 private:
  const Operator *operator_;  // made once, lives as long as the process
  std::vector<int> slots_;
  bool here_;
};

Tensors run(const Operator *op, const std::vector<int> &slots, const Tensors &inputs, bool here) {
  const Tensors outputs = op->outputs(inputs);
  std::make_shared<Runner>(op, slots, here)->Run(inputs, outputs);
  return outputs;
}

// Strided tensors are copied, which may put work into the queues.
void make_plain(Tensors *tensors) {
  for (ms::Tensor &tensor : *tensors) {
    tensor.ConvertStubNodeToTensor();
    if (!tensor.is_contiguous()) tensor = tensor.contiguous();
  }
}

Tensors run_later(const Operator *op, const std::vector<int> &slots, Tensors inputs) {
  make_plain(&inputs);
  return run(op, slots, inputs, false);
}

// On this thread when the framework has nothing to do before it, else as a task behind those that it has.
py::object call(const Operator *op, Arguments &args) {
  if (idle()) {
    make_plain(&args.tensors);
    if (idle()) {
      Tensors outputs;
      {
        py::gil_scoped_release release;
        outputs = run(op, args.slots, args.tensors, true);
      }
      if (outputs.size() == 1) return py::cast(outputs[0]);
      return py::make_tuple(outputs[0], outputs[1]);
    }
  }
  const std::vector<int> slots = args.slots;
  if (op->num_outputs == 1)
    return ms::pynative::PyboostRunner::Call<1>(op->name, [op, slots](const Tensors &inputs) { return run_later(op, slots, inputs)[0]; }, args.tensors);
  return ms::pynative::PyboostRunner::Call<2>(op->name, [op, slots](const Tensors &inputs) { return run_later(op, slots, inputs); }, args.tensors);
}

// The operators give no gradients; ops.Custom is what says so.
bool records_gradients() { return mindspore::pynative::GradState::Get().RequiresGrad(); }

// op(*args); None when gradients are recorded.
py::object call_operator(const Operator *op, const py::args &values) {
  if (records_gradients()) return py::none();
  Arguments args;
  for (size_t i = 0; i < values.size(); ++i) args.add(static_cast<int>(i), values[i]);
  return call(op, args);
}

// The host check of a layer call, as checks.check_lengths does it, without its copies.
class BatchCheck {
 public:
  BatchCheck(uint64_t check, uint64_t last_error) : check_(function_at<CheckBatch>(check)), last_error_(function_at<LastError>(last_error)) {}

  // tensors: hidden_states, kv_cache, block_table, q_seq_lens, context_lens. False when they cannot be read in place.
  // Throws std::runtime_error with the kernel's words.
  bool operator()(const Tensors &tensors, int64_t max_positions, int64_t index_topk) {
    for (int i = 0; i < 5; ++i) tensors[i].ConvertStubNodeToTensor();
    for (int i = 2; i < 5; ++i)
      if (!tensors[i].is_contiguous() || tensors[i].storage_offset() != 0) return false;
    // Lengths of the last call are there already: the layers of a step share them, and need not wait for each other. They may
    // be about to change, so that only a second look at what is settled refuses the call; the kernel looks again anyway.
    const bool seen = same_as_last(tensors);
    if (!seen) wait_until_idle();
    if (!run(tensors, max_positions, index_topk) && (!seen || (wait_until_idle(), !run(tensors, max_positions, index_topk))))
      throw std::runtime_error(last_error_());
    for (int i = 0; i < 3; ++i) last_[i] = tensors[i + 2].tensor();
    return true;
  }

 private:
  bool same_as_last(const Tensors &tensors) const {
    for (int i = 0; i < 3; ++i)
      if (last_[i].lock() != tensors[i + 2].tensor()) return false;
    return true;
  }
  bool run(const Tensors &tensors, int64_t max_positions, int64_t index_topk) const {
    const auto &hidden = tensors[0].shape(), &cache = tensors[1].shape(), &table = tensors[2].shape();
    const auto ints = [&](int i) { return static_cast<const int32_t *>(tensors[i].GetDataPtr()); };
    const bool packed = hidden.size() == 2;
    return check_(cache[0], cache[1], table[0], table[1], ints(2), ints(3), ints(4), packed ? hidden[0] : hidden[0] * hidden[1],
                  packed ? -1 : hidden[1], max_positions, index_topk) == 0;
  }

  CheckBatch check_;
  LastError last_error_;
  std::weak_ptr<mindspore::tensor::Tensor> last_[3];
};

// A layer call with its host check. batch: hidden_states, kv_cache, block_table, q_seq_lens, context_lens; then weights and residual.
// None when gradients are recorded or a length tensor is strided.
py::object call_layer(const Operator *op, BatchCheck *check, const py::tuple &batch, const py::tuple &weights, const py::object &residual,
                      int64_t max_positions, int64_t index_topk) {
  if (records_gradients()) return py::none();
  Arguments args;
  args.tensors.reserve(op->num_inputs);
  for (size_t i = 0; i < batch.size(); ++i) args.add(static_cast<int>(i), batch[i]);
  if (!(*check)(args.tensors, max_positions, index_topk)) return py::none();
  for (size_t i = 0; i < weights.size(); ++i) args.add(static_cast<int>(batch.size() + i), weights[i]);
  args.add(op->num_inputs - 1, residual);
  return call(op, args);
}

}  // namespace

PYBIND11_MODULE(MS_EXTENSION_NAME, m) {
  py::class_<Operator>(m, "Operator")
      .def(py::init([](const std::string &name, uint64_t entry, uint64_t infer_shape, uint64_t infer_type, uint64_t extra, int num_inputs, int num_outputs) {
        return Operator{name, entry, infer_shape, infer_type, reinterpret_cast<void *>(extra), num_inputs, num_outputs};
      }))
      .def("__call__", &call_operator);
  py::class_<BatchCheck>(m, "BatchCheck").def(py::init<uint64_t, uint64_t>());
  m.def("call_layer", &call_layer);
}
