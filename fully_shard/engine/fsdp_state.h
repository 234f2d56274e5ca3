#pragma once
// FSDPState: the state that fully_shard attaches to a module: its parameter group and the steps of an iteration.
//
//   forward    pre_forward    cast inputs, unshard, prefetch the next unit; nodes on the inputs
//              post_forward   reshard (if configured); nodes on the outputs
//   backward   see unit_backward.h
//
// Thread safety: one thread per rank. Forward throws StateError while another thread runs the same unit.

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fully_shard/engine/param_group.h"
#include "fully_shard/engine/unit_backward.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

class FSDPRoot;

class FSDPState : public std::enable_shared_from_this<FSDPState> {
 public:
  struct Options {
    std::optional<bool> reshard_after_forward;
    MixedPrecisionPolicy mp_policy;
    std::string api;    // function that the user called: "fully_shard" or "replicate"
    std::string label;  // types of the modules, for messages
  };

  using Targets = std::vector<std::weak_ptr<FSDPState>>;

  /// Settings that the user may change between iterations.
  struct Settings {
    GradientSettings gradients;
    std::optional<bool> reshard_after_forward;  // nullopt: the value in Options
    bool reshard_after_backward = true;
    bool unshard_in_backward = true;
    bool is_last_backward = true;
    bool prefetch_after_backward = false;     // prefetch the next unit after this one's backward, not before
    std::optional<Targets> forward_prefetch;  // nullopt: the recorded order
    std::optional<Targets> backward_prefetch;
    UnitObserver observer;
  };

  /// Makes the state. `group` is null if all parameters of the unit belong to units below it.
  FSDPState(std::shared_ptr<ParamGroup> group, Options options);

  ~FSDPState();

  /// Registers the hooks of the unit's modules and the parameters' gradient hooks.
  void install(const std::vector<HookPoint*>& points);
  /// Makes this the unit with number `unit` of `root`.
  void join(std::shared_ptr<FSDPRoot> root, int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool);

  const std::shared_ptr<ParamGroup>& group() const { return group_; }
  /// Replaces the group by one with the same parameters in the same order. Only while idle and sharded. The root must
  /// then be recreated, because it stores shared state by dtype and device.
  void replace_group(std::shared_ptr<ParamGroup> group);
  const std::string& api() const { return options_.api; }
  const std::string& label() const { return options_.label; }
  Settings& settings() { return settings_; }
  const std::vector<std::weak_ptr<torch::nn::Module>>& modules() const { return modules_; }
  const std::shared_ptr<FSDPRoot>& root() const { return root_; }
  int64_t unit() const { return unit_; }
  const std::string& name() const { return name_; }
  UnitBackward& backward() { return backward_; }

  bool is_in_forward() const { return !running_forwards_.empty(); }
  /// Returns whether a forward or backward of the unit is running. False for one that threw.
  bool is_running() const;
  /// Returns whether nothing is running, and no backward or reduction is pending.
  bool is_idle() const { return !is_running() && !backward_.is_awaited() && !backward_.has_unreduced(); }

  /// Gathers the parameters at the user's request. With async_op, only issues the all-gather.
  void unshard(bool async_op);
  /// Issues the all-gather ahead of time, if the unit is sharded.
  void prefetch(ShardFault fault = ShardFault::None);
  /// Ends the outermost forward: discards an unused prefetch, and reshards if only some of the unit's modules ran.
  void finish_forward();
  /// Restores the state before a failed iteration. Keeps gradients that earlier backwards reduced.
  void abort_iteration();
  void report(FSDPEventKind step) const;

 private:
  struct RunningForward {
    std::shared_ptr<ForwardCall> forward_call = nullptr;  // for a differentiable call
    std::vector<AliasedTensor> inputs = {};
    AutogradBoundary boundary = {};  // boundary of the inputs
    int64_t number = 0;              // counts the thread's differentiable calls
    uint64_t first_node = 0;         // smallest sequence number of autograd nodes that it may have made
  };

  void pre_forward(HookPoint& point, size_t module, TensorRefs inputs);
  void post_forward(TensorRefs outputs);
  void forward_failed();
  void end_call(RunningForward& call, TensorRefs outputs);
  void insert_input_boundary(RunningForward& call, TensorRefs inputs);
  void insert_output_boundary(const RunningForward& call, TensorRefs outputs);
  void reshard_after_forward(bool is_differentiable);
  void drop_outdated();

  std::shared_ptr<ParamGroup> group_;
  Options options_;
  Settings settings_;
  std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  std::shared_ptr<FSDPRoot> root_;
  int64_t unit_ = 0;
  std::string name_;
  UnitBackward backward_{*this};
  std::vector<bool> ran_;                         // which of the unit's modules were called in this forward
  std::vector<RunningForward> running_forwards_;  // innermost last
  std::atomic<std::thread::id> thread_;           // thread that runs them; none between forwards
  bool is_differentiable_ = false;                // whether the running outermost forward had a differentiable call
};

}  // namespace tessera
