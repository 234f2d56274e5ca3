#include "dtensor/ops/rule_helpers.h"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/zeros.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace tessera {

namespace {

/// Returns whether `is` holds for a number or any in a list: for the magnitude if complex, 0 or 1 if bool.
bool any_number(const c10::IValue& value, bool (*is)(double)) {
  if (value.isList()) {
    const auto list = value.toListRef();
    return std::any_of(list.begin(), list.end(), [&](const c10::IValue& element) { return any_number(element, is); });
  }
  return (value.isDouble() && is(value.toDouble())) || (value.isInt() && is(static_cast<double>(value.toInt()))) ||
         (value.isBool() && is(value.toBool() ? 1 : 0)) ||
         (value.isComplexDouble() && is(std::abs(value.toComplexDouble())));
}

}  // namespace

bool has_finite_numbers(const OpCall& call) {
  const auto is_not_finite = [](double number) { return !std::isfinite(number); };
  return std::none_of(call.args.begin(), call.args.end(),
                      [&](const c10::IValue& value) { return any_number(value, is_not_finite); });
}

bool is_surely_taken(const at::Scalar& number, at::ScalarType dtype) {
  constexpr double kLargestInt8 = 127, kLargestFloat16 = 65504;
  const bool is_whole = number.isIntegral(/*includeBool=*/false);
  if (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) {
    return (is_whole || number.isFloatingPoint()) && std::abs(number.toDouble()) <= kLargestFloat16;
  }
  return dtype != at::kBool && is_whole && number.toDouble() >= 0 && number.toDouble() <= kLargestInt8;
}

AxisStrategy sharded(const OpCall& call, at::IntArrayRef operand_dims, at::IntArrayRef output_dims,
                     const Placement& reduced) {
  TESSERA_ASSERT(operand_dims.size() == call.operands.size() && output_dims.size() == call.outputs.size(),
                 "{} → {} dims for {} → {} tensors", operand_dims.size(), output_dims.size(), call.operands.size(),
                 call.outputs.size());
  AxisStrategy strategy;
  for (const int64_t dim : operand_dims) {
    strategy.operands.push_back(dim == kNone ? Placement(Replicate()) : Placement(Shard(dim)));
  }
  for (const int64_t dim : output_dims) {
    strategy.outputs.push_back(dim == kNone ? reduced : Placement(Shard(dim)));
  }
  return strategy;
}

int64_t wrap_dim(int64_t dim, int64_t ndim) {
  return c10::maybe_wrap_dim(dim, ndim);
}

DimVector dims_argument(const c10::IValue& value, int64_t ndim) {
  DimVector dims;
  if (value.isInt()) {
    dims.push_back(wrap_dim(value.toInt(), ndim));
  } else if (value.isIntList()) {
    for (const int64_t dim : value.toIntList()) {
      dims.push_back(wrap_dim(dim, ndim));
    }
  }
  if (dims.empty()) {
    for (int64_t dim = 0; dim < ndim; ++dim) {
      dims.push_back(dim);
    }
  }
  return dims;
}

bool contains(at::IntArrayRef dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

int64_t spatial_entry(const c10::IValue& list, size_t i, int64_t otherwise) {
  const auto values = list.toIntList();
  return values.empty() ? otherwise : values.get(values.size() == 1 ? 0 : i);
}

int64_t broadcast_dim(const TensorMeta& meta, at::IntArrayRef out, int64_t dim) {
  return broadcast_dim(meta, std::ssize(out), dim, out[static_cast<size_t>(dim)]);
}

int64_t broadcast_dim(const TensorMeta& meta, int64_t ndim, int64_t dim, int64_t size) {
  const int64_t own = dim - (ndim - std::ssize(meta.sizes));
  return own >= 0 && meta.sizes[static_cast<size_t>(own)] == size ? own : kNone;
}

int64_t numel(const TensorMeta& meta) {
  return c10::multiply_integers(meta.sizes.begin(), meta.sizes.end());
}

Strategies along_dims(const OpCall& call, at::IntArrayRef touched) {
  Strategies strategies;
  const auto& first = call.operands.at(0).meta;
  for (int64_t dim = 0; dim < static_cast<int64_t>(first.sizes.size()); ++dim) {
    const auto fits = [&](const TensorMeta& meta) {
      return meta.sizes.size() == first.sizes.size() &&
             meta.sizes[static_cast<size_t>(dim)] == first.sizes[static_cast<size_t>(dim)];
    };
    const bool all_fit =
        std::all_of(call.operands.begin(), call.operands.end(), [&](const Operand& o) { return fits(o.meta); }) &&
        std::all_of(call.outputs.begin(), call.outputs.end(), fits);
    if (all_fit && !contains(touched, dim)) {
      strategies.push_back(sharded(call, DimVector(call.operands.size(), dim), DimVector(call.outputs.size(), dim)));
    }
  }
  return strategies;
}

Strategies map_dims(const OpCall& call, OutDim out_dim) {
  Strategies strategies;
  for (int64_t dim = 0; dim < call.operands[0].ndim(); ++dim) {
    const int64_t to = out_dim(call, dim);
    if (to != kNone) {
      strategies.push_back(sharded(call, {dim}, DimVector(call.outputs.size(), to)));
    }
  }
  return strategies;
}

OpRule dim_map_rule(OutDim out_dim) {
  return {.strategies = [out_dim](const OpCall& call) {
    auto strategies = map_dims(call, out_dim);
    keep_partial(strategies, call);
    return strategies;
  }};
}

std::optional<Placement> pending(const OpCall& call, size_t operand) {
  const auto& spec = call.operands.at(operand).spec;
  if (!spec || !spec->placements()[call.axis].is_partial()) {
    return std::nullopt;
  }
  return spec->placements()[call.axis];
}

void keep_partial(Strategies& strategies, const OpCall& call) {
  if (const auto placement = pending(call, 0)) {
    strategies.push_back({.operands = PlacementVector(call.operands.size(), *placement),
                          .outputs = PlacementVector(call.outputs.size(), *placement)});
  }
}

bool divides_by_zero(const c10::IValue& divisor) {
  return any_number(divisor, [](double number) { return number == 0; });
}

void keep_linear(Strategies& strategies, const OpCall& call, size_t operand, at::ArrayRef<size_t> others) {
  const auto placement = pending(call, operand);
  const bool is_linear = placement == Partial() || placement == Partial(ReduceOp::Avg);
  if (!is_linear || !has_finite_numbers(call)) {
    return;
  }
  AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()),
                        .outputs = PlacementVector(call.outputs.size(), *placement)};
  const auto distributes = [](const TensorMeta& meta) {
    return c10::isFloatingType(meta.dtype) || c10::isComplexType(meta.dtype);
  };
  bool exact = std::all_of(call.outputs.begin(), call.outputs.end(), distributes);
  // The terms of a sum may be larger than the sum, so a cast to fewer bits comes after the reduction.
  const auto keeps_bits = [&](const TensorMeta& term) {
    return std::ranges::all_of(call.outputs, [&](const TensorMeta& out) {
      const auto to = c10::toRealValueType(out.dtype), from = c10::toRealValueType(term.dtype);
      return to == from ||
             c10::elementSize(to) > c10::elementSize(from);  // bfloat16 and float16 cannot represent each other
    });
  };
  const auto add = [&](size_t term) {
    strategy.operands[term] = *placement;
    exact = exact && distributes(call.operands[term].meta) && keeps_bits(call.operands[term].meta);
  };
  add(operand);
  std::for_each(others.begin(), others.end(), add);
  if (exact) {
    strategies.push_back(std::move(strategy));
  }
}

c10::IValue& local_argument(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t index) {
  return (*stack)[stack->size() - op.schema().arguments().size() + index];
}

at::Tensor widened(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return at::isReducedFloatingType(dtype) ? tensor.to(at::toOpMathType(dtype)) : tensor;
}

void widen(c10::IValue& argument) {
  if (argument.isTensor() && argument.toTensor().defined()) {
    argument = widened(argument.toTensor());
  }
}

void set_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::vector<c10::IValue> results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
}

void set_zero_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan,
                      at::ArrayRef<bool> wanted) {
  const auto options = local_argument(op, stack, 0).toTensor().options();
  std::vector<c10::IValue> results;
  size_t next = 0;
  for (const bool exists : wanted) {
    at::Tensor result;
    if (exists) {
      const auto& spec = plan.outputs[next++];
      result = at::zeros(spec->local_sizes(), options.dtype(spec->dtype()));
    }
    results.emplace_back(std::move(result));
  }
  set_results(op, stack, std::move(results));
}

bool is_empty_shard(const c10::OperatorHandle& op, torch::jit::Stack* stack, const SpecPtr& spec, size_t index) {
  return local_argument(op, stack, index).toTensor().numel() == 0 && c10::multiply_integers(spec->sizes()) > 0;
}

DimRange local_range(const SpecPtr& spec, int64_t dim) {
  return local_range(spec->sizes()[static_cast<size_t>(dim)], dim, spec->placements(), spec->position());
}

OutputMetas like_operand(size_t operand, size_t num_outputs) {
  return [=](const OpCall& call) {
    const auto& meta = call.operands.at(operand).meta;
    return std::vector<TensorMeta>(num_outputs, TensorMeta::contiguous(meta.sizes, meta.dtype));
  };
}

DimVector broadcast_sizes(const TensorMeta& a, const TensorMeta& b) {
  const auto sizes = at::infer_size_dimvector(a.sizes, b.sizes);
  return DimVector(sizes.begin(), sizes.end());
}

}  // namespace tessera
