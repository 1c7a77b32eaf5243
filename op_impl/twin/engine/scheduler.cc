// The scheduler's side of the engine: pipes that start, wait and finish.
#include <algorithm>

#include "op_impl/twin/engine/engine.h"

namespace twin {

void Engine::note_wait(int block, int core, int pipe, double from, double to, const std::string& cause, const Site& site) {
  if (to <= from) return;
  core_at(block, core).pipes[pipe].times.waits[cause] += to - from;
  if (options_.trace) report_.trace.push_back({block, uint8_t(core), uint8_t(pipe), from, to, site, cause});
}

void Engine::advance(int block, int core, int pipe, double now) {
  PipeState& state = core_at(block, core).pipes[pipe];
  while (!state.running && !state.blocked && !state.queue.empty()) {
    Operation& op = state.queue.front();
    const double ready = std::max(op.issued, state.free_at);
    if (ready > now) return post(ready, block, core, pipe, Event::Kind::kPipe);
    if (op.what == Do::kRun) return start(block, core, pipe, op, now);
    if (op.what == Do::kWait || op.what == Do::kCrossWait) {
      CoreState& owner = core_at(block, core);
      Flag& flag = op.what == Do::kWait ? owner.events[op.flag] : owner.cross[op.flag];
      const Token* token = take(flag, block, core, pipe, now);
      if (token == nullptr) return;
      note_wait(block, core, pipe, state.free_at, std::min(now, std::max(op.issued, state.free_at)), "issue", op.site);
      note_wait(block, core, pipe, ready, now, token->from, op.site);
      if (options_.check) {
        if (op.scalar_knows != state.joined) state.knows.join(*op.scalar_knows), state.joined = op.scalar_knows;
        state.knows.join(*token->knows);
      }
      taken(flag, block, core, pipe, op.site);
    } else {
      note_wait(block, core, pipe, state.free_at, now, "issue", op.site);
      if (options_.check) {
        if (op.scalar_knows != state.joined) state.knows.join(*op.scalar_knows), state.joined = op.scalar_knows;
        const int scalar = slot(block, core, kS);
        state.knows[scalar] = std::max(state.knows[scalar], op.scalar_epoch);
      }
      if (op.what == Do::kSet) set_event(block, core, pipe, op.flag, op.site, now);
      else set_cross(block, core, pipe, op.mode, op.flag, op.site, now);
    }
    state.times.waits["events"] += cost_.event();
    state.free_at = now + cost_.event();
    state.queue.pop_front();
    --core_at(block, core).queued;
    wake(block, core, now);
  }
}

void Engine::start(int block, int core, int pipe, Operation& op, double now) {
  PipeState& state = core_at(block, core).pipes[pipe];
  note_wait(block, core, pipe, state.free_at, now, "issue", op.site);
  check(block, core, pipe, op);
  if (op.effect) op.effect();
  state.running = true;
  state.started = now;
  report_.macs += op.macs;
  const double begun = now + op.cost.startup;
  if (op.cost.gm && state.transfer_bytes > 0) post(begun, block, core, pipe, Event::Kind::kTransfer);
  else post(begun + (op.cost.gm ? std::max(op.cost.cycles, state.transfer_hit_cycles) : op.cost.cycles), block, core, pipe, Event::Kind::kFinish);
}

// Races, bounds and layouts of an operation's accesses, and the bytes that a copy takes from memory.
double Engine::check(int block, int core, int pipe, Operation& op) {
  PipeState& state = core_at(block, core).pipes[pipe];
  Stamp who;
  if (options_.check) {
    if (op.scalar_knows != state.joined) state.knows.join(*op.scalar_knows), state.joined = op.scalar_knows;
    const int scalar = slot(block, core, kS), own = slot(block, core, pipe);
    state.knows[scalar] = std::max(state.knows[scalar], op.scalar_epoch);
    who = {own, ++state.knows[own], op.site};
  }
  double missed = 0, bytes = 0;
  for (const Access& access : op.accesses) {
    const Span& span = access.span;
    if (access.space != kGM) {
      if (!options_.check) continue;
      Shadow& shadow = *core_at(block, access.core).shadows[access.space];
      if (access.write) shadow.write(span, who, state.knows, access.layout);
      else shadow.read(span, who, state.knows, access.layout);
      continue;
    }
    const int64_t whole = span.count > 0 ? (span.count - 1) * span.stride + span.bytes : 0;
    GmTensor* tensor = gm_.find(span.start, whole);
    if (tensor == nullptr) {
      const GmTensor* near = gm_.nearest(span.start);
      fail(Fault::kBounds, op.site, near == nullptr ? "the address belongs to no tensor of the call"
                                                    : std::to_string(whole) + " bytes from byte " + std::to_string(span.start - near->start) + " of " + near->name +
                                                          ", which has " + std::to_string(near->bytes));
    }
    if (access.write && tensor->role == Role::kInput) fail(Fault::kIllegal, op.site, "writes " + tensor->name + ", an input");
    if (options_.check && tensor->role != Role::kInput) {
      Span relative = span;
      relative.start -= tensor->start;
      if (access.write) tensor->shadow.write(relative, who, state.knows, access.layout);
      else tensor->shadow.read(relative, who, state.knows, access.layout);
    }
    bytes += static_cast<double>(span.bytes) * span.count;
    const bool one = span.stride == span.bytes || span.count == 1;
    for (int64_t i = 0; i < (one ? 1 : span.count); ++i) {
      const int64_t start = span.start + i * span.stride, length = one ? whole : span.bytes;
      missed += static_cast<double>(access.write ? gm_.write(tensor, start, length) : gm_.read(tensor, start, length));
    }
  }
  state.transfer_bytes = missed;
  state.transfer_hit_cycles = std::max(0.0, bytes - missed) / cost_.l2_bytes_per_cycle();
  return missed;
}

void Engine::finish(int block, int core, int pipe, double now) {
  CoreState& owner = core_at(block, core);
  PipeState& state = owner.pipes[pipe];
  if (options_.trace) report_.trace.push_back({block, uint8_t(core), uint8_t(pipe), state.started, now, state.queue.front().site, ""});
  state.times.busy += now - state.started;
  ++state.times.operations;
  state.running = false;
  state.free_at = now;
  state.queue.pop_front();
  --owner.queued;
  wake(block, core, now);
  advance(block, core, pipe, now);
}

// ---- flags

const Engine::Token* Engine::take(Flag& flag, int block, int core, int pipe, double now) {
  if (flag.tokens.empty()) {
    flag.waiters.push_back({block, uint8_t(core), uint8_t(pipe)});
    core_at(block, core).pipes[pipe].blocked = true;
    return nullptr;
  }
  if (flag.tokens.front().time > now) {
    post(flag.tokens.front().time, block, core, pipe, Event::Kind::kPipe);
    return nullptr;
  }
  return &flag.tokens.front();
}

void Engine::taken(Flag& flag, int block, int core, int pipe, const Site& site) {
  flag.tokens.erase(flag.tokens.begin());
  flag.last_wait = site;
  if (!options_.check) return;
  flag.wait_slot = slot(block, core, pipe);
  flag.wait_epoch = ++core_at(block, core).pipes[pipe].knows[flag.wait_slot];
}

void Engine::give(Flag& flag, int block, int core, Token token, int most, const std::string& words) {
  if (static_cast<int>(flag.tokens.size()) >= most) {
    fail(Fault::kEvent, token.site, words + " is set again before " + (most == 1 ? "the set at " : "16 sets, the last at ") + text(flag.tokens.back().site) + " was waited for");
  }
  flag.last_set = token.site;
  const double time = token.time;
  flag.tokens.push_back(std::move(token));
  for (const Waiter& waiter : flag.waiters) {
    core_at(waiter.block, waiter.core).pipes[waiter.pipe].blocked = false;
    post(std::max(now_, time), waiter.block, waiter.core, waiter.pipe, waiter.pipe == kS ? Event::Kind::kFiber : Event::Kind::kPipe);
  }
  flag.waiters.clear();
  (void)block, (void)core;
}

std::string Engine::event_words(int flag) {
  return "event " + std::string(pipe_name(flag / 8 / kPipes)) + "_" + pipe_name(flag / 8 % kPipes) + " " + std::to_string(flag % 8);
}

std::string Engine::cross_words(int flag) { return "cross-core flag " + std::to_string(flag % 32) + (flag >= 32 ? " of mode 4" : ""); }

void Engine::set_event(int block, int core, int pipe, int index, const Site& site, double now) {
  Flag& flag = core_at(block, core).events[index];
  PipeState& state = core_at(block, core).pipes[pipe];
  // In time the last wait may have come first by luck: only an order makes the second set safe.
  if (options_.check && flag.tokens.empty() && flag.wait_slot >= 0 && state.knows[flag.wait_slot] < flag.wait_epoch) {
    fail(Fault::kEvent, site, event_words(index) + " is set again, and nothing orders that behind its wait at " + text(flag.last_wait));
  }
  give(flag, block, core, {publish(block, core, pipe), now + cost_.event(), site, pipe_name(pipe)}, 1, event_words(index));
}

// The sets of every core in `from` make one token for every core in `to`.
void Engine::collect(const std::vector<std::pair<int, int>>& from, const std::vector<std::pair<int, int>>& to, int id, const std::string& words) {
  for (const auto& core : from) {
    if (core_at(core.first, core.second).cross[id].alone.empty()) return;
  }
  Token token = core_at(from[0].first, from[0].second).cross[id].alone.front();
  Clock knows = options_.check ? *token.knows : Clock(0);
  for (const auto& core : from) {
    std::vector<Token>& alone = core_at(core.first, core.second).cross[id].alone;
    if (options_.check) knows.join(*alone.front().knows);
    token.time = std::max(token.time, alone.front().time);
    alone.erase(alone.begin());
  }
  token.knows = std::make_shared<const Clock>(std::move(knows));
  for (const auto& core : to) give(core_at(core.first, core.second).cross[id], core.first, core.second, token, 15, words);
}

void Engine::set_cross(int block, int core, int pipe, int mode, int id, const Site& site, double now) {
  const std::string from = std::string(core == kAIC ? "AIC " : "AIV ") + pipe_name(pipe);
  Token token = {publish(block, core, pipe), now + cost_.cross_flag(), site, from};
  const std::string words = cross_words(id);
  if (mode == 4) {
    const int target = core == kAIC ? (id < 16 ? kAIV0 : kAIV1) : kAIC;
    const int index = 32 + (core == kAIC ? id % 16 : id + (core == kAIV1 ? 16 : 0));
    return give(core_at(block, target).cross[index], block, target, std::move(token), 15, cross_words(index));
  }
  std::vector<Token>& alone = core_at(block, core).cross[id].alone;
  if (alone.size() >= 15) fail(Fault::kEvent, site, words + " is set 16 times while another core never sets it; last set at " + text(alone.back().site));
  alone.push_back(std::move(token));
  std::vector<std::pair<int, int>> cores, to;
  if (mode == 0) {
    for (int b = 0; b < blocks_; ++b) {
      for (int c = 0; c < kCoresPerBlock; ++c) if ((c == kAIC) == (core == kAIC)) cores.push_back({b, c});
    }
    to = cores;
  } else if (mode == 1) {
    to = cores = {{block, kAIV0}, {block, kAIV1}};
  } else if (core == kAIC) {
    cores = {{block, kAIC}};
    to = {{block, kAIV0}, {block, kAIV1}};
  } else {
    cores = {{block, kAIV0}, {block, kAIV1}};
    to = {{block, kAIC}};
  }
  collect(cores, to, id, words);
}

// ---- ends

bool Engine::drained(const CoreState& core) const {
  for (int pipe = kV; pipe < kPipes; ++pipe) {
    if (core.pipes[pipe].running || !core.pipes[pipe].queue.empty()) return false;
  }
  return true;
}

void Engine::wake(int block, int core, double now) {
  CoreState& state = core_at(block, core);
  if (state.wait == CoreState::Wait::kQueue && state.queued < 2048) {
    state.wait = CoreState::Wait::kNone;
    post(now, block, core, kS, Event::Kind::kFiber);
  } else if (state.wait == CoreState::Wait::kDrain && drained(state)) {
    state.wait = CoreState::Wait::kNone;
    post(now, block, core, kS, Event::Kind::kFiber);
  } else if (state.wait == CoreState::Wait::kBarrier && drained(state)) {
    try_barrier(now);
  }
}

void Engine::try_barrier(double now) {
  bool only_aiv = true;
  for (const CoreState& core : cores_) if (core.wait == CoreState::Wait::kBarrier && !core.barrier_only_aiv) only_aiv = false;
  std::vector<CoreState*> members;
  for (size_t i = 0; i < cores_.size(); ++i) {
    CoreState& core = cores_[i];
    if (only_aiv && i % kCoresPerBlock == kAIC) continue;
    if (core.done || core.wait != CoreState::Wait::kBarrier || core.barrier_only_aiv != only_aiv || !drained(core)) return;
    members.push_back(&core);
  }
  Clock knows = members[0]->pipes[kS].knows;
  double time = now;
  for (CoreState* core : members) {
    leave_drained(*core, &knows);
    time = std::max(time, core->pipes[kS].free_at);
  }
  time += cost_.barrier();
  report_.barrier_cycles += cost_.barrier();
  report_.stage_ends.push_back(time);
  for (CoreState* core : members) {
    const int index = static_cast<int>(core - cores_.data()), block = index / kCoresPerBlock, kind = index % kCoresPerBlock;
    PipeState& scalar = core->pipes[kS];
    if (options_.check) core->stores_published = knows[slot(block, kind, kScalarStores)];
    scalar.knows = knows;
    for (PipeState& pipe : core->pipes) {
      note_wait(block, kind, static_cast<int>(&pipe - core->pipes.data()), pipe.free_at, time, "barrier", core->wait_site);
      pipe.free_at = time;
    }
    core->snapshot.reset();
    core->wait = CoreState::Wait::kNone;
    post(time, block, kind, kS, Event::Kind::kFiber);
  }
}

void Engine::deadlock() {
  std::string words;
  int listed = 0;
  for (size_t i = 0; i < cores_.size() && listed < 6; ++i) {
    CoreState& core = cores_[i];
    const int block = static_cast<int>(i) / kCoresPerBlock, kind = static_cast<int>(i) % kCoresPerBlock;
    for (int pipe = kV; pipe < kPipes; ++pipe) {
      if (core.pipes[pipe].queue.empty()) continue;
      const Operation& op = core.pipes[pipe].queue.front();
      const bool event = op.what == Do::kWait;
      const Flag& flag = event ? core.events[op.flag] : core.cross[op.flag];
      words += (listed++ ? "; " : "") + place(slot(block, kind, pipe)) + " waits at " + text(op.site) + " for " + (event ? event_words(op.flag) : cross_words(op.flag)) +
               (flag.last_set.line ? ", last set at " + text(flag.last_set) : ", which was never set") +
               (flag.last_wait.line ? " and waited for at " + text(flag.last_wait) : "");
    }
    if (!core.done && core.wait != CoreState::Wait::kNone && core.wait != CoreState::Wait::kDrain) {
      words += (listed++ ? "; " : "") + std::string("the program of ") + core_name(kind) + " in block " + std::to_string(block) + " waits at " + text(core.wait_site);
    }
  }
  throw TwinError(Fault::kDeadlock, words.empty() ? "a core has not ended" : words);
}

void Engine::leftovers() {
  for (CoreState& core : cores_) {
    for (size_t i = 0; i < core.events.size(); ++i) {
      if (!core.events[i].tokens.empty()) fail(Fault::kEvent, core.events[i].tokens.front().site, event_words(static_cast<int>(i)) + " is still set when the kernel ends; the next kernel would find it");
    }
    for (size_t i = 0; i < core.cross.size(); ++i) {
      const Flag& flag = core.cross[i];
      if (!flag.tokens.empty()) fail(Fault::kEvent, flag.tokens.front().site, cross_words(static_cast<int>(i)) + " is still set when the kernel ends; the next kernel would find it");
      if (!flag.alone.empty()) fail(Fault::kEvent, flag.alone.front().site, cross_words(static_cast<int>(i)) + " is set by one core and not by the others");
    }
  }
}

}  // namespace twin
