#pragma once
// One test, run once for each way in which units may compute: as they are, and with each unit's compute checkpointed,
// so that backward runs forwards again inside of itself.
//
//   for_each_execution_mode([&](const ExecutionMode& mode) {
//     mode.shard(*model, {.mesh = mesh});            // in place of fully_shard(model, {.mesh = mesh})
//     train_and_compare(...);
//   });
//
// After the decorator test_compiled_fsdp in torch/testing/_internal/common_fsdp.py, which runs a test eagerly and with
// the units' compute compiled, by a replaced fully_shard that a failing test leaves in place. Here the replacement is a
// value: there is nothing to restore. libtorch has no compiler; checkpointing takes its place.

#include <functional>
#include <string>
#include <vector>

#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

struct ExecutionMode {
  std::string name;
  ShardFn shard;
};

/// Which modules' compute a mode may change; none: all.
using ModuleFilter = std::function<bool(torch::nn::Module&)>;

/// "eager" and "checkpointed".
std::vector<ExecutionMode> execution_modes(ModuleFilter filter = nullptr);

/// Runs `test` in every mode, with a barrier over the default group before and after each. Throws ExpectationError that
/// names the mode. Collective.
void for_each_execution_mode(const std::function<void(const ExecutionMode&)>& test, ModuleFilter filter = nullptr);

}  // namespace tessera::testing
