// Fused ops that compute elements one by one (fused/).

#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// Pairs of features turn together. Tables broadcast along batch and heads.
Strategies rotate_positions_strategies(const OpCall& call) {
  auto strategies = pointwise_strategies(call, call.operands[0].meta);
  strategies.pop_back();
  keep_linear(strategies, call, 0);
  return strategies;
}

const RegisterOpRules fused_rules([] {
  // Linear in `up`, as a product is, and backward in the gradient.
  register_op_rule({"tessera::swiglu", "tessera::tanh_geglu"},
                   {.strategies = [](const OpCall& call) { return linear_strategies(call, {{1}}); }});
  register_op_rule({"tessera::tanh_gelu"},
                   {.strategies = [](const OpCall& call) { return pointwise_strategies(call); }});
  register_op_rule({"tessera::rotate_positions"}, {.strategies = rotate_positions_strategies});
  register_op_rule({"tessera::swiglu_backward", "tessera::tanh_geglu_backward", "tessera::tanh_gelu_backward"},
                   {.strategies = [](const OpCall& call) { return linear_strategies(call, {{0}}); }});
});

}  // namespace

}  // namespace tessera
