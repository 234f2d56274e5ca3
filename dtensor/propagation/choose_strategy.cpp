// Chooses the strategy of a rule that moves the fewest bytes.

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

/// Ignores the order of axes, which is decided for the whole call; strategies only state the dim that each axis shards.
bool equal_without_order(const Placement& a, const Placement& b) {
  return a.without_order() == b.without_order();
}

/// Returns the bytes that one rank sends to change a placement. A constant makes a free local move (chunk) cost more
/// than no move.
double move_cost(const Placement& from, const Placement& to, double bytes, double num_ranks) {
  if (equal_without_order(from, to)) {
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

double tensor_bytes(const TensorMeta& meta) {
  return static_cast<double>(c10::multiply_integers(meta.sizes.begin(), meta.sizes.end())) *
         static_cast<double>(c10::elementSize(meta.dtype));
}

Placement placement_on(const Operand& operand, size_t axis) {
  return operand.spec ? operand.spec->placements()[axis] : Placement(Replicate());
}

/// Returns for each result whether it is a tensor that the call writes, as with in-place and out= ops.
bool returns_written_operands(const OpCall& call) {
  const auto& returns = call.op.schema().returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto& r) { return is_written(r); });
}

/// Returns whether outputs are placed like the written operands, which the local op returns. Outputs that only running
/// the op can determine are not planned.
bool outputs_are_written_operands(const OpCall& call, const AxisStrategy& strategy) {
  PlacementVector written;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (call.operands[i].written) {
      written.push_back(strategy.operands[i]);
    }
  }
  return strategy.outputs.empty() || written == strategy.outputs;
}

/// Returns the cost of moving a written operand back; a Partial tensor gets the result as its only term.
double cost_back(const Placement& from, const Placement& to, double bytes, double num_ranks) {
  if (to.is_partial()) {
    return from.is_replicate() ? 1 : kImpossible;
  }
  return move_cost(from, to, bytes, num_ranks);
}

double strategy_cost(const OpCall& call, const AxisStrategy& strategy) {
  if (returns_written_operands(call) && !outputs_are_written_operands(call, strategy)) {
    return kImpossible;
  }
  double cost = 0;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    const auto current = placement_on(operand, call.axis);
    if (current == strategy.operands[i]) {
      continue;
    }
    if (!operand.spec) {
      return kImpossible;
    }
    const double bytes = tensor_bytes(operand.meta);
    const auto num_ranks = static_cast<double>(call.axis_size);
    cost += move_cost(current, strategy.operands[i], bytes, num_ranks);
    cost += operand.written ? cost_back(strategy.operands[i], current, bytes, num_ranks) : 0;
  }
  return cost;
}

AxisStrategy all_replicated(const OpCall& call) {
  return {.operands = PlacementVector(call.operands.size(), Replicate()),
          .outputs = PlacementVector(call.outputs.size(), Replicate())};
}

std::string describe_operands(const OpCall& call) {
  std::string text;
  for (const auto& operand : call.operands) {
    text += text.empty() ? "" : ", ";
    text += to_string(operand.meta) + (operand.spec ? " " + to_string(operand.spec->placements()) : " (plain scalar)") +
            (operand.written ? " (written)" : "");
  }
  return text;
}

}  // namespace

AxisStrategy choose_cheapest(Strategies strategies, const OpCall& call) {
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
                "{}: no right way to run it on {}. redistribute() the pending tensors first",
                toString(call.op.operator_name()), describe_operands(call));
  return *best;
}

}  // namespace tessera
