#include "op_impl/twin/engine/engine.h"

#include <algorithm>
#include <cstring>

namespace twin {
namespace {

Engine* g_current = nullptr;
constexpr int64_t kQueueDepth = 4096;  // operations a core's program may run ahead of its pipes

}  // namespace

Engine& Engine::current() {
  if (g_current == nullptr) throw std::logic_error("an AscendC call outside of a kernel that the twin runs");
  return *g_current;
}

std::string Engine::place(int slot) {
  const int core = slot / kSlots % kCoresPerBlock;
  return "pipe " + std::string(pipe_name(slot % kSlots)) + " of " + core_name(core) + " in block " + std::to_string(slot / kSlots / kCoresPerBlock);
}

Engine::Engine(const flashmla::Machine& machine, const Options& options, int blocks)
    : cost_(machine), options_(options), launched_(blocks), blocks_(options.sample > 0 ? std::min(options.sample, blocks) : blocks), gm_(machine.l2_bytes, double(launched_) / blocks_),
      memory_(cost_.memory_bytes_per_cycle() * blocks_ / launched_, cost_.l2_bytes_per_cycle()), cores_(blocks_ * kCoresPerBlock) {
  const int slots = options.check ? blocks_ * kCoresPerBlock * kSlots : 0;
  for (int i = 0; i < static_cast<int>(cores_.size()); ++i) {
    CoreState& core = cores_[i];
    for (PipeState& pipe : core.pipes) pipe.knows = Clock(slots);
    core.memories.resize(kSpaces);
    if (!options.check) continue;
    const std::string name = std::string(core_name(i % kCoresPerBlock)) + " of block " + std::to_string(i / kCoresPerBlock);
    for (int space = kL1; space < kSpaces; ++space) core.shadows[space].reset(new Shadow(std::string(space_name(space)) + " of " + name, &Engine::place));
  }
}

Engine::~Engine() {
  if (g_current == this) g_current = nullptr;
}

void Engine::add_tensor(const std::string& name, Role role, const void* data, int64_t bytes, double overlap) {
  gm_.add(name, role, data, bytes, &Engine::place, overlap);
}

int64_t Engine::capacity(Space space) const {
  const flashmla::Machine& m = machine();
  const int64_t bytes[kSpaces] = {0, m.l1_bytes, m.l0a_bytes, m.l0b_bytes, m.l0c_bytes, m.ub_bytes, m.bias_table_bytes, m.fixpipe_bytes};
  return bytes[space];
}

uint8_t* Engine::memory(Space space, int core) {
  std::vector<uint8_t>& bytes = core_at(fiber_block_, core).memories[space];
  if (bytes.empty() && options_.compute) bytes.assign(capacity(space), 0xFF);  // NaN in every float type: what nobody wrote shows
  return bytes.data();
}

SharedClock Engine::publish(int block, int core, int pipe) {
  return options_.check ? std::make_shared<const Clock>(core_at(block, core).pipes[pipe].knows) : nullptr;
}

// ---- what a core's program calls

void Engine::enqueue(Pipe pipe, Operation op) {
  CoreState& core = mine();
  PipeState& scalar = core.pipes[kS];
  op.issued = scalar.free_at;
  if (options_.check) {
    const int stores = slot(fiber_block_, fiber_core_, kScalarStores);
    if (!core.snapshot) {
      Clock knows = scalar.knows;
      knows[stores] = core.stores_published;
      core.snapshot = std::make_shared<const Clock>(std::move(knows));
    }
    op.scalar_knows = core.snapshot;
    op.scalar_epoch = scalar.knows[slot(fiber_block_, fiber_core_, kS)];
  }
  PipeState& state = core.pipes[pipe];
  state.queue.push_back(std::move(op));
  ++core.queued;
  if (!state.running && !state.blocked && state.queue.size() == 1) post(std::max(now_, scalar.free_at), fiber_block_, fiber_core_, pipe, Event::Kind::kPipe);
  if (core.queued >= kQueueDepth) park(CoreState::Wait::kQueue, core.pipes[pipe].queue.back().site);
}

void Engine::issue(Pipe pipe, const Site& site, const Cost& cost, std::vector<Access> accesses, std::function<void()> effect, int64_t macs) {
  Operation op;
  op.what = Do::kRun;
  op.site = site;
  op.cost = cost;
  op.accesses = std::move(accesses);
  if (options_.compute) op.effect = std::move(effect);
  op.macs = macs;
  enqueue(pipe, std::move(op));
}

void Engine::set_flag(Pipe from, Pipe to, int id, const Site& site) {
  const int flag = event_index(from, to, id);
  if (from == kS) {
    PipeState& scalar = mine().pipes[kS];
    set_event(fiber_block_, fiber_core_, kS, flag, site, scalar.free_at);
    scalar.free_at += cost_.event();
    return;
  }
  Operation op;
  op.what = Do::kSet;
  op.flag = flag;
  op.site = site;
  enqueue(from, std::move(op));
}

void Engine::wait_flag(Pipe from, Pipe to, int id, const Site& site) {
  const int flag = event_index(from, to, id);
  if (to == kS) return wait_scalar(mine().events[flag], site);
  Operation op;
  op.what = Do::kWait;
  op.flag = flag;
  op.site = site;
  enqueue(to, std::move(op));
}

// SyncAll is made of the cross-core flags 11 to 14.
void Engine::note_reserved(int mode, int id, const Site& site) {
  if (mode != 4 && id >= 11 && id <= 14) reserved_ = site;
  if (uses_sync_all_ && reserved_.line) fail(Fault::kEvent, reserved_, "cross-core flags 11 to 14 belong to SyncAll, which this kernel calls");
}

void Engine::cross_set(int mode, Pipe pipe, int id, const Site& site) {
  note_reserved(mode, id, site);
  if (pipe == kS) {
    PipeState& scalar = mine().pipes[kS];
    set_cross(fiber_block_, fiber_core_, kS, mode, id, site, scalar.free_at);
    scalar.free_at += cost_.event();
    return;
  }
  Operation op;
  op.what = Do::kCrossSet;
  op.flag = id;
  op.mode = mode;
  op.site = site;
  enqueue(pipe, std::move(op));
}

void Engine::cross_wait(int mode, Pipe pipe, int id, const Site& site) {
  note_reserved(mode, id, site);
  const int flag = (mode == 4 ? 32 : 0) + id;
  if (pipe == kS) return wait_scalar(mine().cross[flag], site);
  Operation op;
  op.what = Do::kCrossWait;
  op.flag = flag;
  op.mode = mode;
  op.site = site;
  enqueue(pipe, std::move(op));
}

void Engine::park(CoreState::Wait wait, const Site& site) {
  CoreState& core = mine();
  core.wait = wait;
  core.wait_site = site;
  core.fiber->yield();
}

void Engine::wait_scalar(Flag& flag, const Site& site) {
  const int block = fiber_block_, core = fiber_core_;
  PipeState& scalar = mine().pipes[kS];
  const double from = scalar.free_at;
  while (flag.tokens.empty()) {
    flag.waiters.push_back({block, uint8_t(core), kS});
    park(CoreState::Wait::kFlag, site);
  }
  scalar.free_at = std::max(scalar.free_at, flag.tokens.front().time);
  note_wait(block, core, kS, from, scalar.free_at, flag.tokens.front().from, site);
  if (options_.check) scalar.knows.join(*flag.tokens.front().knows);
  taken(flag, block, core, kS, site);
  mine().snapshot.reset();
  scalar.free_at += cost_.event();
}

// The scalar unit has seen all pipes of its core to their ends: it knows what they know.
void Engine::leave_drained(CoreState& core, Clock* knows) {
  PipeState& scalar = core.pipes[kS];
  for (PipeState& pipe : core.pipes) {
    scalar.free_at = std::max(scalar.free_at, pipe.free_at);
    if (options_.check) knows->join(pipe.knows);
  }
}

void Engine::pipe_barrier_all(const Site& site) {
  CoreState& core = mine();
  while (!drained(core)) park(CoreState::Wait::kDrain, site);
  Clock knows = core.pipes[kS].knows;
  leave_drained(core, &knows);
  if (options_.check) core.stores_published = knows[slot(fiber_block_, fiber_core_, kScalarStores)];
  core.pipes[kS].knows = std::move(knows);
  core.snapshot.reset();
}

void Engine::sync_all(bool only_aiv, const Site& site) {
  uses_sync_all_ = true;
  note_reserved(0, -1, site);
  CoreState& core = mine();
  core.barrier_only_aiv = only_aiv;
  core.wait = CoreState::Wait::kBarrier;
  core.wait_site = site;
  if (drained(core)) try_barrier(now_);
  core.fiber->yield();
}

void Engine::scalar_access(const Access& access, const Site& site) {
  if (!options_.check) return;
  PipeState& scalar = mine().pipes[kS];
  const int at = slot(fiber_block_, fiber_core_, access.write ? kScalarStores : kS);
  const Stamp who = {at, ++scalar.knows[at], site};
  GmTensor* tensor = nullptr;
  if (access.space == kGM) {
    tensor = gm_.find(access.span.start, access.span.bytes);
    if (tensor == nullptr) fail(Fault::kBounds, site, "the address belongs to no tensor of the call");
    if (access.write && tensor->role == Role::kInput) fail(Fault::kIllegal, site, "writes " + tensor->name + ", an input");
    if (tensor->role == Role::kInput) return;
  }
  Access relative = access;
  if (tensor != nullptr) relative.span.start -= tensor->start;
  Shadow& shadow = tensor ? tensor->shadow : *core_at(fiber_block_, access.core).shadows[access.space];
  if (access.write) shadow.write(relative.span, who, scalar.knows, access.layout);
  else shadow.read(relative.span, who, scalar.knows, access.layout);
}

// ---- the run

void Engine::post(double time, int block, int core, int pipe, Event::Kind kind) {
  events_.push({time, order_++, block, static_cast<uint8_t>(core), static_cast<uint8_t>(pipe), kind});
}

void Engine::resume(int block, int core) {
  CoreState& state = core_at(block, core);
  if (state.done) return;
  fiber_block_ = block;
  fiber_core_ = static_cast<CoreKind>(core);
  state.pipes[kS].free_at = std::max(state.pipes[kS].free_at, now_);
  state.wait = CoreState::Wait::kNone;
  state.fiber->resume();
  state.done = state.fiber->ended();
}

RunReport Engine::run(const std::function<void()>& kernel) {
  g_current = this;
  for (int block = 0; block < blocks_; ++block) {
    for (int core = 0; core < kCoresPerBlock; ++core) {
      core_at(block, core).fiber.reset(new Fiber(kernel));
      post(0, block, core, kS, Event::Kind::kFiber);
    }
  }
  for (;;) {
    const bool transfer = !memory_.idle() && (events_.empty() || memory_.next_done() <= events_.top().time);
    if (transfer) {
      now_ = std::max(now_, memory_.next_done());
      const int id = memory_.finish(now_);
      const int pipe = id % kPipes, core = id / kPipes % kCoresPerBlock, block = id / kPipes / kCoresPerBlock;
      post(now_ + core_at(block, core).pipes[pipe].transfer_hit_cycles, block, core, pipe, Event::Kind::kFinish);
      continue;
    }
    if (events_.empty()) {
      bool resumed = false;
      for (int i = 0; i < static_cast<int>(cores_.size()); ++i) {
        if (cores_[i].wait != CoreState::Wait::kQueue) continue;
        resume(i / kCoresPerBlock, i % kCoresPerBlock);
        resumed = true;
      }
      if (resumed) continue;
      break;
    }
    const Event event = events_.top();
    events_.pop();
    now_ = std::max(now_, event.time);
    PipeState& state = core_at(event.block, event.core).pipes[event.pipe];
    switch (event.kind) {
      case Event::Kind::kFiber: resume(event.block, event.core); break;
      case Event::Kind::kPipe: advance(event.block, event.core, event.pipe, now_); break;
      case Event::Kind::kTransfer: {
        const int id = (event.block * kCoresPerBlock + event.core) * kPipes + event.pipe;
        memory_.start(now_, state.transfer_bytes, id);
        break;
      }
      case Event::Kind::kFinish: finish(event.block, event.core, event.pipe, now_); break;
    }
  }
  for (const CoreState& core : cores_) {
    if (!core.done || !drained(core)) deadlock();
  }
  leftovers();
  report_.blocks = blocks_;
  report_.launched = launched_;
  report_.memory_busy_cycles = memory_.busy_cycles();
  for (CoreState& core : cores_) {
    const int kind = static_cast<int>(&core - cores_.data()) % kCoresPerBlock;
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      const PipeState& state = core.pipes[pipe];
      report_.cycles = std::max(report_.cycles, state.free_at);
      PipeTimes& sum = report_.pipes[kind][pipe];
      sum.busy += state.times.busy;
      sum.operations += state.times.operations;
      for (const auto& wait : state.times.waits) sum.waits[wait.first] += wait.second;
    }
  }
  for (const GmTensor* t : gm_.tensors()) report_.traffic.push_back({t->name, t->role == Role::kWorkspace, t->read_bytes, t->written_bytes, t->hit_bytes, t->bytes, t->fresh_bytes});
  g_current = nullptr;
  return std::move(report_);
}

}  // namespace twin
