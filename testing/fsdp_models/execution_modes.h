#pragma once
// Runs a test in each mode of unit computation: normally, and with each unit checkpointed, so that backward reruns
// forwards.
//
//   for_each_execution_mode([&](const ExecutionMode& mode) {
//     mode.shard(*model, {.mesh = mesh});            // instead of fully_shard(model, {.mesh = mesh})
//     train_and_compare(...);
//   });
//
// Its source, the decorator test_compiled_fsdp in torch/testing/_internal/common_fsdp.py, runs a test eagerly and
// compiled, by a replaced fully_shard that a failing test leaves in place. Here the replacement is a value, so there is
// nothing to restore, and checkpointing takes the place of the compiler, which libtorch lacks.

#include <functional>
#include <string>
#include <vector>

#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

struct ExecutionMode {
  std::string name;
  ShardFn shard;
};

/// Modules that a mode may change; none means all.
using ModuleFilter = std::function<bool(torch::nn::Module&)>;

/// Returns "eager" and "checkpointed".
std::vector<ExecutionMode> execution_modes(ModuleFilter filter = nullptr);

/// Runs `test` in every mode, with a barrier over the default group before and after each. Throws ExpectationError,
/// naming the mode. All ranks must call it.
void for_each_execution_mode(const std::function<void(const ExecutionMode&)>& test, ModuleFilter filter = nullptr);

}  // namespace tessera::testing
