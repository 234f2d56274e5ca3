#include "tests/dtensor/op_oracle.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/core/AutogradState.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/from_term.h"

namespace tessera {

namespace {

/// How many combinations of placements an op is tried in. Rules and plans do not know devices; on others than the CPU
/// it is the kernels, and what they take, that are tested.
size_t max_combinations(c10::Device device) {
  return device.is_cpu() ? 60 : 20;
}

bool differentiable(const Input& input) {
  return input.kind != Input::Kind::Index && input.kind != Input::Kind::Mask;
}

at::Tensor draw_input(const Input& input, at::Generator& generator) {
  const auto floats = at::TensorOptions().dtype(at::kDouble);
  switch (input.kind) {
    case Input::Kind::Normal:
      return at::randn(input.sizes, generator, floats);
    case Input::Kind::Positive:
      return at::rand(input.sizes, generator, floats).add_(0.5);
    case Input::Kind::Probability:
      return at::rand(input.sizes, generator, floats).mul_(0.8).add_(0.1);
    case Input::Kind::Index:
      return at::randint(input.limit, input.sizes, generator, at::TensorOptions().dtype(at::kLong));
    case Input::Kind::Mask:
      return at::randint(2, input.sizes, generator, at::TensorOptions().dtype(at::kBool));
  }
  TESSERA_ASSERT(false, "input kind {}", static_cast<int>(input.kind));
}

/// Values and gradients of all floating results' squares, summed; an undefined gradient stays undefined.
struct ResultsAndGradients {
  Tensors results;
  Tensors gradients;
};

ResultsAndGradients run_with_gradients(const OpCase& test, const Tensors& inputs) {
  Tensors leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(inputs[i].detach());
    leaves.back().set_requires_grad(test.gradients && differentiable(test.inputs[i]));
  }
  ResultsAndGradients outcome;
  outcome.results = test.call(leaves);
  at::Tensor loss;
  for (const auto& result : outcome.results) {
    if (result.defined() && result.requires_grad()) {
      const auto term = result.square().sum();
      loss = loss.defined() ? loss + term : term;
    }
  }
  if (loss.defined()) {
    // In this thread on a GPU too, as ranks have it: tsan does not see what orders libtorch's threads.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    loss.backward();
  }
  for (const auto& leaf : leaves) {
    outcome.gradients.push_back(leaf.grad());
  }
  return outcome;
}

std::vector<Placement> placement_choices(const Input& input) {
  std::vector<Placement> result{Replicate()};
  for (size_t dim = 0; dim < input.sizes.size(); ++dim) {
    result.push_back(Shard(static_cast<int64_t>(dim)));
  }
  if (differentiable(input)) {
    result.push_back(Partial());
  }
  return result;
}

/// Placements of all inputs, one list an input.
using Combination = std::vector<Placements>;

bool is_cut(const Placements& placements) {
  return std::ranges::all_of(placements, [](const Placement& placement) { return placement.is_shard(); });
}

/// Returns whether an input is cut along every axis.
bool cuts_an_input(const Combination& combination) {
  return std::ranges::any_of(combination, is_cut);
}

/// Returns whether a combination can cut an input.
bool can_be_cut(const OpCase& test) {
  return std::ranges::any_of(test.inputs, [](const Input& input) { return !input.sizes.empty(); });
}

/// Every input that has dims is cut along its first one, by all axes.
Combination cut_along_first_dims(const OpCase& test, size_t mesh_ndim) {
  Combination combination;
  for (const auto& input : test.inputs) {
    combination.emplace_back(mesh_ndim, input.sizes.empty() ? Placement(Replicate()) : Placement(Shard(0)));
  }
  return combination;
}

/// Every combination of one placement an input and axis, or an even sample of `most` of them, another one for each
/// case, so that ops of one family, whose rule is the same, are tried in different ones. One of them cuts an input, if
/// it can.
std::vector<Combination> combinations(const OpCase& test, size_t mesh_ndim, size_t most) {
  size_t count = 1;
  for (const auto& input : test.inputs) {
    for (size_t axis = 0; axis < mesh_ndim; ++axis) {
      count *= placement_choices(input).size();
    }
  }
  const size_t taken = std::min(count, most);
  const size_t shift = std::hash<std::string>()(test.name) % std::max<size_t>(count / taken, 1);
  std::vector<Combination> result;
  for (size_t k = 0; k < taken; ++k) {
    size_t number = k == 0 ? 0 : (k * count / taken + shift) % count;  // the first has copies alone
    Combination combination;
    for (const auto& input : test.inputs) {
      const auto options = placement_choices(input);
      Placements placements;
      for (size_t axis = 0; axis < mesh_ndim; ++axis) {
        placements.push_back(options[number % options.size()]);
        number /= options.size();
      }
      combination.push_back(std::move(placements));
    }
    result.push_back(std::move(combination));
  }
  if (can_be_cut(test) && std::ranges::none_of(result, cuts_an_input)) {
    result.back() = cut_along_first_dims(test, mesh_ndim);
  }
  return result;
}

std::string describe_combination(const OpCase& test, const Combination& combination, const DeviceMesh& mesh) {
  std::string text = fmt::format("{} on a mesh [{}] of {}, seed {}:", test.name, fmt::join(mesh.shape(), ", "),
                                 c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true), test.seed);
  for (size_t i = 0; i < combination.size(); ++i) {
    text += fmt::format(" [{}] {}", fmt::join(test.inputs[i].sizes, ", "), to_string(combination[i]));
  }
  return text;
}

void compare(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  TESSERA_CHECK(ExpectationError, actual.defined() == expected.defined(), "{} is {}defined", what,
                actual.defined() ? "" : "un");
  if (!expected.defined()) {
    return;
  }
  TESSERA_CHECK(ExpectationError, is_dtensor(actual), "{} is a plain tensor", what);
  TESSERA_CHECK(ExpectationError, actual.sizes() == expected.sizes() && actual.dtype() == expected.dtype(),
                "{} is {}, expected {}", what, to_string(TensorMeta::of(actual)), to_string(TensorMeta::of(expected)));
  const auto difference = shard_difference(actual, expected, {.rtol = 1e-8, .atol = 1e-9});
  TESSERA_CHECK(ExpectationError, difference.empty(), "{}: {}", what, difference);
}

/// Returns whether the op ran; an in-place one may be refused.
bool check_combination(const OpCase& test, const Tensors& inputs, const ResultsAndGradients& expected,
                       const DeviceMesh& mesh, const Combination& combination) {
  Tensors placed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    placed.push_back(place(inputs[i], mesh, combination[i]));
  }
  ResultsAndGradients actual;
  try {
    actual = run_with_gradients(test, placed);
  } catch (const NotImplementedError&) {
    if (test.in_place) {
      return false;
    }
    throw;
  }
  TESSERA_CHECK(ExpectationError, actual.results.size() == expected.results.size(), "{} results, expected {}",
                actual.results.size(), expected.results.size());
  for (size_t i = 0; i < expected.results.size(); ++i) {
    compare(actual.results[i].detach(), expected.results[i].detach(), fmt::format("result {}", i));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    compare(actual.gradients[i], expected.gradients[i], fmt::format("gradient {}", i));
  }
  return true;
}

bool is_replicated(const Placements& placements) {
  return std::ranges::all_of(placements, [](const Placement& placement) { return placement.is_replicate(); });
}

/// What of an op ran: an in-place op that is always refused would pass otherwise.
struct Ran {
  bool replicated = false;  // on copies alone
  bool cut = false;         // with an input that is cut along every axis

  void add(const Combination& combination) {
    replicated = replicated || std::ranges::all_of(combination, is_replicated);
    cut = cut || cuts_an_input(combination);
  }
  void check(const OpCase& test, const DeviceMesh& mesh) const {
    TESSERA_CHECK(ExpectationError, replicated && (cut || mesh.size() == 1 || !can_be_cut(test)),
                  "{} on a mesh [{}]: refused {}", test.name, fmt::join(mesh.shape(), ", "),
                  replicated ? "wherever a tensor is cut" : "on copies, which the op need not move");
  }
};

std::vector<std::vector<int64_t>> mesh_shapes(c10::Device device) {
  return device.is_cpu() ? std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}}
                         : std::vector<std::vector<int64_t>>{{3}, {2, 2}};
}

void check_op_on(const OpCase& test, c10::Device device) {
  auto generator = make_generator(test.seed);
  Tensors inputs;
  for (const auto& input : test.inputs) {
    inputs.push_back(draw_input(input, generator).to(device));
  }
  const auto expected = run_with_gradients(test, inputs);
  for (const auto& shape : mesh_shapes(device)) {
    const auto list = combinations(test, shape.size(), max_combinations(device));
    run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int) {
      const auto mesh = init_device_mesh(device.type(), shape);
      Ran ran;
      for (const auto& combination : list) {
        try {
          if (check_combination(test, inputs, expected, mesh, combination)) {
            ran.add(combination);
          }
        } catch (const CommError&) {
          throw;
        } catch (const std::exception& failure) {
          throw ExpectationError(describe_combination(test, combination, mesh) + "\n  " + failure.what());
        }
      }
      ran.check(test, mesh);
    });
  }
}

/// What place `coordinate` of `size` holds of `value`, which is then the reduction of all places' terms.
at::Tensor pending_term(const at::Tensor& value, const at::Tensor& other, ReduceOp op, int64_t coordinate,
                        int64_t size) {
  const bool is_first = coordinate == 0;
  switch (op) {
    case ReduceOp::Sum:
      return is_first ? value - other * (size - 1) : other;
    case ReduceOp::Avg:
      return is_first ? value * size - other * (size - 1) : other;
    case ReduceOp::Max:
      return is_first ? value : value - other.abs();
    case ReduceOp::Min:
      return is_first ? value : value + other.abs();
    case ReduceOp::Product:
      return is_first ? value * std::ldexp(1.0, static_cast<int>(size) - 1) : at::full_like(value, 0.5);
  }
  TESSERA_ASSERT(false, "no such reduction");
}

}  // namespace

std::string shard_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  const auto& own = placements(actual);
  if (std::ranges::any_of(own, [](const Placement& placement) { return placement.is_partial(); })) {
    return describe_difference(full_tensor(actual), expected, tolerance);
  }
  const auto shard = distribute_tensor(expected.detach(), device_mesh(actual), own, {.src_data_rank = std::nullopt});
  return describe_difference(to_local(actual), to_local(shard), tolerance);
}

at::Tensor place(const at::Tensor& value, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor term = value;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial()) {
      continue;
    }
    const auto other = value.cos().mul_(0.25 * static_cast<double>(axis + 1));
    term = pending_term(term, other, placements[axis].reduce_op(), mesh.coordinate()[axis], mesh.shape()[axis]);
  }
  return from_term(term, mesh, placements);
}

namespace {

/// With TESSERA_TEST_OPS_ON_GPU_ALONE (tools/gpu_check/run.py) not on the CPU, where there is a GPU: its time is short.
std::vector<c10::Device> devices_of(const OpCase& test) {
  if (test.cpu_only) {
    return {c10::kCPU};
  }
  auto devices = test_devices();
  if (devices.size() > 1 && std::getenv("TESSERA_TEST_OPS_ON_GPU_ALONE") != nullptr) {
    devices.erase(devices.begin());
  }
  return devices;
}

}  // namespace

void check_op(const OpCase& test) {
  for (const auto device : devices_of(test)) {
    check_op_on(test, device);
  }
}

void check_ops(const std::vector<OpCase>& tests) {
  std::string failures;
  for (const auto& test : tests) {
    try {
      check_op(test);
    } catch (const std::exception& failure) {
      failures += fmt::format("\n{}", failure.what());
    }
  }
  TESSERA_CHECK(ExpectationError, failures.empty(), "{}", failures);
}

}  // namespace tessera
