// foreach ops: elementwise ones by name; norms and maxima, which reduce each tensor of the list.

#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "dtensor/ops/list_parts.h"
#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/reduction/reduction.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

constexpr const char* kPrefix = "aten::_foreach_";

constexpr const char* kForeachPointwise = R"(
    abs acos addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh erf erfc exp expm1 floor frac lerp lgamma log
    log10 log1p log2 maximum minimum pow reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero)";

/// Operands of a part in which the op is linear, like for linear_strategies.
struct Linear {
  const char* names;
  std::vector<std::vector<size_t>> operands;
  bool divides = false;
};

const std::vector<Linear>& linear_ops() {
  static const std::vector<Linear> ops{
      {"add sub copy", {{0, 1}}},
      {"mul", {{0}, {1}}},
      {"neg clone", {{0}}},
      {"div", {{0}}, /*divides=*/true},
  };
  return ops;
}

bool names_contain(const char* names, std::string_view name) {
  const auto list = aten_ops(names);
  return std::find(list.begin(), list.end(), "aten::" + std::string(name)) != list.end();
}

/// Only sums of tensors are linear: an added scalar is not a term of a Partial sum, nor is a quotient by zero.
std::vector<std::vector<size_t>> linear_operands(const Linear& linear, const OpCall& part) {
  if (linear.divides && divides_by_zero(part.args[1])) {
    return {};
  }
  auto sets = linear.operands;
  std::erase_if(sets, [&](const auto& set) { return set.back() >= part.operands.size(); });
  return sets;
}

void register_pointwise(const std::string& op) {
  const auto name = base_name(op, kPrefix);
  if (names_contain(kForeachPointwise, name)) {
    register_op_rule({op}, rule_by_parts([](const OpCall& part) { return pointwise_strategies(part); }));
  }
  for (const auto& linear : linear_ops()) {
    if (names_contain(linear.names, name)) {
      register_op_rule({op}, rule_by_parts([&linear](const OpCall& part) {
                         return linear_strategies(part, linear_operands(linear, part));
                       }));
    }
  }
}

/// Sharding any dim makes the result `reduced`, unless the tensor is already Partial.
Strategies reduce_part(const OpCall& part, std::optional<Placement> reduced) {
  Strategies strategies;
  for (int64_t dim = 0; reduced && !pending(part, 0) && dim < part.operands[0].ndim(); ++dim) {
    strategies.push_back(sharded(part, {dim}, {kNone}, *reduced));
  }
  return strategies;
}

Strategies foreach_norm_strategies(const OpCall& part) {
  const bool real = c10::isFloatingType(part.operands[0].meta.dtype);
  return reduce_part(part, real ? norm_placement(part.args[1].toScalar().toDouble()) : std::nullopt);
}

Strategies power_sum_strategies(const OpCall& part) {
  return reduce_part(part, Partial());
}

Strategies max_strategies(const OpCall& part) {
  const bool of_nothing = numel(part.operands[0].meta) == 0;
  return reduce_part(part, of_nothing ? std::nullopt : std::optional<Placement>(Partial(ReduceOp::Max)));
}

std::vector<TensorMeta> power_sum_metas(const OpCall& call) {
  std::vector<TensorMeta> metas;
  for (const auto dtype : infer_output_dtypes(call)) {
    metas.push_back(TensorMeta::contiguous({}, dtype));
  }
  return metas;
}

std::vector<TensorMeta> max_metas(const OpCall& call) {
  std::vector<TensorMeta> metas;
  for (const auto& operand : call.operands) {
    metas.push_back(TensorMeta::contiguous({}, operand.meta.dtype));
  }
  return metas;
}

/// Runs the op on shards with elements. The others, which kernels reject, get `neutral(dtype)`.
template <class Neutral>
CollectiveCall of_nonempty(Neutral neutral) {
  return [neutral](const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
    const auto locals = local_argument(op, stack, 0).toTensorVector();
    const auto skipped = [&](size_t i) { return locals[i].numel() == 0 && plan.outputs[i]->has_partial(); };
    std::vector<at::Tensor> taken, results;
    for (size_t i = 0; i < locals.size(); ++i) {
      if (!skipped(i)) {
        taken.push_back(locals[i]);
      }
    }
    std::vector<at::Tensor> computed;
    if (taken.empty()) {
      torch::jit::drop(*stack, op.schema().arguments().size());
    } else {
      local_argument(op, stack, 0) = c10::IValue(taken);
      op.callBoxed(stack);
      computed = torch::jit::pop(*stack).toTensorVector();
    }
    for (size_t i = 0, next = 0; i < locals.size(); ++i) {
      const auto dtype = plan.outputs[i]->dtype();
      results.push_back(skipped(i) ? at::full({}, neutral(dtype), locals[i].options().dtype(dtype)) : computed[next++]);
    }
    stack->emplace_back(std::move(results));
  };
}

OpRule reducing(Strategies (*strategies)(const OpCall&)) {
  auto rule = rule_by_parts(strategies);
  rule.reads_float_scalars = true;
  rule.local_call = of_nonempty([](at::ScalarType) { return c10::Scalar(0); });
  return rule;
}

const RegisterOpRules foreach_rules([] {
  for (const auto& op : ops_beginning_with(kPrefix)) {
    register_pointwise(op);
  }
  register_op_rule({"aten::_foreach_norm.Scalar"}, reducing(foreach_norm_strategies));
  auto power_sum = reducing(power_sum_strategies);
  power_sum.output_metas = power_sum_metas;
  register_op_rule({"aten::_foreach_powsum.Scalar"}, power_sum);
  auto max = reducing(max_strategies);
  max.local_call = of_nonempty([](at::ScalarType dtype) { return reduction_identity(ReduceOp::Max, dtype); });
  max.output_metas = max_metas;
  register_op_rule({"aten::_foreach_max"}, max);
});

/// Reads a tensor with one number per tensor of a list. It must be on the CPU, because kernels read it.
std::vector<at::Scalar> read_scalars(const char* op, const at::Tensor& scalars, size_t tensors) {
  TESSERA_CHECK(ValueError, scalars.dim() == 1 && scalars.size(0) == static_cast<int64_t>(tensors),
                "{}: scalars are {}; give a tensor of one dim with a number for each of the {} tensors", op,
                to_string(TensorMeta::of(scalars)), tensors);
  const auto* meta = dtensor_meta(scalars);
  const auto whole = (meta ? gather_full(*meta) : scalars).to(at::kCPU);
  std::vector<at::Scalar> numbers;
  for (int64_t i = 0; i < whole.size(0); ++i) {
    numbers.push_back(whole[i].item());
  }
  return numbers;
}

std::vector<at::Tensor> foreach_addcdiv(at::TensorList self, at::TensorList a, at::TensorList b,
                                        const at::Tensor& scalars) {
  return at::_foreach_addcdiv(self, a, b, read_scalars("aten::_foreach_addcdiv.Tensor", scalars, self.size()));
}
void foreach_addcdiv_(at::TensorList self, at::TensorList a, at::TensorList b, const at::Tensor& scalars) {
  at::_foreach_addcdiv_(self, a, b, read_scalars("aten::_foreach_addcdiv_.Tensor", scalars, self.size()));
}
std::vector<at::Tensor> foreach_addcmul(at::TensorList self, at::TensorList a, at::TensorList b,
                                        const at::Tensor& scalars) {
  return at::_foreach_addcmul(self, a, b, read_scalars("aten::_foreach_addcmul.Tensor", scalars, self.size()));
}
void foreach_addcmul_(at::TensorList self, at::TensorList a, at::TensorList b, const at::Tensor& scalars) {
  at::_foreach_addcmul_(self, a, b, read_scalars("aten::_foreach_addcmul_.Tensor", scalars, self.size()));
}

}  // namespace

/// Runs before dispatch, because these ops do not treat a plain tensor of numbers as an operand.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_foreach_addcdiv.Tensor", &foreach_addcdiv);
  library.impl("_foreach_addcdiv_.Tensor", &foreach_addcdiv_);
  library.impl("_foreach_addcmul.Tensor", &foreach_addcmul);
  library.impl("_foreach_addcmul_.Tensor", &foreach_addcmul_);
}

}  // namespace tessera
