#include "parallel/sequence_parallel.h"

#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "parallel/style_tensors.h"

namespace tessera {

namespace {

/// Calls `visit(module, name)` for each parameter and buffer of the target and the modules below it.
template <class Visit>
void for_each_tensor(const StyleTarget& target, Visit visit) {
  std::vector<torch::nn::Module*> modules{&target.module};
  for (const auto& module : target.module.modules(/*include_self=*/false)) {
    modules.push_back(module.get());
  }
  for (auto* module : modules) {
    for (const auto& item : module->named_parameters(/*recurse=*/false)) {
      visit(*module, item.key());
    }
    for (const auto& item : module->named_buffers(/*recurse=*/false)) {
      visit(*module, item.key());
    }
  }
}

/// Returns the local tensor. Reduces a Partial one first, because nothing would add up plain terms.
at::Tensor local_output(const at::Tensor& output) {
  return moved_local(redistribute(output, gradient_placements(placements(output))), output);
}

}  // namespace

void SequenceParallel::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
  for_each_tensor(target, [&](const torch::nn::Module& module, const std::string& name) {
    check_style_parameter(*this, target, module, name, Replicate());
  });
}

void SequenceParallel::apply(const StyleTarget& target) const {
  for_each_tensor(target, [&](torch::nn::Module& module, const std::string& name) {
    distribute_style_parameter(*this, target, module, name, Replicate());
  });
  auto& point = hook_point(target.module, describe(target));
  const Placement layout = Shard(options_.sequence_dim);
  const StyleInputOptions input{.where = describe(target), .even_shards = options_.even_shards};
  point.register_forward_pre_hook([layout, input, mesh = target.mesh](HookPoint&, TensorRefs inputs) {
    TESSERA_CHECK(ValueError, !inputs.empty(), "{}: forward was called without a tensor", input.where);
    *inputs[0] = style_input(*inputs[0], mesh, layout, layout, input);
  });
  if (options_.use_local_output) {
    point.register_forward_hook([](HookPoint&, TensorRefs outputs) {
      for (auto* output : outputs) {
        if (is_dtensor(*output)) {
          *output = local_output(*output);
        }
      }
    });
  }
}

}  // namespace tessera
