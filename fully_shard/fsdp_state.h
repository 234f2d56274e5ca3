#pragma once
// What fully_shard attaches to a module: its parameter group and the life of it through an iteration.
//
//   forward    pre_forward    cast inputs, unshard; node on the inputs
//              post_forward   reshard (if configured); node on the outputs
//   backward   output node    → pre_backward: unshard, set sharded gradients aside
//              input node     → post_backward: reshard, reduce-scatter the gradients
//              end            → units that no input node ended (inputs without gradient) are ended here
//
// A module may be called several times in one forward: each call has a ticket. The parameters stay while any
// call's backward runs, and gradients are reduced when no call awaits its backward. All of this depends on
// the graph only, which all ranks share, never on local values: so every rank issues the same collectives in
// the same order.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fully_shard/param_group.h"
#include "nn/hook_point.h"

namespace tessera {

class FSDPRoot;

class FSDPState : public std::enable_shared_from_this<FSDPState> {
 public:
  struct Options {
    std::optional<bool> reshard_after_forward;
    MixedPrecisionPolicy mp_policy;
    std::string label;  // the module's type, for messages
  };

  /// `group` is null for a module whose parameters all belong to units below it.
  FSDPState(std::unique_ptr<ParamGroup> group, Options options);

  /// Registers the forward hooks and the parameters' gradient hooks.
  void install(HookPoint& point);

  ParamGroup* group() const { return group_.get(); }
  const std::string& label() const { return options_.label; }
  void set_root(std::shared_ptr<FSDPRoot> root) { root_ = std::move(root); }
  void set_reshard_after_forward(bool value) { options_.reshard_after_forward = value; }

  /// Whether a differentiable forward awaits its backward.
  bool awaits_backward() const;

  /// Called at the end of backward for every unit, in the same order on all ranks.
  void finish_backward();
  /// Back to the state before a backward that failed.
  void abort_backward();

 private:
  /// One differentiable call of forward. Owned by the graph: it is gone when the graph is.
  struct Ticket {
    std::vector<int64_t> versions;  // of the parameters when forward used them
    int64_t backward = -1;          // the backward that reached it last
    bool has_input_node = false;
  };

  void pre_forward(HookPoint& point, TensorRefs inputs);
  void post_forward(TensorRefs outputs);
  void forward_failed();
  void pre_backward(Ticket& ticket);
  void post_backward(Ticket& ticket);
  void on_accumulated(size_t param) const;
  void check_versions(const Ticket& ticket) const;
  bool reshards_after_forward() const;
  void reduce_if_last();

  std::unique_ptr<ParamGroup> group_;
  Options options_;
  std::shared_ptr<FSDPRoot> root_;
  std::vector<std::shared_ptr<Ticket>> open_calls_;  // forwards that are running, innermost last
  std::vector<std::weak_ptr<Ticket>> tickets_;       // of graphs that may still run backward
  int active_calls_ = 0;                             // calls whose backward is running
  bool backward_started_ = false;
};

/// What the units of one tree share: created by the outermost unit when its forward runs first.
class FSDPRoot : public std::enable_shared_from_this<FSDPRoot> {
 public:
  /// The outermost unit first.
  explicit FSDPRoot(std::vector<std::weak_ptr<FSDPState>> states) : states_(std::move(states)) {}

  bool is_outermost(const FSDPState& state) const;
  /// Makes sure that finish_backward runs on all units when the current backward ends.
  void backward_reached();
  /// Before a new forward: clears what a backward that threw left behind.
  void recover();

 private:
  void finish_backward();

  std::vector<std::weak_ptr<FSDPState>> states_;
  int64_t backward_ = -1;  // the backward whose end is awaited
};

/// The state of `module`, null if fully_shard was not called on it.
std::shared_ptr<FSDPState> find_fsdp_state(torch::nn::Module& module);

/// All states at and below `module`, in order of registration, parents first.
std::vector<std::shared_ptr<FSDPState>> fsdp_states(torch::nn::Module& module);

}  // namespace tessera
