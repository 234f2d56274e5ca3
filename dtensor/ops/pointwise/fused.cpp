// Fused ops that compute elements one by one (fused/).

#include "dtensor/ops/pointwise/pointwise.h"

namespace tessera {

namespace {

const RegisterOpRules fused_rules([] {
  // Linear in `up`, as a product is, and backward in the gradient.
  register_op_rule({"tessera::swiglu"},
                   {.strategies = [](const OpCall& call) { return linear_strategies(call, {{1}}); }});
  register_op_rule({"tessera::swiglu_backward"},
                   {.strategies = [](const OpCall& call) { return linear_strategies(call, {{0}}); }});
});

}  // namespace

}  // namespace tessera
