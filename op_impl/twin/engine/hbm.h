// Memory bandwidth shared evenly among the transfers that are under way, each of them limited by its core's own port.
#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

namespace twin {

// All shares are equal, so one count of "bytes served to each transfer so far" orders all completions.
class SharedBandwidth {
 public:
  SharedBandwidth(double total_bytes_per_cycle, double port_bytes_per_cycle) : total_(total_bytes_per_cycle), port_(port_bytes_per_cycle) {}

  void start(double now, double bytes, int id) {
    advance(now);
    waiting_.push({served_ + bytes, id});
  }
  bool idle() const { return waiting_.empty(); }
  double next_done() const { return now_ + std::max(0.0, waiting_.top().done - served_) / rate(); }
  int finish(double now) {
    advance(now);
    served_ = std::max(served_, waiting_.top().done);
    const int id = waiting_.top().id;
    waiting_.pop();
    return id;
  }
  double busy_cycles() const { return busy_; }

 private:
  struct Transfer {
    double done;
    int id;
    bool operator<(const Transfer& o) const { return done != o.done ? done > o.done : id > o.id; }
  };
  double rate() const { return std::min(port_, total_ / static_cast<double>(waiting_.size())); }
  void advance(double now) {
    if (!waiting_.empty()) served_ += (now - now_) * rate(), busy_ += now - now_;
    now_ = now;
  }
  double total_, port_, now_ = 0, served_ = 0, busy_ = 0;
  std::priority_queue<Transfer> waiting_;
};

}  // namespace twin
