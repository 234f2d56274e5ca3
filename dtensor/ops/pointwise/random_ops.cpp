// Random ops draw the full tensor on every rank and keep this rank's shard, or on a GPU draw only the shard
// (dtensor/random/random.h).

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <algorithm>

#include "dtensor/local/gather_full.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/random/kernel_draw.h"
#include "dtensor/random/random.h"
#include "dtensor/random/shard_of_whole.h"

namespace tessera {

namespace {

/// Sets the rank's generator if the call has none.
void set_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::DeviceType device) {
  const auto index = op.schema().argumentIndexWithName("generator");
  if (index && local_argument(op, stack, static_cast<size_t>(*index)).isNone()) {
    local_argument(op, stack, static_cast<size_t>(*index)) = c10::IValue(dtensor_generator(device));
  }
}

std::optional<DrawParameters> draw_parameters(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto number = [&](size_t arg) { return local_argument(op, stack, arg).toDouble(); };
  const std::string name = toString(op.operator_name());
  if (name == "aten::normal_") {
    return DrawParameters{Distribution::Normal, number(1), number(2)};
  }
  if (name == "aten::uniform_") {
    return DrawParameters{Distribution::Uniform, number(1), number(2)};
  }
  if (name == "aten::bernoulli_.float") {
    return DrawParameters{Distribution::Bernoulli, number(1)};
  }
  return std::nullopt;
}

/// Runs the same call without data, so that ATen's errors for invalid parameters are thrown.
void check_parameters(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t args = op.schema().arguments().size();
  torch::jit::Stack call(stack.end() - static_cast<std::ptrdiff_t>(args), stack.end());
  call[0] = call[0].toTensor().to(at::kMeta);
  call.back() = c10::IValue();  // the generator
  op.callBoxed(&call);
}

/// Draws this rank's shard of the full tensor in place, with the call's generator. Returns false, without changes, if
/// no kernel can.
bool draw_part(const c10::OperatorHandle& op, torch::jit::Stack* stack, const DTensorSpec& spec) {
  const auto local = local_argument(op, stack, 0).toTensor();
  if (!local.is_cuda() || !local.is_non_overlapping_and_dense()) {
    return false;
  }
  const auto parameters = draw_parameters(op, stack);
  const auto shard = parameters ? shard_of_whole(spec, local.strides()) : std::nullopt;
  if (!shard) {
    return false;
  }
  check_parameters(op, *stack);
  const auto index = static_cast<size_t>(*op.schema().argumentIndexWithName("generator"));
  if (!draw_by_kernel(local, *shard, *parameters, local_argument(op, stack, index).toGenerator())) {
    return false;
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(local);
  return true;
}

/// The written tensor is not moved, except a NormPartial one, because negative numbers cannot be its terms. Tensors
/// that parametrize the draw (probabilities) are replicated.
Strategies draw_in_place_strategies(const OpCall& call) {
  AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()), .outputs = {}};
  const auto& self = call.operands[0].spec;
  if (self && !self->placements()[call.axis].is_norm_partial()) {
    strategy.operands[0] = self->placements()[call.axis];
  }
  strategy.outputs = {strategy.operands[0]};
  return {strategy};
}

void local_draw_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& spec = *plan.operands[0];
  const auto local = local_argument(op, stack, 0).toTensor();
  if (local.is_meta()) {
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(local);
    return;
  }
  set_generator(op, stack, local.device().type());
  if (draw_part(op, stack, spec)) {
    return;
  }
  const auto whole = at::empty_strided(spec.sizes(), spec.strides(), local.options());
  local_argument(op, stack, 0) = whole;
  op.callBoxed(stack);
  local.copy_(local_shard_of(whole, spec));
  stack->back() = local;
}

/// For ops with replicated operands: each rank computes the same with the same generator, one for the data's device,
/// which for offloaded tensors differs from the mesh's.
void local_draw(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto operand = std::ranges::find_if(arguments, &c10::IValue::isTensor);
  set_generator(op, stack, operand->toTensor().device().type());
  op.callBoxed(stack);
}

constexpr const char* kInPlace = R"(
    normal_ uniform_ exponential_ bernoulli_.float bernoulli_.Tensor random_ random_.from random_.to geometric_ cauchy_
    log_normal_)";

constexpr const char* kWhole = R"(
    multinomial poisson binomial _standard_gamma _sample_dirichlet normal.Tensor_Tensor normal.Tensor_float
    normal.float_Tensor rrelu_with_noise rrelu_with_noise_)";

const RegisterOpRules random_ops_rules([] {
  register_op_rule(aten_ops(kInPlace), {.strategies = draw_in_place_strategies,
                                        .local_call = local_draw_in_place,
                                        .output_metas = like_operand(0),
                                        .reads_float_scalars = false,
                                        .runs_on_empty_shards = true});
  register_op_rule(aten_ops(kWhole), {.strategies = [](const OpCall&) { return Strategies(); },
                                      .local_call = local_draw,
                                      .requires_replicated = [](const OpCall&) { return true; },
                                      .reads_float_scalars = false,
                                      .runs_on_empty_shards = true});
});

/// Like ATen's CPU kernel, with ops on DTensors: the input's values need not be gathered.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto bools = input.options().dtype(at::kBool);
  if (train && !*train) {
    return {input.clone(), at::ones_like(input, bools)};
  }
  const auto mask = at::empty_like(input, bools).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_dropout", &native_dropout);
}

}  // namespace tessera
