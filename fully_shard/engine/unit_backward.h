#pragma once
// UnitBackward: the backward of one unit, from its output nodes in autograd's graph to the reduction.
//
//   output nodes → enter(), at the first one: unshard, prefetch, stash sharded gradients
//   input nodes  → leave(), at the last one: reshard, start the reduction of the gradients
//   end          → finish(): ends units without input nodes (inputs without gradient)
//
// Each forward call of a module has a ForwardCall. Parameters stay unsharded while any call's backward runs. Gradients
// are reduced once no call remains in the graph of that backward. All ranks share that graph, even if they keep
// different other graphs, so every rank issues the same collectives in the same order.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <vector>

#include "fully_shard/autograd/autograd_boundary.h"
#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/param/unit_params.h"

namespace tessera {

class FSDPState;

/// Differentiable forward call. Its output nodes own it, so it is destroyed with the graph.
struct ForwardCall {
  ParamVersions versions;         // versions of the parameters used in forward
  AutogradBoundary outputs = {};  // set at the end of forward
  /// Set for a call in a checkpointed region; unpacking it recomputes the region.
  std::optional<torch::autograd::SavedVariable> recomputation;
  int64_t expected_in = -1;  // id of the backward that will reach it
  int64_t backward = -1;     // id of the backward that last reached it
};

class UnitBackward {
 public:
  explicit UnitBackward(FSDPState& unit) : unit_(unit) {}

  /// Registers the gradient hooks of the unit's parameters.
  void install();
  /// Registers hooks for gradients that precede the unit's backward, which the outermost unit needs.
  void expect_early_gradients();

  void add_call(const std::shared_ptr<ForwardCall>& call);
  /// Returns whether a call whose graph this rank keeps has not had a backward. Ranks may differ.
  bool is_awaited() const;
  /// Returns whether the running backward has yet to reach a call of the unit. Equal on all ranks.
  bool is_due() const;
  /// Returns whether a call's backward is running, or was interrupted by an exception.
  bool is_entered() const { return active_calls_ > 0; }
  /// Returns whether gradients are waiting for a later reduction: unsynchronized, not all-reduced, or in flight.
  bool has_unreduced() const;

  /// Starts the all-gather early if the running backward has yet to reach a call of the unit.
  void prefetch();
  /// Records which calls are in the graph of the backward that begins.
  void begin(int64_t id);
  /// Runs at each output node of a call.
  void enter(ForwardCall& call, bool has_gradient);
  /// Runs at the last input node of a call.
  void leave(const ForwardCall& call);
  /// Ends the backward. Called for every unit, in the same order on all ranks.
  void finish(int64_t id);
  /// Discards the failed backward `id`. Calls that it did not reach still expect a backward.
  void abort(int64_t id);
  /// Discards the iteration's calls and unreduced gradients.
  void abort_all();

 private:
  enum class Phase {
    Idle,
    Early,         // gradients arrived before backward reached the unit
    Running,       // backward is in the unit, or behind it with gradients pending
    RunningEarly,  // like Running, after Early
  };

  bool is_early() const { return phase_ == Phase::Early || phase_ == Phase::RunningEarly; }
  void end_calls(int64_t id);
  void before_accumulation(size_t param, bool of_dtensor);
  void on_accumulated(size_t param);
  void check_arrival(size_t param) const;
  void take_sharded_gradient(size_t param) const;
  void reshard_and_reduce(bool reshards, bool reduces);
  void reduce();

  FSDPState& unit_;
  std::shared_ptr<CommOverrides> slots_ = comm_overrides();
  std::vector<std::weak_ptr<ForwardCall>> calls_;  // calls whose graphs may still run backward
  int active_calls_ = 0;                           // number of calls whose backward runs
  Phase phase_ = Phase::Idle;
  bool expects_early_ = false;
  bool has_unreduced_ = false;
};

}  // namespace tessera
