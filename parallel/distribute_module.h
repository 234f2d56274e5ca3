#pragma once
// Makes a module's parameters DTensors, and its inputs and outputs with them.
//
//   distribute_module(linear, mesh,
//                     {.partition_fn = [](const std::string&, torch::nn::Module& module, const DeviceMesh& mesh) {
//                        distribute_parameter(module, "weight", mesh, {Shard(0)});
//                      },
//                      .input_fn = [](torch::nn::Module&, TensorRefs inputs, const DeviceMesh& mesh) {
//                        *inputs[0] = from_local(*inputs[0], mesh, {Replicate()});
//                      }});
//
// Parameters keep their identity: members, parameters() and optimizers stay valid, as with fully_shard.
// All ranks must call these functions in the same order. Thread safety: one thread a rank.
// After torch.distributed.tensor.distribute_module.

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include "dtensor/dtensor.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// The parameter or buffer `name` of `module` (not of a child) becomes a DTensor under `placements`; see
/// distribute_tensor for whose data count. Throws KeyError if the module has none of that name, ValueError if it is a
/// DTensor already or the placements do not fit.
void distribute_parameter(torch::nn::Module& module, const std::string& name, const DeviceMesh& mesh,
                          const Placements& placements, DistributeOptions options = {});

struct DistributeModuleOptions {
  /// Called for the module ("") and each module below it, by name; it distributes what it wants to. A module that is
  /// there under two names is shown once, by the first.
  std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)> partition_fn =
      nullptr;
  /// Called before the module's forward with the tensors among its arguments, which it may replace.
  std::function<void(torch::nn::Module& module, TensorRefs inputs, const DeviceMesh& mesh)> input_fn = nullptr;
  /// Called after forward with the tensors of its result.
  std::function<void(torch::nn::Module& module, TensorRefs outputs, const DeviceMesh& mesh)> output_fn = nullptr;
};

/// Runs partition_fn everywhere, replicates the parameters and buffers that are plain after that, and registers
/// input_fn and output_fn. Throws StateError if one of the latter is given and the module's type has no hook point.
void distribute_module(ModuleRef module, const DeviceMesh& mesh, DistributeModuleOptions options = {});

}  // namespace tessera
