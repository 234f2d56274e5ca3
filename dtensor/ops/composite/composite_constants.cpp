#include "dtensor/ops/composite/composite_constants.h"

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/op_names.h"

namespace tessera {

namespace {

constexpr const char* kOps = R"(
    _scaled_dot_product_attention_math affine_grid_generator_backward combinations linalg_matrix_power)";

bool is_plain_argument(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !dtensor_meta(value.toTensor()) &&
         value.toTensor().dim() > 0;
}

void with_own_constants(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<ImplicitReplication> scope;
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (std::none_of(arguments.begin(), arguments.end(), is_plain_argument)) {
    scope.emplace();
  }
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

}  // namespace

void override_with_own_constants(torch::Library& library) {
  for (const auto& op : aten_ops(kOps)) {
    library.impl(op.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&with_own_constants>());
  }
}

}  // namespace tessera
