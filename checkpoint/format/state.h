#pragma once
// What a checkpoint holds: tensors and values by name, in three sections.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <variant>

namespace tessera::dcp {

/// A tensor (plain, or a DTensor), a number or a text.
using StateValue = std::variant<at::Tensor, int64_t, double, std::string>;

/// Handles to tensors, not copies: what load() writes reaches whoever else holds them. Sorted, so that all ranks go
/// through it in one order.
using StateDict = std::map<std::string, StateValue>;

/// A plain tensor is saved once, as the first rank that has its key has it: so of a model's buffers that differ from
/// rank to rank, such as a batch norm's running statistics, rank 0's, which load() gives to all. A DTensor is saved as
/// the mesh of the first rank that has its key has it: so of replicas that lie on meshes of their own, rank 0's. What
/// must come back to each rank as it was, such as the state of a random generator, needs a key for each:
/// fmt::format("rng.{}", rank).
struct State {
  StateDict model = {};
  StateDict optimizer = {};
  /// Anything else: the step, the data loader's state, random generators (rng_state.h). libtorch's StepLR shows nothing
  /// of its own: save how many steps it made. To resume, make a new one, call its step() as often, and only then
  /// set_optimizer_state_dict: each step changes the rate that the optimizer has, and the saved rate has them already.
  /// ReduceLROnPlateau, which goes by the losses it was given, cannot be brought back by a count.
  StateDict user = {};
};

}  // namespace tessera::dcp
