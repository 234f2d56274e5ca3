#pragma once
// What fully_shard attaches to a module: its parameter group and the life of it through an iteration.
//
//   forward    pre_forward    cast inputs, unshard, prefetch the next unit; nodes on the inputs
//              post_forward   reshard (if configured); nodes on the outputs
//   backward   output nodes   → pre_backward, at the first of them: unshard, prefetch, set sharded gradients aside
//              input nodes    → post_backward, at the last of them: reshard, start the reduction of the gradients
//              end            → units that no input node ended (inputs without gradient) are ended here, and
//                               the reductions in flight are waited for
//
// A module may be called several times in one forward, and a unit may be several modules: each call has a forward_call.
// The parameters stay while any call's backward runs, and gradients are reduced when the graph of that backward has no
// call to come. All of this depends on that graph only, which all ranks share, never on local values, nor on which
// other graphs a rank keeps, as that of a loss that it logs: so every rank issues the same collectives in the same
// order.
//
// Thread safety: for the thread that runs the rank's forward and backward. Another one that comes into a forward of the
// unit is refused.

#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fully_shard/autograd/autograd_boundary.h"
#include "fully_shard/engine/param_group.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

class FSDPRoot;

class FSDPState : public std::enable_shared_from_this<FSDPState> {
 public:
  struct Options {
    std::optional<bool> reshard_after_forward;
    MixedPrecisionPolicy mp_policy;
    std::string api;    // the function that the user called: "fully_shard", "replicate"
    std::string label;  // the modules' types, for messages
  };

  using Targets = std::vector<std::weak_ptr<FSDPState>>;

  /// What a user may change from step to step.
  struct Settings {
    GradientSettings gradients;
    bool reshard_after_backward = true;
    bool unshard_in_backward = true;
    bool is_last_backward = true;
    bool prefetch_after_backward = false;     // of the next unit, not before it
    std::optional<Targets> forward_prefetch;  // none: the recorded order
    std::optional<Targets> backward_prefetch;
    UnitObserver observer;
  };

  /// `group` is null for a unit whose parameters all belong to units below it.
  FSDPState(std::shared_ptr<ParamGroup> group, Options options);

  ~FSDPState();

  /// Registers the hooks of the unit's modules and the parameters' gradient hooks.
  void install(const std::vector<HookPoint*>& points);

  const std::shared_ptr<ParamGroup>& group() const { return group_; }
  const std::string& api() const { return options_.api; }
  const std::string& label() const { return options_.label; }
  const std::shared_ptr<FSDPRoot>& root() const { return root_; }
  /// Those that are the unit, as long as they live.
  const std::vector<std::weak_ptr<torch::nn::Module>>& modules() const { return modules_; }
  Settings& settings() { return settings_; }
  void set_reshard_after_forward(bool value) {
    options_.reshard_after_forward = value;
    was_reshard_set_ = true;
  }

  /// The unit belongs to `root` from now on, as number `unit`, and is called `name` there.
  void join(std::shared_ptr<FSDPRoot> root, int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool);
  int64_t unit() const { return unit_; }
  const std::string& name() const { return name_; }

  /// Whether a differentiable forward awaits its backward, as far as this rank keeps its graph: which ranks may do
  /// differently, so that no collective depends on it.
  bool awaits_backward() const;
  /// Whether the running backward has a call of it to come. The same on all ranks.
  bool is_due() const;
  /// Whether gradients wait for a later reduction: unsynchronized, not all-reduced, or in flight.
  bool has_unreduced_gradients() const { return has_unreduced_ || (group_ && group_->gradients().is_reducing()); }
  bool is_in_forward() const { return !running_forwards_.empty(); }
  /// A forward or a backward of it computes. What a backward that threw left behind, for the next forward to clear,
  /// does not count.
  bool is_running() const;
  /// Between iterations: nothing runs, and neither a backward nor a reduction is awaited.
  bool is_idle() const { return !is_running() && !awaits_backward() && !has_unreduced_gradients(); }

  /// Gathers the parameters at the user's wish; async: only issues the all-gather.
  void unshard(bool async_op);
  /// Issues the all-gather ahead of time; does nothing if it is not needed.
  void prefetch();
  /// The same for the running backward, if that has a call of the unit to come.
  void prefetch_in_backward();
  /// The outermost forward is over: what was prefetched without need or not called by all modules of the unit goes.
  void finish_forward();
  /// The running backward, which has the id, begins: calls in its graph are due.
  void begin_backward(int64_t id);
  /// Called at the end of backward for every unit, in the same order on all ranks.
  void finish_backward(int64_t id);
  /// The backward that has the id failed, and another one begins without a forward before. Calls that it did not reach
  /// stay, for their own backward.
  void abort_backward(int64_t id);
  /// Back to the state before an iteration that failed; gradients that earlier backwards reduced stay.
  void abort_iteration();

 private:
  /// One differentiable call of forward. Owned by its output nodes: it is gone when the graph is.
  struct ForwardCall {
    ParamVersions versions;         // of the parameters when forward used them
    AutogradBoundary outputs = {};  // from the end of forward on
    /// Of a call in a checkpointed region: who asks for it has the region computed again.
    std::optional<torch::autograd::SavedVariable> recomputation;
    int64_t expected_in = -1;  // the backward that is to reach it yet
    int64_t backward = -1;     // the backward that reached it last
  };

  /// How far the running backward has come with the unit's parameters.
  enum class BackwardPhase {
    Idle,
    Early,         // gradients came before backward did to the unit
    Running,       // backward is in the unit, or behind it with gradients to come
    RunningEarly,  // the same after Early
  };
  bool is_early() const { return phase_ == BackwardPhase::Early || phase_ == BackwardPhase::RunningEarly; }
  bool has_entered_backward() const { return phase_ >= BackwardPhase::Running; }

  struct RunningForward {
    std::shared_ptr<ForwardCall> forward_call = nullptr;  // of a differentiable call
    std::vector<AliasedTensor> inputs = {};
    AutogradBoundary border = {};  // of the inputs
    int64_t number = 0;            // of the thread's differentiable calls
    uint64_t first_node = 0;       // of autograd that it can have made
  };

  void enter_thread();
  void leave_thread();
  void pre_forward(HookPoint& point, size_t module, TensorRefs inputs);
  void post_forward(TensorRefs outputs);
  void end_call(RunningForward& call, TensorRefs outputs);
  void copy_views_of_params(TensorRefs outputs) const;
  void insert_input_boundary(RunningForward& call, TensorRefs inputs);
  void insert_output_boundary(const RunningForward& call, TensorRefs outputs);
  void forward_failed();
  void end_failed_call();
  void pre_backward(ForwardCall& forward_call, bool has_gradient);
  static bool is_to_come(const ForwardCall& forward_call);
  static bool is_due(const ForwardCall& forward_call);
  void end_calls_of(int64_t id);
  void post_backward(const ForwardCall& forward_call);
  void before_accumulation(size_t param, bool of_dtensor);
  void on_accumulated(size_t param);
  void check_arrival(size_t param);
  void take_sharded_gradient(size_t param);
  bool reshards_after_forward() const;
  /// Parameters stay also after a forward that no backward follows.
  bool keeps_without_backward() const { return was_reshard_set_ && !options_.reshard_after_forward.value_or(true); }
  void reshard_after_forward();
  void forget_old_values();
  void reshard_and_reduce(bool reshards, bool reduces);
  void reduce();
  void report(FSDPEventKind step) const;

  std::shared_ptr<ParamGroup> group_;
  Options options_;
  Settings settings_;
  std::shared_ptr<CommOverrides> slots_ = comm_overrides();
  std::shared_ptr<FSDPRoot> root_;
  std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  int64_t unit_ = 0;
  std::string name_;
  std::vector<bool> ran_;                                  // which of the unit's modules were called in this forward
  std::vector<RunningForward> running_forwards_;           // forwards that are running, innermost last
  std::atomic<std::thread::id> thread_;                    // that runs them; none between forwards
  std::vector<std::weak_ptr<ForwardCall>> forward_calls_;  // of graphs that may still run backward
  int active_calls_ = 0;                                   // calls whose backward is running
  bool is_differentiable_ = false;                         // a call of the running outermost forward was
  bool was_reshard_set_ = false;                           // by set_reshard_after_forward()
  BackwardPhase phase_ = BackwardPhase::Idle;
  bool expects_early_ = false;  // gradients are seen to that come before backward does to the unit
  bool has_unreduced_ = false;
  bool is_prefetched_ = false;  // the gather in flight was not asked for by the user
};

}  // namespace tessera
