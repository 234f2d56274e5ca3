#include "testing/fsdp_models/execution_modes.h"

#include "activation_checkpoint/checkpoint.h"
#include "comm/collectives.h"
#include "testing/expect.h"

namespace tessera::testing {

std::vector<ExecutionMode> execution_modes(ModuleFilter filter) {
  const auto eager = [](torch::nn::Module& module, const FullyShardOptions& options) { fully_shard(module, options); };
  const auto checkpointed = [filter = std::move(filter)](torch::nn::Module& module, const FullyShardOptions& options) {
    if (!filter || filter(module)) {
      checkpoint_module(module);
    }
    fully_shard(module, options);
  };
  return {{"eager", eager}, {"checkpointed", checkpointed}};
}

void for_each_execution_mode(const std::function<void(const ExecutionMode&)>& test, ModuleFilter filter) {
  for (const auto& mode : execution_modes(std::move(filter))) {
    barrier(default_group());
    try {
      test(mode);
    } catch (const std::exception& failure) {
      throw ExpectationError(fmt::format("execution mode {}: {}", mode.name, failure.what()));
    }
    barrier(default_group());
  }
}

}  // namespace tessera::testing
