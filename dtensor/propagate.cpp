#include "dtensor/propagate.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <fmt/ranges.h>

#include <limits>

#include "base/error.h"

namespace tessera {

namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

/// Bytes that one rank sends to go from one placement to another. The constant makes a free local move
/// (chunk) cost more than no move.
double move_cost(const Placement& from, const Placement& to, double bytes, double num_ranks) {
  if (from == to) {
    return 0;
  }
  if (to.is_partial()) {
    return kImpossible;
  }
  const double share = (num_ranks - 1) / num_ranks;
  if (from.is_replicate()) {
    return 1;
  }
  if (from.is_shard()) {
    return 2 + bytes * share * (to.is_shard() ? 1 / num_ranks : 1);
  }
  return 2 + bytes * share * (to.is_shard() ? 1 : 2);
}

double bytes_of(const TensorMeta& meta) {
  return static_cast<double>(c10::multiply_integers(meta.sizes.begin(), meta.sizes.end())) *
         static_cast<double>(c10::elementSize(meta.dtype));
}

Placement placement_on(const Operand& operand, size_t axis) {
  return operand.spec ? operand.spec->placements()[axis] : Placement(Replicate());
}

/// An in-place op returns the tensor it wrote: what the strategy says of the output must be so already.
bool outputs_are_written_operands(const OpCall& call, const AxisStrategy& strategy) {
  PlacementVector written;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (call.operands[i].written) {
      written.push_back(strategy.operands[i]);
    }
  }
  return written.size() != strategy.outputs.size() || written == strategy.outputs;
}

double strategy_cost(const OpCall& call, const AxisStrategy& strategy) {
  if (!outputs_are_written_operands(call, strategy)) {
    return kImpossible;
  }
  double cost = 0;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    const auto current = placement_on(operand, call.axis);
    if (current == strategy.operands[i]) {
      continue;
    }
    if (operand.written || !operand.spec) {
      return kImpossible;
    }
    cost += move_cost(current, strategy.operands[i], bytes_of(operand.meta), static_cast<double>(call.axis_size));
  }
  return cost;
}

AxisStrategy all_replicated(const OpCall& call) {
  return {.operands = PlacementVector(call.operands.size(), Replicate()),
          .outputs = PlacementVector(call.outputs.size(), Replicate())};
}

std::string describe(const OpCall& call) {
  std::string text;
  for (const auto& operand : call.operands) {
    text += text.empty() ? "" : ", ";
    text += to_string(operand.meta) + (operand.spec ? " " + to_string(operand.spec->placements()) : " (plain scalar)") +
            (operand.written ? " (written)" : "");
  }
  return text;
}

AxisStrategy cheapest_of(Strategies strategies, const OpCall& call) {
  strategies.push_back(all_replicated(call));
  const AxisStrategy* best = nullptr;
  double best_cost = kImpossible;
  for (const auto& strategy : strategies) {
    TESSERA_ASSERT(strategy.operands.size() == call.operands.size() && strategy.outputs.size() == call.outputs.size(),
                   "the rule of {} gives {} → {} placements for {} → {} tensors", toString(call.op.operator_name()),
                   strategy.operands.size(), strategy.outputs.size(), call.operands.size(), call.outputs.size());
    const double cost = strategy_cost(call, strategy);
    if (cost < best_cost) {
      best = &strategy;
      best_cost = cost;
    }
  }
  TESSERA_CHECK(NotImplementedError, best != nullptr,
                "{}: no right way to run it on {}: the written tensor would have to change its placements. Use the "
                "out-of-place op, or redistribute() the tensor first",
                toString(call.op.operator_name()), describe(call));
  return *best;
}

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided(meta.sizes, meta.strides, at::TensorOptions().dtype(meta.dtype).device(at::kMeta));
}

/// As many dims as `meta` has, all of size 1.
at::Tensor one_element(const TensorMeta& meta) {
  return at::ones(DimVector(meta.sizes.size(), 1), at::TensorOptions().dtype(meta.dtype));
}

/// The arguments with stand-ins for the operands, made by `make` on `device`.
template <class Make>
torch::jit::Stack stand_in_arguments(const OpCall& call, c10::DeviceType device, Make make) {
  torch::jit::Stack stack(call.args.begin(), call.args.end());
  size_t next = 0;
  const auto& schema = call.op.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor()) {
      if (next < call.operands.size() && call.operands[next].arg == i) {
        const auto& operand = call.operands[next++];
        value = operand.spec ? make(operand.meta) : value;
      }
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (; next < call.operands.size() && call.operands[next].arg == i; ++next) {
        tensors.push_back(make(call.operands[next].meta));
      }
      value = c10::IValue(tensors);
    } else if (value.isList() && next < call.operands.size() && call.operands[next].arg == i) {
      auto list = value.toList().copy();  // Tensor?[]: undefined entries stay
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue entry = list.get(k);
        if (entry.isTensor() && entry.toTensor().defined()) {
          list.set(k, c10::IValue(make(call.operands[next++].meta)));
        }
      }
      value = c10::IValue(list);
    } else if (schema[i].name() == "device" && value.isDevice()) {
      value = c10::Device(device);
    } else if (schema[i].name() == "pin_memory") {
      value = c10::IValue();
    }
  }
  return stack;
}

void append_outputs(const c10::IValue& value, std::vector<TensorMeta>& outputs) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      outputs.push_back(TensorMeta::of(value.toTensor()));
    }
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) {
      outputs.push_back(TensorMeta::of(tensor));
    }
  }
}

}  // namespace

std::vector<TensorMeta> infer_output_metas(const OpCall& call) {
  auto stack = stand_in_arguments(call, at::kMeta, meta_tensor);
  call.op.callBoxed(stack);
  std::vector<TensorMeta> outputs;
  for (const auto& value : stack) {
    append_outputs(value, outputs);
  }
  return outputs;
}

at::ScalarType infer_output_dtype(const OpCall& call) {
  auto stack = stand_in_arguments(call, at::kCPU, one_element);
  call.op.callBoxed(stack);
  return stack.front().toTensor().scalar_type();
}

OpPlan propagate(const OpRule& rule, OpCall& call) {
  const DTensorSpec* first = nullptr;
  for (const auto& operand : call.operands) {
    first = operand.spec && !first ? operand.spec.get() : first;
  }
  TESSERA_ASSERT(first != nullptr, "{} has no DTensor operand", toString(call.op.operator_name()));
  const auto& mesh = first->mesh();
  OpPlan plan;
  plan.rule = &rule;
  plan.outputs_from_results = rule.whole_only && rule.whole_only(call);
  if (!plan.outputs_from_results) {
    call.outputs = rule.output_metas ? rule.output_metas(call) : infer_output_metas(call);
  }

  const auto mesh_ndim = static_cast<size_t>(mesh.ndim());
  std::vector<Placements> operands(call.operands.size(), Placements(mesh_ndim, Replicate()));
  std::vector<Placements> outputs(call.outputs.size(), Placements(mesh_ndim, Replicate()));
  for (size_t axis = 0; axis < mesh_ndim; ++axis) {
    call.axis = axis;
    call.axis_size = mesh.shape()[axis];
    const auto strategy = plan.outputs_from_results ? cheapest_of({}, call) : cheapest_of(rule.strategies(call), call);
    for (size_t i = 0; i < operands.size(); ++i) {
      operands[i][axis] = strategy.operands[i];
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i][axis] = strategy.outputs[i];
    }
  }

  for (size_t i = 0; i < operands.size(); ++i) {
    const auto& spec = call.operands[i].spec;
    const bool moves = spec && spec->placements() != operands[i];
    plan.operands.push_back(moves ? spec->with_placements(operands[i], /*contiguous=*/true) : spec);
    plan.redistribute.push_back(moves);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    plan.outputs.push_back(DTensorSpec::make(mesh, outputs[i], call.outputs[i]));
  }
  return plan;
}

}  // namespace tessera
