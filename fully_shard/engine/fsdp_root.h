#pragma once
// FSDPRoot: what the units of a tree share, their order, their memory, and the reductions in flight. The outermost unit
// makes it when its forward runs first.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <torch/nn/module.h>

#include <memory>
#include <thread>
#include <vector>

#include "comm/shm/shared_gradients.h"
#include "fully_shard/engine/fsdp_state.h"
#include "fully_shard/engine/reduction_queue.h"
#include "fully_shard/engine/schedule.h"
#include "fully_shard/engine/unit_tree.h"

namespace tessera {

class FSDPRoot : public std::enable_shared_from_this<FSDPRoot> {
 public:
  /// The root of the unit of `module` and all units below its modules. Throws StateError if one of these is in the
  /// middle of an iteration under another root, on this rank or another, or if `module` lies below a root whose forward
  /// runs: it was sharded after that root was made. Collective where one had another root.
  static void make(torch::nn::Module& module);

  bool is_outermost(const FSDPState& state) const { return state.unit() == 0; }
  std::shared_ptr<FSDPState> outermost() const { return states_.front().lock(); }
  ReductionQueue& reductions() { return reductions_; }

  void enter_forward(const FSDPState& state, torch::nn::Module& module);
  void leave_forward(const FSDPState& state);
  void forward_failed();
  void prefetch_in_forward(FSDPState& state);

  JoinSearch& join_search() { return join_search_; }

  /// Makes sure that the end of the current backward ends it for all units.
  void enter_backward(const FSDPState& state);
  void prefetch_in_backward(FSDPState& state);
  /// Returns the backward whose end is awaited; -1 outside of one.
  int64_t awaited_backward() const { return backward_; }
  /// Returns whether the running backward is that one, and not nested in it.
  bool is_in_outer_backward() const;

  /// Discards what a forward or backward that failed left behind.
  void reset_iter_state();

 private:
  FSDPRoot(std::vector<std::weak_ptr<FSDPState>> states, std::vector<size_t> gradient_bytes)
      : states_(std::move(states)), shared_gradients_(std::move(gradient_bytes)) {}

  std::shared_ptr<FSDPState> state_at(std::optional<int64_t> unit) const;
  /// Queues the end-of-backward callback, unless an outer backward has it.
  void register_end_of_backward();
  /// Throws ValueError on every rank unless all freeze the same parameters. Collective, until it has succeeded.
  void agree_on_frozen();
  void await_copies_of_shards() const;
  void end_gathers() const;
  void recover();
  void finish_backward(int64_t id);
  void backward_ended(int64_t id) noexcept;
  /// Discards a backward that failed, before another begins.
  void abort_backward();

  std::vector<std::weak_ptr<FSDPState>> states_;  // by number, the outermost first
  std::vector<std::shared_ptr<StreamLane>> gather_streams_;
  SharedGradientSizes shared_gradients_;
  Schedule schedule_;
  ReductionQueue reductions_;
  JoinSearch join_search_;
  int64_t backward_ = -1;               // the backward whose end is awaited
  std::weak_ptr<void> backward_token_;  // while it is: not after one that failed
  std::thread::id thread_;              // of the last forward
  int open_forwards_ = 0;
  bool has_shards_ = false;        // a unit is gathered in forward
  bool agrees_on_frozen_ = false;  // as of the first forward or backward, on a GPU
  bool outermost_runs_ = false;
  bool forward_failed_ = false;
};

}  // namespace tessera
