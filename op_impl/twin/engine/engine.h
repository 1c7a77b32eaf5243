// Runs a kernel on a simulated device. Every core's program is a fiber that issues operations into its pipes' queues; a
// discrete-event scheduler lets an operation take effect when its pipe reaches it, checks it against the accesses that
// nothing orders before it, and counts its cycles. Same input, same schedule.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "op_impl/twin/engine/cost.h"
#include "op_impl/twin/engine/fiber.h"
#include "op_impl/twin/engine/hbm.h"
#include "op_impl/twin/engine/l2.h"
#include "op_impl/twin/engine/pipes.h"
#include "op_impl/twin/engine/report.h"

namespace twin {

struct Access {
  Space space;
  uint8_t core;  // of the block: whose memory; any for GM
  bool write;
  Span span;     // of GM: addresses
  Layout layout;
};

struct Options {
  bool check = true;    // races and layouts
  bool compute = true;  // false: only the clock runs, no data moves
  bool trace = false;
  int sample = 0;       // cores that are simulated, with their share of the memory bandwidth; 0: all
};

class Engine {
 public:
  Engine(const flashmla::Machine& machine, const Options& options, int blocks);
  ~Engine();

  // overlap: of a sample's input, how often the cores of the launch read each of its bytes together, when an earlier run has told.
  void add_tensor(const std::string& name, Role role, const void* data, int64_t bytes, double overlap = 1);
  // Runs `kernel` on every core to its end. Throws TwinError, or what the kernel throws.
  RunReport run(const std::function<void()>& kernel);

  // What follows is called by the kernel's fibers.
  static Engine& current();
  CoreKind core() const { return fiber_core_; }
  // A sample has one core of every stretch, at no regular distance: equally spaced ones may all have the same kind of work and wait in step.
  int block() const {
    const int first = fiber_block_ * launched_ / blocks_, end = (fiber_block_ + 1) * launched_ / blocks_;
    return first + static_cast<int>((static_cast<uint32_t>(fiber_block_) * 2654435769u >> 16) % static_cast<uint32_t>(end - first));
  }
  int blocks() const { return launched_; }
  const flashmla::Machine& machine() const { return cost_.machine(); }
  const CostModel& cost() const { return cost_; }
  bool computes() const { return options_.compute; }
  int64_t capacity(Space space) const;
  uint8_t* memory(Space space, int core);  // of this block

  void issue(Pipe pipe, const Site& site, const Cost& cost, std::vector<Access> accesses, std::function<void()> effect, int64_t macs = 0);
  void set_flag(Pipe from, Pipe to, int id, const Site& site);
  void wait_flag(Pipe from, Pipe to, int id, const Site& site);
  void cross_set(int mode, Pipe pipe, int id, const Site& site);
  void cross_wait(int mode, Pipe pipe, int id, const Site& site);
  void note_reserved(int mode, int id, const Site& site);
  void pipe_barrier_all(const Site& site);
  void sync_all(bool only_aiv, const Site& site);
  void scalar_access(const Access& access, const Site& site);  // now, by the scalar unit

 private:
  enum class Do : uint8_t { kRun, kSet, kWait, kCrossSet, kCrossWait };
  struct Operation {
    Do what;
    int flag = 0;  // index
    int mode = 0;  // of a cross-core flag
    Site site;
    Cost cost;
    double issued = 0;
    uint32_t scalar_epoch = 0;
    SharedClock scalar_knows;
    std::vector<Access> accesses;
    std::function<void()> effect;
    int64_t macs = 0;
  };
  struct Waiter { int block; uint8_t core, pipe; };
  struct Token { SharedClock knows; double time; Site site; std::string from; };
  // A flag: tokens that were set and not yet waited for. An event holds one at most, a cross-core flag counts to 15.
  struct Flag {
    std::vector<Token> tokens;
    std::vector<Waiter> waiters;
    bool used = false;
    Site last_set, last_wait;
    int32_t wait_slot = -1;
    uint32_t wait_epoch = 0;
    std::vector<Token> alone;  // modes 0 to 2: set by this core, while others still have to
  };
  struct PipeState {
    std::deque<Operation> queue;
    Clock knows;
    SharedClock joined;  // the scalar clock it joined last
    double free_at = 0;
    double idle_since = 0;
    bool running = false, blocked = false;
    double transfer_bytes = 0, transfer_hit_cycles = 0;  // of the copy under way: from memory; from L2
    double started = 0;
    PipeTimes times;
  };
  struct CoreState {
    std::unique_ptr<Fiber> fiber;
    std::array<PipeState, kPipes> pipes;
    std::vector<std::vector<uint8_t>> memories;  // by space
    std::array<Flag, kPipes * kPipes * 8> events;
    std::array<Flag, 64> cross;  // modes 0 to 2 count together, from 32 on those of mode 4
    std::array<std::unique_ptr<Shadow>, kSpaces> shadows;
    int64_t queued = 0;
    bool barrier_only_aiv = false;
    SharedClock snapshot;  // of the scalar pipe's clock, for what is issued
    uint32_t stores_published = 0;
    enum class Wait : uint8_t { kNone, kFlag, kDrain, kBarrier, kQueue } wait = Wait::kNone;
    Site wait_site;
    bool done = false;
  };
  struct Event {
    double time;
    int64_t order;
    int block;
    uint8_t core, pipe;
    enum class Kind : uint8_t { kPipe, kFiber, kTransfer, kFinish } kind;
    bool operator<(const Event& o) const { return time != o.time ? time > o.time : order > o.order; }
  };

  static int slot(int block, int core, int pipe) { return (block * kCoresPerBlock + core) * kSlots + pipe; }
  static std::string place(int slot);
  CoreState& core_at(int block, int core) { return cores_[block * kCoresPerBlock + core]; }
  CoreState& mine() { return core_at(fiber_block_, fiber_core_); }
  void post(double time, int block, int core, int pipe, Event::Kind kind);
  void resume(int block, int core);
  void enqueue(Pipe pipe, Operation operation);
  void advance(int block, int core, int pipe, double now);
  void start(int block, int core, int pipe, Operation& op, double now);
  void finish(int block, int core, int pipe, double now);
  double check(int block, int core, int pipe, Operation& op);
  const Token* take(Flag& flag, int block, int core, int pipe, double now);
  void taken(Flag& flag, int block, int core, int pipe, const Site& site);
  void give(Flag& flag, int block, int core, Token token, int most, const std::string& words);
  void set_event(int block, int core, int pipe, int flag, const Site& site, double now);
  void set_cross(int block, int core, int pipe, int mode, int id, const Site& site, double now);
  void collect(const std::vector<std::pair<int, int>>& from, const std::vector<std::pair<int, int>>& to, int id, const std::string& words);
  void wait_scalar(Flag& flag, const Site& site);
  void note_wait(int block, int core, int pipe, double from, double to, const std::string& cause, const Site& site);
  void park(CoreState::Wait wait, const Site& site);
  void wake(int block, int core, double now);
  bool drained(const CoreState& core) const;
  void leave_drained(CoreState& core, Clock* knows);
  void try_barrier(double now);
  void deadlock();
  void leftovers();
  SharedClock publish(int block, int core, int pipe);
  static int event_index(Pipe from, Pipe to, int id) { return (from * kPipes + to) * 8 + id; }
  static std::string event_words(int flag);
  static std::string cross_words(int flag);

  CostModel cost_;
  Options options_;
  int launched_, blocks_;  // of the launch; simulated
  GlobalMemory gm_;
  SharedBandwidth memory_;
  std::vector<CoreState> cores_;
  std::priority_queue<Event> events_;
  int64_t order_ = 0;
  double now_ = 0;
  int fiber_block_ = 0;
  CoreKind fiber_core_ = kAIC;
  bool uses_sync_all_ = false;
  Site reserved_;  // a use of the flags that SyncAll takes
  RunReport report_;
};

}  // namespace twin
