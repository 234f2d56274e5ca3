#pragma once
// FSDPRoot: state shared by the units of a tree: their order, memory, and reductions in flight. The outermost unit
// creates it in its first forward.
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
  /// Creates the root for the unit of `module` and all units below its modules. Throws StateError if one of these is in
  /// the middle of an iteration under another root, on any rank, or if `module` was sharded below a root whose forward
  /// is running. Collective if a unit had another root.
  static void make(torch::nn::Module& module);

  bool is_outermost(const FSDPState& state) const { return state.unit() == 0; }
  std::shared_ptr<FSDPState> outermost() const { return states_.front().lock(); }
  ReductionQueue& reductions() { return reductions_; }

  void enter_forward(const FSDPState& state, torch::nn::Module& module);
  void leave_forward(const FSDPState& state);
  void forward_failed();
  void prefetch_in_forward(FSDPState& state);

  JoinSearch& join_search() { return join_search_; }

  /// Queues the end-of-backward callback for all units on the running backward.
  void enter_backward(const FSDPState& state);
  void prefetch_in_backward(FSDPState& state);
  /// Returns the id of the backward whose end is pending, or -1.
  int64_t awaited_backward() const { return backward_; }
  /// Returns whether the running backward is awaited_backward(), rather than one nested in it.
  bool is_in_outer_backward() const;

  /// Discards the remaining state of a forward or backward that failed.
  void reset_iter_state();

 private:
  FSDPRoot(std::vector<std::weak_ptr<FSDPState>> states, std::vector<size_t> gradient_bytes)
      : states_(std::move(states)), shared_gradients_(std::move(gradient_bytes)) {}

  std::shared_ptr<FSDPState> state_at(std::optional<int64_t> unit) const;
  /// Queues the end-of-backward callback, unless an outer backward already has it.
  void register_end_of_backward();
  /// Throws ValueError on every rank unless all freeze the same parameters. Collective until it has succeeded once.
  void agree_on_frozen();
  void await_copies_of_shards() const;
  void end_gathers() const;
  void recover();
  void finish_backward(int64_t id);
  void backward_ended(int64_t id) noexcept;
  /// Discards a failed backward before another one begins.
  void abort_backward();

  std::vector<std::weak_ptr<FSDPState>> states_;  // by number, outermost first
  std::vector<std::shared_ptr<StreamLane>> gather_streams_;
  SharedGradientSizes shared_gradients_;
  Schedule schedule_;
  ReductionQueue reductions_;
  JoinSearch join_search_;
  int64_t backward_ = -1;               // id of the backward whose end is pending
  std::weak_ptr<void> backward_token_;  // expires with that backward, including one that failed
  std::thread::id thread_;              // thread of the last forward
  int open_forwards_ = 0;
  bool has_shards_ = false;        // whether any unit has shards to gather
  bool agrees_on_frozen_ = false;  // checked in the first forward or backward, on a GPU
  bool outermost_runs_ = false;
  bool forward_failed_ = false;
};

}  // namespace tessera
