#include "tests/dtensor/opdb/opdb_expected.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/fmax.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include "testing/run_ranks.h"

namespace tessera {

namespace {

constexpr int kRoundingDraws = 4;
constexpr int kNearbyDraws = 3;

using Tensors = std::vector<at::Tensor>;

/// Results of a call, and then what it left in the arguments that it wrote.
using Values = std::vector<c10::IValue>;

Values recorded_results(const OpdbCase& test) {
  return test.content.toGenericDict().at("out").toListRef().vec();
}

/// The distance of two neighbors of a dtype.
struct Neighbors {
  double relative;  // to a number that is not tiny, at most
  double smallest;  // of all
};

template <class Number>
Neighbors neighbors_of() {
  using Limits = std::numeric_limits<Number>;
  return {static_cast<double>(Limits::epsilon()), static_cast<double>(Limits::denorm_min())};
}

Neighbors neighbors_of(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kHalf:
      return neighbors_of<c10::Half>();
    case at::kBFloat16:
      return neighbors_of<c10::BFloat16>();
    case at::kFloat:
      return neighbors_of<float>();
    default:
      return neighbors_of<double>();
  }
}

bool rounds(at::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

/// `dtype`, if it rounds, in the precision of `real`: float or double.
at::ScalarType in_precision(at::ScalarType dtype, at::ScalarType real) {
  return !rounds(dtype) ? dtype : c10::isComplexType(dtype) ? c10::toComplexType(real) : real;
}

Tensors in_precision(const Tensors& tensors, at::ScalarType real) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.to(in_precision(tensor.scalar_type(), real)));
  }
  return result;
}

/// Where the caller asks for a floating dtype, it gets `real`.
void ask_for_precision(const c10::FunctionSchema& schema, torch::jit::Stack& stack, at::ScalarType real) {
  for (size_t i = 0; i < stack.size(); ++i) {
    auto type = schema.arguments()[i].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (type->kind() == c10::TypeKind::ScalarTypeType && stack[i].isInt()) {
      stack[i] = static_cast<int64_t>(in_precision(static_cast<at::ScalarType>(stack[i].toInt()), real));
    }
  }
}

/// A call on plain tensors.
class PlainCall {
 public:
  PlainCall(const OpdbCase& test, const c10::OperatorHandle& op, c10::DeviceType device)
      : test_(test), op_(op), device_(device) {}

  /// `real`: the precision of all that rounds; none: as it is.
  Values run(const Tensors& given, std::optional<at::ScalarType> real = std::nullopt) const {
    const auto inputs = real ? in_precision(given, *real) : given;
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> placed;
    const auto place = [&](size_t number, const at::Tensor&) { return inputs[number].to(device_).clone(); };
    auto stack = make_stack(test_, op_.schema(), place, placed);
    move_device_arguments(stack, device_);
    if (real) {
      ask_for_precision(op_.schema(), stack, *real);
    }
    op_.callBoxed(stack);
    auto values = results_on(stack);
    for (const auto number : written_arguments(test_)) {
      values.emplace_back(placed[number]);
    }
    return values;
  }

 private:
  const OpdbCase& test_;
  const c10::OperatorHandle& op_;
  c10::DeviceType device_;
};

/// Each number of `tensors` that rounds times what `factors` gives for these sizes and dtype.
Tensors times(const Tensors& tensors, const std::function<at::Tensor(at::IntArrayRef, at::ScalarType)>& factors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    if (!rounds(tensor.scalar_type())) {
      result.push_back(tensor);
      continue;
    }
    const auto parts = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
    const auto moved = parts * factors(parts.sizes(), parts.scalar_type());
    result.push_back(tensor.is_complex() ? at::view_as_complex(moved) : moved);
  }
  return result;
}

/// Numbers that are one rounding away, some more and some less.
Tensors moved_by_roundings(const Tensors& tensors, at::Generator& random) {
  return times(tensors, [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return 1 + (2 * at::randint(2, sizes, random, at::dtype(dtype)) - 1) * neighbors_of(dtype).relative;
  });
}

/// Numbers that are up to 1/64 less, so that probabilities, cosines and the like are still such.
Tensors moved_nearby(const Tensors& tensors, at::Generator& random) {
  return times(tensors, [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return (1 - at::rand(sizes, random, at::dtype(at::kFloat)) / 64).to(dtype);
  });
}

/// The dtype of what rounds: floating and complex tensors, and floating numbers.
std::optional<at::ScalarType> rounding_dtype(const c10::IValue& value) {
  if (!value.isTensor()) {
    return value.isDouble() ? std::optional(at::kDouble) : std::nullopt;
  }
  const auto dtype = value.toTensor().scalar_type();
  return rounds(dtype) ? std::optional(dtype) : std::nullopt;
}

/// The largest distances that elements had in two runs of a call.
class Distances {
 public:
  explicit Distances(const Values& values) : largest_(values.size()), relative_(values.size()) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (const auto dtype = rounding_dtype(values[i])) {
        largest_[i] = at::zeros_like(comparable(values[i]));
        relative_[i] = neighbors_of(*dtype).relative;
      }
    }
  }

  /// Leaves out what has other sizes, or is NaN. A run in another dtype than the values' has other roundings: its
  /// distances are made smaller or larger as these are.
  void add(const Values& run, const Values& other) {
    for (size_t i = 0; i < std::min({run.size(), other.size(), largest_.size()}); ++i) {
      const auto dtype = rounding_dtype(run[i]);
      if (!largest_[i].defined() || !dtype || !rounding_dtype(other[i])) {
        continue;
      }
      const auto a = comparable(run[i]), b = comparable(other[i]);
      if (a.sizes() == largest_[i].sizes() && b.sizes() == largest_[i].sizes()) {
        largest_[i] = at::fmax(largest_[i], (a - b).abs() * (relative_[i] / neighbors_of(*dtype).relative));
      }
    }
  }

  const at::Tensor& operator[](size_t i) const { return largest_[i]; }
  bool empty() const {
    return std::ranges::none_of(largest_, [](const at::Tensor& distances) { return distances.defined(); });
  }

 private:
  Tensors largest_;
  std::vector<double> relative_;
};

/// How far repeated calls are from `values`, and from themselves in float64.
Distances rounding_errors(const PlainCall& call, const Tensors& inputs, const Values& values) {
  Distances errors(values);
  if (errors.empty()) {
    return errors;
  }
  // What raises says nothing, as where a moved input leaves what the op is defined for, or there is no such kernel.
  const auto attempt = [](const auto& body) {
    try {
      body();
    } catch (const std::exception&) {
    }
  };
  const auto any_input = [&](const auto& is_so) {
    return std::ranges::any_of(inputs, [&](const at::Tensor& input) { return is_so(input.scalar_type()); });
  };
  // What is in float64 itself is computed in float32, whose error is as many roundings.
  const bool is_double = any_input([](at::ScalarType dtype) { return c10::toRealValueType(dtype) == at::kDouble; });
  const auto precision = is_double ? std::optional(at::kFloat) : std::nullopt;
  const auto add_error_at = [&](const Tensors& moved) {
    const auto near = precision ? in_precision(moved, *precision) : moved;
    attempt([&] { errors.add(call.run(near, precision), call.run(near, at::kDouble)); });
  };
  add_error_at(inputs);
  if (any_input(rounds)) {
    auto random = make_generator(1);
    for (int draw = 0; draw < kRoundingDraws; ++draw) {
      attempt([&] { errors.add(values, call.run(moved_by_roundings(inputs, random))); });
    }
    for (int draw = 0; draw < kNearbyDraws; ++draw) {
      add_error_at(moved_nearby(inputs, random));
    }
  }
  return errors;
}

/// rtol 1e-3 and atol 1e-4 of the largest finite value; 2e-2 and 4e-2 where each partial result is rounded to 16 bits.
at::Tensor bound_of_largest(const at::Tensor& want, at::ScalarType dtype) {
  const auto finite = want.masked_select(want.isfinite());
  const double scale = finite.numel() > 0 ? std::max(1.0, finite.abs().max().item().toDouble()) : 1.0;
  const bool is_coarse = dtype == at::kHalf || dtype == at::kBFloat16;
  return want.abs() * (is_coarse ? 2e-2 : 1e-3) + (is_coarse ? 4e-2 : 1e-4) * scale;
}

/// Makes bounds, and counts what they come from.
class BoundMaker {
 public:
  explicit BoundMaker(std::array<int64_t, kBoundSourceCount>& elements) : elements_(elements) {}

  ExpectedValue make(const c10::IValue& value, const at::Tensor& error) {
    const auto dtype = rounding_dtype(value);
    if (!dtype) {
      return {value, {}};
    }
    const auto want = comparable(value);
    const auto neighbors = neighbors_of(*dtype);
    const auto own = (want.abs() * neighbors.relative).clamp_min(neighbors.smallest);
    const auto fine = at::maximum(own, error) * kRoundingErrors;
    const auto coarse = bound_of_largest(want, *dtype);
    const auto is_coarse = coarse < fine;
    count(BoundSource::LargestElement, is_coarse);
    count(BoundSource::OwnRounding, (error <= own).logical_and(is_coarse.logical_not()));
    count(BoundSource::RepeatedCalls, (error > own).logical_and(is_coarse.logical_not()));
    return {value, at::where(is_coarse, coarse, fine)};
  }

 private:
  void count(BoundSource source, const at::Tensor& mask) {
    elements_[static_cast<size_t>(source)] += mask.sum().item().toLong();
  }

  std::array<int64_t, kBoundSourceCount>& elements_;
};

}  // namespace

std::vector<size_t> written_arguments(const OpdbCase& test) {
  std::vector<size_t> numbers;
  for (const auto& number : test.content.toGenericDict().at("mutated").toListRef()) {
    numbers.push_back(static_cast<size_t>(number.toInt()));
  }
  return numbers;
}

std::vector<c10::IValue> results_on(const torch::jit::Stack& stack) {
  std::vector<c10::IValue> results;
  for (const auto& value : stack) {
    flatten(value, results);
  }
  if (stack.empty()) {
    results.emplace_back();
  }
  return results;
}

void move_device_arguments(torch::jit::Stack& stack, c10::DeviceType device) {
  for (auto& value : stack) {
    if (value.isDevice() && value.toDevice().is_cpu()) {
      value = c10::Device(device);
    }
  }
}

at::Tensor comparable(const c10::IValue& value) {
  if (value.isDouble()) {
    return at::scalar_tensor(value.toDouble(), at::dtype(at::kDouble));
  }
  const auto tensor = value.toTensor().cpu();
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()).to(at::kDouble) : tensor.to(at::kDouble);
}

ExpectedCall expected_call(const OpdbCase& test, const c10::OperatorHandle& op, c10::DeviceType device,
                           bool expects_recorded) {
  const auto inputs = test.tensors();
  const PlainCall call(test, op, device);
  ExpectedCall expected;
  Values values = recorded_results(test);
  if (expects_recorded) {
    const auto written = test.content.toGenericDict().at("mutated_out").toListRef();
    values.insert(values.end(), written.begin(), written.end());
  } else {
    expected.otherwise = std::move(values);
    try {
      values = call.run(inputs);
    } catch (const c10::Error&) {
      expected.raises = true;
      return expected;
    }
  }
  const bool is_meta = test.content.toGenericDict().at("check").toStringRef() == "meta";
  const auto errors = is_meta ? Distances(Values()) : rounding_errors(call, inputs, values);
  BoundMaker bounds(expected.elements);
  const size_t num_results = values.size() - written_arguments(test).size();
  for (size_t i = 0; i < values.size(); ++i) {
    auto value = is_meta ? ExpectedValue{values[i], {}} : bounds.make(values[i], errors[i]);
    (i < num_results ? expected.results : expected.written).push_back(std::move(value));
  }
  return expected;
}

}  // namespace tessera
