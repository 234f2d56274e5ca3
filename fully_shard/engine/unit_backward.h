#pragma once
// UnitBackward: the backward side of one unit, from its output nodes in autograd's graph to the reduction.
//
//   output nodes → enter(), at the first of them: unshard, prefetch, set sharded gradients aside
//   input nodes  → leave(), at the last of them: reshard, start the reduction of the gradients
//   end          → finish(): ends units that no input node ended (inputs without gradient)
//
// Each call of a module in forward has a ForwardCall. The parameters stay while any call's backward runs, and gradients
// are reduced when the graph of that backward has no call to come. All ranks share that graph, whichever others they
// keep, so every rank issues the same collectives in the same order.
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

/// One differentiable call of forward. Its output nodes own it, so it ends with the graph.
struct ForwardCall {
  ParamVersions versions;         // of the parameters when forward used them
  AutogradBoundary outputs = {};  // from the end of forward on
  /// Set for a call in a checkpointed region: unpacking it computes the region again.
  std::optional<torch::autograd::SavedVariable> recomputation;
  int64_t expected_in = -1;  // the backward that is to reach it yet
  int64_t backward = -1;     // the backward that reached it last
};

class UnitBackward {
 public:
  explicit UnitBackward(FSDPState& unit) : unit_(unit) {}

  /// Registers the gradient hooks of the unit's parameters.
  void install();
  /// Registers hooks for gradients that precede the unit's backward, as the outermost unit needs them.
  void expect_early_gradients();

  void add_call(const std::shared_ptr<ForwardCall>& call);
  /// Returns whether a call whose graph this rank keeps had no backward yet. Ranks may differ.
  bool is_awaited() const;
  /// Returns whether the running backward has a call of the unit to come. The same on all ranks.
  bool is_due() const;
  /// Returns whether a call's backward runs, or was left by one that threw.
  bool is_entered() const { return active_calls_ > 0; }
  /// Returns whether gradients wait for a later reduction: unsynchronized, not all-reduced, or in flight.
  bool has_unreduced() const;

  /// Starts the all-gather ahead of time if the running backward has a call of the unit to come.
  void prefetch();
  /// Notes which calls are in the graph of the backward that begins.
  void begin(int64_t id);
  /// Runs at each output node of a call.
  void enter(ForwardCall& call, bool has_gradient);
  /// Runs at the last input node of a call.
  void leave(const ForwardCall& call);
  /// Ends the backward. Called for every unit, in the same order on all ranks.
  void finish(int64_t id);
  /// Discards the backward `id`, which failed. Calls that it did not reach await their own backward.
  void abort(int64_t id);
  /// Discards the iteration: calls and unreduced gradients.
  void abort_all();

 private:
  enum class Phase {
    Idle,
    Early,         // gradients came before backward did to the unit
    Running,       // backward is in the unit, or behind it with gradients to come
    RunningEarly,  // the same after Early
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
  std::vector<std::weak_ptr<ForwardCall>> calls_;  // of graphs that may still run backward
  int active_calls_ = 0;                           // calls whose backward runs
  Phase phase_ = Phase::Idle;
  bool expects_early_ = false;
  bool has_unreduced_ = false;
};

}  // namespace tessera
