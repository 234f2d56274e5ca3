// Batch norms: channels are independent of each other. With running statistics (eval), items are too. In training,
// statistics cover all items, so if these are sharded, ranks exchange their own (sharded_batch_norm.h).

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

#include "dtensor/ops/norm/sharded_batch_norm.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/output_metas.h"
#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

bool is_backward(const c10::OperatorHandle& op) {
  return op.schema().arguments()[0].name().rfind("grad", 0) == 0;
}

size_t input_operand(const c10::OperatorHandle& op) {
  return is_backward(op) ? 1 : 0;
}

const TensorMeta& input_meta(const OpCall& call) {
  return call.operands[input_operand(call.op)].meta;
}

/// Returns whether the statistics come from the batch, according to argument "training", "train" or "update", or to the
/// name of overloads without it.
bool uses_batch_statistics(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> args) {
  const auto& schema = op.schema();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& name = schema.arguments()[i].name();
    if (name == "training" || name == "train" || name == "update") {
      return args[i].toBool();
    }
  }
  return schema.name().find("no_training") == std::string::npos && schema.name().find("no_update") == std::string::npos;
}

/// Returns the placement along channels for tensors with one entry per channel; other vectors (unsaved statistics) are
/// replicated.
Placement along_channels(const TensorMeta& meta, int64_t channels) {
  if (meta.sizes.size() > 1) {
    return Shard(1);
  }
  return meta.sizes.size() == 1 && meta.sizes[0] == channels ? Placement(Shard(0)) : Placement(Replicate());
}

AxisStrategy shard_channels(const OpCall& call) {
  AxisStrategy strategy;
  const int64_t channels = input_meta(call).sizes[1];
  for (const auto& operand : call.operands) {
    strategy.operands.push_back(along_channels(operand.meta, channels));
  }
  for (const auto& output : call.outputs) {
    strategy.outputs.push_back(along_channels(output, channels));
  }
  return strategy;
}

/// Returns the placement of sums over sharded items: Replicate if all ranks need them, otherwise Partial.
Placement gradient_of_parameters(const OpCall& call) {
  const bool is_summed = uses_batch_statistics(call.op, call.args) && call.args[kMask].toBoolList().get(0);
  return is_summed ? Placement(Replicate()) : Placement(Partial());
}

/// Shards dim `dim` of tensors like the input.
AxisStrategy shard_input_dim(const OpCall& call, int64_t dim) {
  AxisStrategy strategy;
  const auto placement = [&](const TensorMeta& meta, const Placement& other) {
    return meta.sizes.size() > 1 ? Placement(Shard(dim)) : other;
  };
  for (const auto& operand : call.operands) {
    strategy.operands.push_back(placement(operand.meta, Replicate()));
  }
  const auto of_vectors = is_backward(call.op) ? gradient_of_parameters(call) : Placement(Replicate());
  for (const auto& output : call.outputs) {
    strategy.outputs.push_back(placement(output, of_vectors));
  }
  return strategy;
}

/// Returns whether items can be sharded with batch statistics: there are items, backward has saved statistics, and all
/// vectors fit. (Kernels reject an empty batch.)
bool can_shard_items(const OpCall& call) {
  if (!uses_batch_statistics(call.op, call.args)) {
    return true;
  }
  const auto& input = input_meta(call);
  const bool has_saved = !is_backward(call.op) ||
                         (call.operand_of_arg(kSavedMean) >= 0 && call.operand_of_arg(kSavedInverseDeviation) >= 0);
  return has_saved && numel(input) > 0 && std::ranges::all_of(call.operands, [&](const Operand& operand) {
           return operand.meta.sizes == input.sizes || operand.meta.sizes == DimVector{input.sizes[1]} ||
                  call.op.schema().arguments()[operand.arg].name() == "reserve";
         });
}

Strategies batch_norm_strategies(const OpCall& call) {
  Strategies strategies;
  const auto ndim = static_cast<int64_t>(input_meta(call).sizes.size());
  if (ndim < 2) {
    return strategies;
  }
  strategies.push_back(shard_channels(call));
  for (int64_t dim = 0; dim < ndim && can_shard_items(call); ++dim) {
    if (dim != 1) {
      strategies.push_back(shard_input_dim(call, dim));
    }
  }
  return strategies;
}

/// Drops results that the mask does not request, such as those of cuDNN's batch_norm_backward.
void drop_unwanted(std::vector<TensorMeta>& metas, const c10::List<bool>& mask) {
  if (metas.size() == mask.size()) {
    size_t next = 0;
    std::erase_if(metas, [&](const TensorMeta&) { return !mask.get(next++); });
  }
}

/// Determines which statistics are saved, and their dtypes, which depend on device and mode, from a batch of one item
/// of one pixel.
std::vector<TensorMeta> batch_norm_metas(const OpCall& call) {
  const auto& input = input_meta(call);
  auto metas = probe_output_metas(call, [](const TensorMeta& meta) {
    DimVector sizes = meta.sizes;
    for (size_t dim = 0; sizes.size() > 1 && dim < sizes.size(); ++dim) {
      sizes[dim] = dim == 1 ? sizes[dim] : 1;
    }
    return sizes;
  });
  for (auto& meta : metas) {
    if (meta.sizes.size() > 1) {
      meta = TensorMeta::contiguous(input.sizes, meta.dtype);
    }
  }
  if (is_backward(call.op)) {
    drop_unwanted(metas, call.args[kMask].toBoolList());
  }
  return metas;
}

bool is_over_ranks(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const at::ArrayRef<c10::IValue> args(&local_argument(op, stack, 0), op.schema().arguments().size());
  return uses_batch_statistics(op, args) && shards_items(*plan.operands[input_operand(op)]);
}

/// Handles running statistics on a rank with channels but no items. CUDA's kernel returns statistics even then, but
/// cannot run without an item, so it gets one of zeros.
void forward_without_items(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  auto& input = local_argument(op, stack, 0);
  std::vector<int64_t> one_item(static_cast<size_t>(input.toTensor().dim()), 1);
  one_item[1] = input.toTensor().size(1);
  input = at::zeros(one_item, input.toTensor().options());
  op.callBoxed(stack);
  auto& items = (*stack)[stack->size() - op.schema().returns().size()];
  items = at::empty(plan.outputs[0]->local_sizes(), items.toTensor().options());
}

/// Runs the norm. Ranks without items take part in the exchange of statistics. Without an exchange, a rank without
/// elements of the results has nothing to do.
void local_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  if (is_over_ranks(op, stack, plan)) {
    sharded_batch_norm(op, stack, plan);
  } else if (has_nothing_to_compute(plan)) {
    set_zero_results(op, stack, plan, c10::SmallVector<bool, 8>(plan.outputs.size(), true));
  } else if (is_empty_shard(op, stack, plan.operands[0], 0)) {
    forward_without_items(op, stack, plan);
  } else {
    op.callBoxed(stack);
  }
}

/// Handles zero channels, by which kernels divide, and outputs that are not requested.
void local_batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  if (is_over_ranks(op, stack, plan)) {
    sharded_batch_norm_backward(op, stack, plan);
  } else if (is_empty_shard(op, stack, plan.operands[1], 1) || has_nothing_to_compute(plan)) {
    const auto mask = local_argument(op, stack, kMask).toBoolList();
    set_zero_results(op, stack, plan, std::array<bool, 3>{mask.get(0), mask.get(1), mask.get(2)});
  } else {
    const auto mask = local_argument(op, stack, kMask).toBoolList();
    op.callBoxed(stack);
    for (size_t i = 0; i < mask.size(); ++i) {
      if (!mask.get(i)) {
        (*stack)[stack->size() - mask.size() + i] = at::Tensor();
      }
    }
  }
}

/// Returns whether native_batch_norm writes running statistics, which it does only in training.
bool writes_statistics(at::ArrayRef<c10::IValue> args, size_t arg) {
  constexpr size_t kRunningMean = 3, kRunningVar = 4, kTraining = 5;
  return (arg == kRunningMean || arg == kRunningVar) && args[kTraining].toBool();
}

const RegisterOpRules batch_norm_rules([] {
  const OpRule forward{.strategies = batch_norm_strategies,
                       .local_call = local_batch_norm,
                       .output_metas = batch_norm_metas,
                       .runs_on_empty_shards = true,
                       .op_takes_shards = true};
  register_op_rule(
      {"aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit.no_stats",
       "aten::_native_batch_norm_legit_no_training", "aten::_native_batch_norm_legit_functional",
       "aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional", "aten::_batch_norm_no_update"},
      forward);
  auto with_undeclared_writes = forward;
  with_undeclared_writes.undeclared_writes = {3, 4};
  with_undeclared_writes.writes = writes_statistics;
  register_op_rule({"aten::native_batch_norm"}, with_undeclared_writes);
  register_op_rule({"aten::native_batch_norm_backward", "aten::batch_norm_backward"},
                   {.strategies = batch_norm_strategies,
                    .local_call = local_batch_norm_backward,
                    .output_metas = batch_norm_metas,
                    .runs_on_empty_shards = true});
});

}  // namespace

}  // namespace tessera
